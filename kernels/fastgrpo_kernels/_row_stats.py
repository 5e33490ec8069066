"""What the Triton kernels share: a logit from a raw product, and a row's logprob and entropy from its sums.

A row is summed over exponentials that are taken from a shift k near its largest logit, and without its target y:

    S = sum over v != y of exp(l_v - k),    M = sum over v != y of exp(l_v - k) (l_v - k),    g = l_y - k

    logprob = -ln(1 + S e^-g),    entropy = ln(S + e^g) - (M + g e^g) / (S + e^g)

The shift is the target's own logit wherever that is not more than LARGEST below the row's maximum (a sampled token's
never is): then g = 0, the row is summed in one sweep, nothing cancels, and a probability that is nearly 1 keeps the
digits of what it lacks to 1. A logprob is never above 0 and an entropy never below.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(60.0)  # nats above the shift: exp of it leaves fp32 and bf16 room on both sides
SHIFT_FLOOR = tl.constexpr(-1000.0)  # exp of it is 0; keeps 0 * -inf (a token masked by its bias) out of the sums


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)  # exact at both infinities; error 1e-7 of 1


@triton.jit
def logit_of(product, slope, inverse_cap, HAS_SOFTCAP: tl.constexpr):
    """(logit, its derivative by the product / slope). slope: logit_scale / temperature of the row; inverse_cap:
    logit_scale / softcap."""
    if HAS_SOFTCAP:
        bounded = tanh(product * inverse_cap)
        logit, derivative = bounded * (slope / inverse_cap), 1.0 - bounded * bounded
    else:
        logit, derivative = product * slope, 1.0
    return logit, derivative


@triton.jit
def log1p(x):
    """ln(1 + x) for x >= 0, exact to a few ulp also near 0 (W. Kahan's form)."""
    grown = 1.0 + x
    exact = tl.log(grown) * (x / (grown - 1.0))
    return tl.where(grown == 1.0, x, tl.where(grown > 1e6, tl.log(grown), exact))


@triton.jit
def row_result(target_gap, rest_sum, rest_mean):
    """(logprob, entropy, sum) from g, S and M; sum = S + e^g."""
    exp_target = tl.exp2(target_gap * LOG2E)
    total = rest_sum + exp_target
    near = target_gap > -LARGEST
    relative = rest_sum / tl.where(near, exp_target, 1.0)
    logprob = tl.where(near, -log1p(relative), target_gap - tl.log(total))
    weighted = rest_mean + exp_target * tl.maximum(target_gap, SHIFT_FLOOR)
    log_total = tl.where(target_gap == 0.0, log1p(rest_sum), tl.log(total))
    entropy = log_total - weighted / total
    return logprob, tl.where(entropy < 0.0, 0.0, entropy), total

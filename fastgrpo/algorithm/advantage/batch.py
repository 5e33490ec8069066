"""Estimators that scale over the whole step. `whiten` weighs each sequence by its tokens, as verl does: it makes mean 0
and deviation 1 over the tokens of the step, not over its sequences.

    reinforce_plus_plus            whiten(r_i)                     arXiv 2501.03262; needs no groups
    reinforce_plus_plus_baseline   whiten(r_i - group mean)        the same, section on the variant with a baseline
    gdpo                           whiten(sum_f w_f grpo(score_f)) arXiv 2601.05242

A group whose rewards are all equal is then not exactly 0 but at the common shift of the step (what whitening
subtracts); only a step without any difference is 0 everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastgrpo.algorithm.advantage.graded import Graded, centred
from fastgrpo.algorithm.advantage.group import grpo

VAR_EPS = 1e-8  # added to the variance of the step, as verl does


def reinforce_plus_plus(graded: Graded, *, by_std: bool) -> Tensor:
    return whiten(graded.rewards_N, graded)


def reinforce_plus_plus_baseline(graded: Graded, *, by_std: bool) -> Tensor:
    return whiten(centred(graded), graded)


def gdpo(graded: Graded, *, by_std: bool) -> Tensor:
    """Each reward function's score is compared within the group on its own and only then weighted, so that a function
    of large spread does not drown the others. Raises ValueError without scores."""
    if graded.scores_NF is None or graded.weights_F is None:
        raise ValueError("gdpo needs each reward function's scores (scores_NF) and weights (weights_F)")
    total_N = torch.zeros_like(graded.rewards_N)
    for score_N, weight in zip(graded.scores_NF.unbind(1), graded.weights_F, strict=True):
        one = replace(graded, rewards_N=score_N.where(graded.scored_N, float("nan")))
        total_N = total_N + weight * grpo(one, by_std=by_std)
    return whiten(total_N, graded)


def whiten(x_N: Tensor, graded: Graded) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens of the scored sequences; the variance has ddof 1. Exactly 0
    where all x are equal, and for an unscored sequence."""
    scored_N = graded.scored_N & (graded.tokens_N > 0)
    values_N = torch.where(scored_N, x_N, 0.0)
    known = values_N[scored_N]
    if known.numel() == 0 or known.max() == known.min():
        return torch.zeros_like(values_N)
    tokens_N = torch.where(scored_N, graded.tokens_N.double(), 0.0)
    total = tokens_N.sum()
    mean = (tokens_N * values_N).sum() / total
    variance = (tokens_N * (values_N - mean).square()).sum() / (total - 1)
    return torch.where(scored_N, (values_N - mean) / (variance + VAR_EPS).sqrt(), 0.0)

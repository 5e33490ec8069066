"""Probes: short answers drawn for the parity gate alone, where those that are trained on cannot be compared.

top_p, top_k, min_p and a penalty give tokens the logprobs of a cut vocabulary, which the trainer does not compute. So
after the rollout, under the same weights and with its prompts in the prefix cache, every engine draws a few short
answers at the same temperature from the whole vocabulary:

    this engine's requests --its first prompts--> 16 probes of 16 tokens --engine--> tokens, logprobs
                                                                     all engines' --one gather--> the gate, every rank

Nothing else sees them: they are not scored, not trained on and in no metric but the gate's (gap/*). Their seeds are
hashes of those of the rollout, which is drawn before and is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastgrpo.mesh import Mesh
from fastgrpo.records import Request, Rollout, Sampling
from fastgrpo.rollout.draw import own_requests
from fastgrpo.rollout.engine import RolloutEngine, reports_logprobs, sample_seed

PROBES = 16  # an engine: with their tokens enough for a mean to stay well within 0.03 nats
TOKENS = 16  # at most, of each


def probe_sampling(sampling: Sampling) -> Sampling | None:
    """How probes are drawn; None where the rollout itself can be compared, or is greedy."""
    if reports_logprobs(sampling) or sampling.temperature == 0:
        return None
    return Sampling(sampling.temperature, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)


def probe_requests(requests: Sequence[Request]) -> list[Request]:
    """PROBES requests for the prompts of `requests`, each prompt once before any is asked twice. A pure function."""
    firsts = list({request.uid: request for request in reversed(requests)}.values())[::-1]
    return [
        replace(
            first,
            sample=number,
            seed=sample_seed(first.seed, 0, first.attempt, f"probe of {first.uid}", number),
            max_tokens=min(TOKENS, first.max_tokens),
        )
        for number in range(PROBES)
        for first in [firsts[number % len(firsts)]]
    ]


def draw_probes(
    engine: RolloutEngine, requests: Sequence[Request], group_size: int, sampling: Sampling, mesh: Mesh
) -> list[Rollout]:
    """This engine's probes, for prompts of its share of `requests`; an engine without a share is looked at, too. Inside
    `engine.awake`, after `draw_own`; every rank must call it."""
    wanted = probe_sampling(sampling)
    if wanted is None:
        return []
    return engine.generate(probe_requests(own_requests(requests, group_size, mesh) or requests), wanted)


def share_probes(own: Sequence[Rollout], mesh: Mesh) -> list[Rollout]:
    """All engines' probes on every rank; a collective. The ranks of one engine drew the same."""
    return [probe for part in mesh.gather(list(own) if mesh.tp_rank == 0 else []) for probe in part]

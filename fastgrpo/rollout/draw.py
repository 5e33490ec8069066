"""From prompts to scored rollouts on every rank: who draws what, and how the results come together.

    prompts (the same list on every rank) -> requests, in order
        engine e draws whole groups, as many tokens as the others     (drawing_rows)
        tp rank 0 of each engine scores them in worker processes      (reward/)
        one gather: every rank then holds all N rollouts and scores, in the order of the requests; or all hear of the
        mistake in a reward that one of them met, and stop alike

Rollouts are token ids and a few numbers each (9 bytes a token), so holding all of a step's on every rank is cheap; in
return every rank computes advantages, counts and the micro-batch plan for itself, and any sequence can be trained
anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from fastgrpo.errors import UserError
from fastgrpo.mesh import Mesh
from fastgrpo.records import Prompt, Request, RewardRequest, Rollout, Sample, Sampling
from fastgrpo.reward import Rewards
from fastgrpo.rollout.engine import RolloutEngine, sample_seed
from fastgrpo.rollout.lengths import divide_groups
from fastgrpo.stopping import Mistaken


def make_requests(
    prompts: Sequence[Prompt],
    n: int,
    *,
    run_seed: int,
    step: int,
    max_tokens: int,
    attempt: int = 0,
    expected: Callable[[str], float] = lambda uid: 0.0,
) -> list[Request]:
    """n requests a prompt, prompt by prompt. `attempt`: round of dynamic sampling within the step. `expected`: tokens
    of an answer to the prompt of that uid (lengths.py)."""
    guesses = {prompt.uid: expected(prompt.uid) for prompt in prompts}
    return [
        Request(prompt.uid, sample, attempt, prompt.ids, seed, max_tokens, guesses[prompt.uid])
        for prompt in prompts
        for sample in range(n)
        for seed in [sample_seed(run_seed, step, attempt, prompt.uid, sample)]
    ]


def drawing_rows(requests: Sequence[Request], group_size: int, engines: int) -> list[list[int]]:
    """Which of the requests each engine draws: whole groups, perhaps none, in order (lengths.divide_groups)."""
    groups = divide_groups([request.expected_tokens for request in requests[::group_size]], engines)
    return [[group * group_size + sample for group in own for sample in range(group_size)] for own in groups]


def own_requests(requests: Sequence[Request], group_size: int, mesh: Mesh) -> list[Request]:
    """This rank's engine's share of `requests`."""
    return [requests[row] for row in drawing_rows(requests, group_size, mesh.engines)[mesh.engine]]


def draw_own(
    engine: RolloutEngine, requests: Sequence[Request], group_size: int, sampling: Sampling, mesh: Mesh
) -> list[Rollout]:
    """This rank's engine's share of `requests`, drawn. Inside `engine.awake`; every rank must call it."""
    return engine.generate(own_requests(requests, group_size, mesh), sampling)


def score_own(
    rewards: Rewards,
    rollouts: Sequence[Rollout],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    *,
    step: int,
) -> list[Sample] | UserError:
    """This engine's rollouts, decoded and scored, on its first rank; nothing on its others. A mistake in a reward is
    raised in the first step, and returned in a later one, which share_samples treats: there is something to save."""
    if mesh.tp_rank != 0 or not rollouts:  # batch_decode makes one text of no sequences
        return []
    by_uid = {prompt.uid: prompt for prompt in prompts}
    responses = tokenizer.batch_decode(
        [rollout.response_ids.tolist() for rollout in rollouts], skip_special_tokens=True
    )
    requests = []
    for rollout, response in zip(rollouts, responses, strict=True):
        prompt = by_uid[rollout.uid]
        size = len(rollout.response_ids)
        requests.append(
            RewardRequest(
                prompt.text,
                response,
                prompt.reference,
                prompt.meta,
                step,
                prompt.uid,
                rollout.sample,
                size,
                np.asarray(rollout.response_ids, np.int32).tobytes(),
            )
        )
    try:
        scores = rewards.score(requests)
    except UserError as mistake:
        if step == 0:
            raise
        return mistake
    return [Sample(*parts) for parts in zip(rollouts, responses, scores, strict=True)]


def share_samples(own: Sequence[Sample] | UserError, mesh: Mesh, rows: Sequence[Sequence[int]] = ()) -> list[Sample]:
    """All engines' samples, in the order of the requests, on every rank; a collective. `rows`: those of each engine
    (drawing_rows); none: each drew the ones that follow those of the engine before. Raises Mistaken, on all ranks
    alike, when one of them brings a mistake instead."""
    drawn: list[Sample] = []
    for part in mesh.gather(own if isinstance(own, UserError) else list(own)):
        if isinstance(part, UserError):
            raise Mistaken(part)
        drawn += part
    if not rows:
        return drawn
    places = zip([row for engine in rows for row in engine], drawn, strict=True)
    return [sample for _, sample in sorted(places, key=lambda place: place[0])]

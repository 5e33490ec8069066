"""The plan in words: lines for the terminal, a row for a Markdown table, an explanation when memory is short."""

from __future__ import annotations

from operator import attrgetter

from fastgrpo.config import Layout, RunConfig
from fastgrpo.plan import constants as k
from fastgrpo.plan.advice import best_change
from fastgrpo.plan.choose import Plan
from fastgrpo.plan.job import Sizes
from fastgrpo.plan.memory import Peak
from fastgrpo.plan.settle import DECIDED, make_plan

_COLUMNS = ("experiment", "GPUs", "GiB each", "training", "rollout", "cache holds", "host", "the plan decides")


def markdown_head() -> list[str]:
    return [f"| {' | '.join(_COLUMNS)} |", f"| {' | '.join('---' for _ in _COLUMNS)} |"]


def gib(size: float) -> str:
    return f"{size / k.GIB:.1f}"


def memory_lines(plan: Plan) -> list[str]:
    """What a GPU holds at each peak, in GiB, and what a node's host holds; the largest kinds by name."""
    reserve = "; {} with what lies beside it and a reserve"
    notes = {name: reserve.format(gib(plan.needs[name])) for name in ("training", "rollout")}
    if plan.job.host_bytes is not None:
        notes["host (a node)"] = f"; it has {gib(plan.job.host_bytes)}"
    peaks = {"training": plan.training, "sync": plan.sync, "rollout": plan.rollout, "host (a node)": plan.host}
    rows = [(name, peak.total, _parts(peak) + notes.get(name, "")) for name, peak in peaks.items()]
    title = f"{'memory':<18}{gib(plan.gpu_bytes):>9}  GiB a GPU         planned peaks, at the longest sequences"
    lines = [title, *(f"  {name:<16}{gib(size):>9}  {'GiB':<18}{note}" for name, size, note in rows)]
    wanted = plan.job.wanted_sequences
    cache = f"at their longest in the cache of {gib(plan.kv_bytes)} GiB; a step has {wanted} for an engine at once"
    return [*lines, f"  {'an engine holds':<16}{plan.sequences:>9}  {'sequences':<18}{cache}"]


def decision_lines(asked: RunConfig, settled: RunConfig) -> list[str]:
    """The options that were left to the plan, with the values that it gave them."""
    found = decisions(asked, settled)
    return [f"  {'decided':<16}{'':>9}  {'by the plan':<18}{', '.join(found)}"] if found else []


def decisions(asked: RunConfig, settled: RunConfig) -> list[str]:
    return [
        f"{key}={_value(attrgetter(key)(settled))}"
        for key in DECIDED
        if attrgetter(key)(asked) is None and attrgetter(key)(settled) is not None
    ]


def markdown_row(name: str, asked: RunConfig, settled: RunConfig, plan: Plan) -> str:
    found = [text.removeprefix("actor.") for text in decisions(asked, settled)]
    shown = [text for text in found if not text.endswith(("=false", "mlp_slices=1", "tensor_model_parallel_size=1"))]
    cells = (
        f"`{name}`",
        f"{plan.job.world}",
        gib(plan.gpu_bytes),
        gib(plan.training_needs),
        gib(plan.rollout_needs),
        f"{plan.sequences} of {plan.job.wanted_sequences}",
        gib(plan.host.total),
        ", ".join(f"`{text}`" for text in shown),
    )
    return f"| {' | '.join(cells)} |"


def explain(config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int, phase: str | None = None) -> str:
    """The plan's view of a configuration, and the one change of it that would help most.

    `phase`: where memory ran out, "training" or "rollout"; None: wherever the plan is tightest, the host's memory if
    that alone is short. For a plan that does not fit, and for torch's OutOfMemoryError.
    """
    plan = make_plan(config, sizes, layout, gpu_bytes)
    verdict = _room(plan.short_of(phase))
    needs = f"training {gib(plan.training_needs)} GiB, rollout {gib(plan.rollout_needs)} GiB"
    lines = [
        f"memory: on GPUs of {gib(gpu_bytes)} GiB the plan {verdict} (with reserves: {needs})",
        *memory_lines(plan),
    ]
    if plan.job.host_bytes is not None:
        lines.insert(
            1, f"host memory: of the {gib(plan.job.host_bytes)} GiB of a node it {_room(plan.short_of('host'))}"
        )
    host_alone = phase is None and plan.shortfall <= 0 < plan.short_of("host")
    return "\n".join([*lines, advice_line(config, sizes, layout, gpu_bytes, "host" if host_alone else phase)])


def advice_line(config: RunConfig, sizes: Sizes, layout: Layout, gpu_bytes: int, phase: str | None = None) -> str:
    """The one change that helps most with `phase`, "host" being one; what to do when there is none."""
    wants = "a host with more memory" if phase == "host" else "more GPUs"
    change = best_change(config, sizes, layout, gpu_bytes, phase)
    if change is None:
        instead = wants if phase == "host" else "larger GPUs"
        return f"no single option frees memory: use {instead}, a smaller model or shorter sequences"
    after = change.plan.short_of(phase)
    if after <= 0:
        result = f"by the plan it leaves {gib(-after)} GiB then"
    else:
        result = f"by the plan it is still {gib(after)} GiB short then: take {wants} as well"
    return f"what helps most: {change.text} ({result})"


def verdict(plan: Plan) -> str:
    """In a few words."""
    short = {"": plan.shortfall, " of host memory": plan.short_of("host")}
    missing = [f"{gib(size)} GiB{what}" for what, size in short.items() if size > 0]
    return f"is short of {' and '.join(missing)}" if missing else "fits"


def _room(short: int) -> str:
    return f"is {gib(short)} GiB short" if short > 0 else f"should leave {gib(-short)} GiB"


def _parts(peak: Peak) -> str:
    """Kinds of at least 0.05 GiB, the largest first."""
    shown = sorted((part for part in peak.parts if part[1] >= 0.05 * k.GIB), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in shown)


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)

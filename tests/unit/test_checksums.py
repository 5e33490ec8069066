"""Checksums of what an engine was sent and of what it holds: their values, how shards add up, what they find."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollout_hf import OneRank, export_of, tiny_model
from torch import Tensor

from fastgrpo.config import RunConfig
from fastgrpo.mesh import build_mesh
from fastgrpo.rollout.checksums import WeightCheck, checksum, layout
from fastgrpo.rollout.hf import HfEngine

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_a_checksum_is_the_sum_of_the_bits() -> None:
    assert checksum(torch.tensor([1.0, 2.0]), torch.float32) == 0x3F800000 + 0x40000000
    assert checksum(torch.tensor([1.0, 2.0]), torch.bfloat16) == 0x3F80 + 0x4000
    assert checksum(torch.tensor([-2.0]), torch.bfloat16) == 0xC000 - 2**16  # signed
    assert checksum(torch.tensor([0.0, -0.0]), torch.float32) == 0
    assert checksum(torch.empty(0), torch.float32) == 0
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert checksum(values, torch.float32) == checksum(values.flip(0).view(20, 50).t(), torch.float32)
    moved = values.clone()
    moved[7] = torch.nextafter(moved[7], torch.tensor(9.0))
    assert abs(int(checksum(values, torch.float32)) - int(checksum(moved, torch.float32))) == 1
    many = torch.full((1 << 20,), -1.0)  # far beyond 32 bits
    assert checksum(many, torch.float32) == (0xBF800000 - 2**32) << 20


@pytest.mark.parametrize(
    ("held", "sent", "tp", "rows", "copies"),
    [
        ((48, 8), [(64, 8), (16, 8), (16, 8)], 2, [(0, 32), (32, 40), (40, 48)], [1, 1, 1]),
        ((64, 8), [(128, 8), (32, 8), (32, 8)], 4, [(0, 32), (32, 48), (48, 64)], [1, 2, 2]),  # 2 key heads, 4 ranks
        ((64,), [(64,), (32,), (32,)], 2, [(0, 32), (32, 48), (48, 64)], [1, 1, 1]),  # biases
        ((96, 8), [(64, 8), (16, 8), (16, 8)], 1, [(0, 64), (64, 80), (80, 96)], [1, 1, 1]),
        ((6, 8), [(6, 8), (6, 8)], 2, [(0, 3), (3, 6)], [1, 1]),
    ],
)
def test_which_rows_are_whose(held, sent, tp, rows, copies) -> None:
    found = layout(held, sent, tp)
    assert [(part.start, part.stop) for part, _ in found] == rows and [count for _, count in found] == copies


def test_a_single_tensor_is_cut_or_copied() -> None:
    whole = slice(None)
    assert layout((8,), [(8,)], 4) == [(whole, 4)] and layout((2, 8), [(8, 8)], 4) == [(whole, 1)]
    assert layout((64, 8), [(97, 8)], 2) == [(whole, 1)]  # a vocabulary padded to 128
    assert layout((8,), [(8,)], 1) == [(whole, 1)] and layout((8,), [], 1) == []
    with pytest.raises(
        RuntimeError, match=r"cannot tell which of a parameter's 50 rows are whose.*\[64, 16, 16\] rows"
    ):
        layout((50, 8), [(64, 8), (16, 8), (16, 8)], 2)


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    """Four query heads and one key head of 4, so that two ranks hold the key head twice; a vocabulary of 97."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (97, 6), "norm.weight": (6,)}
    for part, rows in (("q_proj", 16), ("k_proj", 4), ("v_proj", 4)):
        shapes |= {f"layers.0.attn.{part}.weight": (rows, 6), f"layers.0.attn.{part}.bias": (rows,)}
    shapes |= {f"layers.0.mlp.{part}.weight": (10, 6) for part in ("gate_proj", "up_proj")}
    shapes["layers.0.mlp.down_proj.weight"] = (6, 10)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def held_by(weights: dict[str, Tensor], tp: int, rank: int) -> dict[str, Tensor]:
    """As vLLM lays them out: embeddings and first matrices cut by rows, padded and fused; the second by columns."""
    padded = torch.cat([weights["embed.weight"], torch.zeros(128 - 97, 6)])
    held = {"embed.weight": padded.chunk(tp)[rank], "norm.weight": weights["norm.weight"].clone()}
    for kind in ("weight", "bias"):
        q, k, v = (weights[f"layers.0.attn.{part}.{kind}"] for part in PACKED["qkv_proj"])
        held[f"layers.0.attn.qkv_proj.{kind}"] = torch.cat([q.chunk(tp)[rank], k, v])
    gate, up = (weights[f"layers.0.mlp.{part}.weight"].chunk(tp)[rank] for part in PACKED["gate_up_proj"])
    held["layers.0.mlp.gate_up_proj.weight"] = torch.cat([gate, up])
    held["layers.0.mlp.down_proj.weight"] = weights["layers.0.mlp.down_proj.weight"].chunk(tp, dim=1)[rank].clone()
    return held


Damage = Callable[[dict[str, Tensor], int], object]


def on_a_rank(damage: Damage, dtype: torch.dtype = torch.float32) -> str:
    mesh = build_mesh("cpu", sp=1, tp=2)
    check = WeightCheck(dtype, 2, mesh.tp_group)
    weights = weights_of()
    assert [name for name, _ in check.noting(iter(weights.items()))] == list(weights)
    held = held_by(weights, 2, mesh.rank)
    damage(held, mesh.rank)
    try:
        check.compare(held.items(), PACKED)
    except RuntimeError as error:
        return str(error)
    return ""


def a_key_head_on_one_rank(held: dict[str, Tensor], rank: int) -> None:
    if rank == 1:
        held["layers.0.attn.qkv_proj.weight"][9, 2].mul_(1.0001)


def gate_and_up_exchanged(held: dict[str, Tensor], rank: int) -> None:
    name = "layers.0.mlp.gate_up_proj.weight"
    held[name] = held[name].roll(5, dims=0)


def rows_of_padding(held: dict[str, Tensor], rank: int) -> None:
    held["embed.weight"][-1] += rank


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda held, rank: None, None),
        (a_key_head_on_one_rank, ["layers.0.attn.k_proj.weight"]),
        (gate_and_up_exchanged, ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"]),
        (lambda held, rank: held["norm.weight"][0].add_(rank), ["norm.weight"]),
        (rows_of_padding, ["embed.weight"]),
    ],
)
def test_the_ranks_of_a_tp_group_find_it_together(ranks: Any, damage: Damage, names: list[str] | None) -> None:
    first, second = ranks(2).run(on_a_rank, damage)
    assert first == second
    if names is None:
        assert first == ""
    else:
        assert f"other bits than it was sent in {len(names)} of 11 tensors: {', '.join(names)}. " in first


def test_an_engine_in_another_dtype_is_compared_in_its_own() -> None:
    weights = weights_of()
    check = WeightCheck(torch.bfloat16)
    list(check.noting(iter(weights.items())))
    held = {name: tensor.bfloat16() for name, tensor in held_by(weights, 1, 0).items()}
    held["embed.weight"] = held["embed.weight"].float()  # a head kept wider holds the same numbers
    check.compare(held.items(), PACKED)


def test_a_tensor_without_a_place_is_named() -> None:
    check = WeightCheck(torch.float32)
    list(check.noting(iter({"a.weight": torch.ones(2), "b.weight": torch.ones(2)}.items())))
    with pytest.raises(RuntimeError, match=r"the engine has no parameter for b\.weight\.$"):
        check.compare([("a.weight", torch.ones(2)), ("c.weight", torch.ones(2))])


def engine_of(kind: type[HfEngine], folder: Path, check: bool = True) -> HfEngine:
    config = RunConfig()
    config.rollout.name, config.rollout.check_weight_update = "hf", check
    return kind(config, OneRank(), folder, (3,))  # pyright: ignore[reportArgumentType]


PAIR = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")


class Renamed(HfEngine):
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        swapped = dict(zip(PAIR, reversed(PAIR), strict=True))
        super()._load((swapped.get(name, name), tensor) for name, tensor in weights)


class OneElement(HfEngine):
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        super()._load(weights)
        element = self._model.get_parameter(PAIR[1])[3:4, 5]
        element.copy_(torch.nextafter(element, torch.full_like(element, 9.0)))


class NeverLoads(HfEngine):
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        list(weights)


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Renamed, ", ".join(PAIR)), (OneElement, PAIR[1]), (NeverLoads, "model.embed_tokens.weight, model.layers.0")],
)
def test_what_the_hf_engine_holds_is_compared(kind: type[HfEngine], names: str, tmp_path: Path) -> None:
    export = export_of(tiny_model(tmp_path, seed=3))
    with pytest.raises(RuntimeError, match=rf"other bits than it was sent.*: {re.escape(names)}"):
        engine_of(kind, tmp_path).awake(export, 0).__enter__()
    with engine_of(kind, tmp_path, check=False).awake(export, 0):
        pass  # only on request


def test_an_honest_engine_passes_and_is_looked_at_whenever_it_wakes(tmp_path: Path) -> None:
    engine = engine_of(HfEngine, tmp_path) if tiny_model(tmp_path) else None
    assert engine is not None
    for version, seed in enumerate((0, 1)):
        for _ in range(2):
            with engine.awake(export_of(tiny_model(None, seed)), version):
                pass
    engine._model.get_parameter(PAIR[0])[0, 0] += 1  # while it slept
    with pytest.raises(RuntimeError, match=f"in 1 of 20 tensors: {PAIR[0]}"):
        engine.awake(export_of(tiny_model(None, 1)), 1).__enter__()

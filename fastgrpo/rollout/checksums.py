"""Whether an engine holds what it was sent, bit for bit: a checksum of every tensor, on request.

    export --each tensor, as it passes--> sum of its bits                                       (sent)
    engine's parameters --cut into the tensors they were made of--> sums, over the TP group     (held)
    engine's buffers    --nobody sends them--> the bytes that they had when it was built

A checksum is the sum of a tensor's elements, their bits read as integers. It does not depend on the order of its
terms, so those of the shards of a TP group add up to that of the whole, and what every rank holds counts once a rank.
Rows that pad a vocabulary are zeros and add nothing. One changed element always shows, a tensor in another's place or
never written does unless the sums agree by chance; elements exchanged within one tensor do not, nor what is computed
with them: that is the parity gate's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastgrpo.errors import RunError

_INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
_SHOWN = 5


class WeightCheck:
    """One engine's sums, of the last weights that it was sent. `dtype`: that of the engine's weights."""

    def __init__(self, dtype: torch.dtype, tp: int = 1, tp_group: dist.ProcessGroup | None = None) -> None:
        self._dtype, self._tp, self._tp_group = dtype, tp, tp_group
        self._sent: dict[str, tuple[torch.Size, Tensor]] = {}

    def noting(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; each is summed before it is handed on."""
        self._sent = {}
        for name, tensor in weights:
            self._sent[name] = tensor.shape, checksum(tensor, self._dtype)
            yield name, tensor

    def compare(self, held: Iterable[tuple[str, Tensor]], packed: Mapping[str, Sequence[str]] | None = None) -> None:
        """A collective over the ranks of the engine. `held`: this rank's parameters under the engine's names; `packed`:
        which modules are made of which, stacked by rows, e.g. {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.

        Raises RuntimeError with the names of tensors that differ or are nowhere."""
        parts = _parts(self._sent, packed or {})
        names: list[str] = []
        found: list[Tensor] = []
        wanted: list[Tensor] = []
        for engine_name, tensor in held:
            sent = parts.get(engine_name, [])
            shapes = [self._sent[name][0] for name in sent]
            for name, (rows, copies) in zip(sent, layout(tensor.shape, shapes, self._tp), strict=True):
                names.append(name)
                found.append(checksum(tensor[rows] if len(sent) > 1 else tensor, self._dtype))
                wanted.append(copies * self._sent[name][1])
        nowhere = sorted(set(self._sent) - set(names))
        if nowhere:
            raise RuntimeError(f"rollout.check_weight_update: the engine has no parameter for {_shown(nowhere)}.")
        sums = torch.stack(found).cpu()
        if self._tp > 1:
            dist.all_reduce(sums, group=self._tp_group)
        differs = (sums != torch.stack(wanted).cpu()).tolist()
        if any(differs):
            wrong = [name for name, bad in zip(names, differs, strict=True) if bad]
            raise RunError(
                f"rollout.check_weight_update: the engine holds other bits than it was sent in {len(wrong)} of "
                f"{len(names)} tensors: {_shown(wrong)}. A failed or partial load, a name that leads to another "
                "parameter, or memory that was overwritten since."
            )


class BufferCheck:
    """What a deep sleep loses and no weight update brings back, such as rotary tables: a model's buffers as they were,
    in host memory, to compare with them as they are, byte by byte. They are small."""

    def __init__(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        self._bytes = {name: _bytes(buffer) for name, buffer in buffers}

    def compare(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Raises RunError with the names of those that are others, or gone."""
        now = {name: _bytes(buffer) for name, buffer in buffers}
        wrong = [n for n, kept in self._bytes.items() if n not in now or not torch.equal(now[n], kept)]
        if wrong:
            raise RunError(
                f"rollout.check_weight_update: {len(wrong)} of the engine's {len(self._bytes)} buffers are not what "
                f"they were when it was built: {_shown(wrong)}. Its sleep lost them; try rollout.sleep_level=1."
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()


def checksum(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 scalar on the tensor's device, modulo 2^64: sum of the bits of its elements in `dtype` (16 or 32 bits) as
    signed integers. -0.0 counts as 0.0, which it becomes where a packed matrix is read back."""
    bits = (tensor.detach().to(dtype) + 0.0).view(_INTEGERS[dtype.itemsize])
    return bits.sum(dtype=torch.int64)


def layout(held: Sequence[int], sent: Sequence[Sequence[int]], tp: int) -> list[tuple[slice, int]]:
    """For each sent tensor: which rows of a rank's parameter of shape `held` are its part, and how many copies of it
    the `tp` ranks hold together. A parameter of one tensor is either cut (1 copy) or on every rank (tp). Of several,
    the first is cut evenly, the others with as many copies as account for the rows: key and value heads are copied
    where there are fewer of them than ranks.

    Example: layout([48, 64], [[64, 64], [16, 64], [16, 64]], 2) -> rows 0:32, 32:40, 40:48, one copy each.
    """
    if len(sent) <= 1:
        return [(slice(None), tp if tp > 1 and list(held) == list(shape) else 1) for shape in sent]
    rows = [shape[0] for shape in sent]
    copies, rest = divmod(held[0] * tp - rows[0], sum(rows[1:]))
    own = [rows[0] // tp, *(count * copies // tp for count in rows[1:])]
    if rest or sum(own) != held[0]:
        raise RuntimeError(
            f"rollout.check_weight_update cannot tell which of a parameter's {held[0]} rows are whose: it was made of "
            f"{rows} rows on {tp} ranks. This model cannot be checked; set it to false."
        )
    starts = [sum(own[:index]) for index in range(len(own))]
    return [
        (slice(start, start + count), 1 if index == 0 else copies)
        for index, (start, count) in enumerate(zip(starts, own, strict=True))
    ]


def _parts(sent: Iterable[str], packed: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The engine's name of each parameter -> the names of the tensors sent for it, in the order of their rows."""
    home = {part: (name, order) for name, parts in packed.items() for order, part in enumerate(parts)}
    found: dict[str, list[tuple[int, str]]] = {}
    for name in sent:
        words = name.split(".")
        orders = [0]
        for index, word in enumerate(words):
            if word in home:
                words[index], order = home[word]
                orders.append(order)
        found.setdefault(".".join(words), []).append((max(orders), name))
    return {name: [part for _, part in sorted(parts)] for name, parts in found.items()}


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

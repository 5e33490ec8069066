"""Where a process is, read off its stacks from another thread: nothing has to be noted while all goes well.

    frames of a thread --> layer        of the innermost module that knows its number (transformers' `layer_idx`)
                       --> sequences    of the micro-batch that a frame holds as `batch`
                       --> what an object on the stack says itself: `whereabouts()`
                       --> whether it waits in a collective, for the other ranks

Read from a program that runs on, so everything here is a hint, and an error in it is no answer rather than an error.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

_MOST_SHOWN = 8


def main_frames() -> list[FrameType]:
    """Of the main thread, the innermost first; empty when it has none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return list(_outwards(frame))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe(frames: list[FrameType]) -> str:
    """Layer, sequences and whatever objects say of themselves: "layer 3, sequences 4, 7 of the step"; "" if unknown."""
    found: list[str] = []
    for find in (_layer, _sequences, _own_words, _collective):
        try:
            text = next((text for frame in frames if (text := find(frame))), "")
        except Exception:  # what is looked at changes meanwhile
            continue
        found += [text] if text else []
    return ", ".join(found)


def waits_for_others(frames: list[FrameType]) -> bool:
    return any(_collective(frame) for frame in frames)


def stacks() -> str:
    """Of all threads, as text, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = (
        f"Thread {names.get(ident, ident)} (innermost call last):\n" + "".join(traceback.format_stack(frame))
        for ident, frame in frames
    )
    return "\n".join(parts)


def _layer(frame: FrameType) -> str:
    number = getattr(frame.f_locals.get("self"), "layer_idx", None)
    return f"layer {number}" if isinstance(number, int) else ""


def _sequences(frame: FrameType) -> str:
    rows = getattr(frame.f_locals.get("batch"), "rows", None)
    return f"sequences {listed(rows)} of the step" if isinstance(rows, tuple) and rows else ""


def _own_words(frame: FrameType) -> str:
    words = getattr(frame.f_locals.get("self"), "whereabouts", None)
    return str(words()) if callable(words) else ""


def _collective(frame: FrameType) -> str:
    module = str(frame.f_globals.get("__name__", ""))
    inside = module.startswith("torch.distributed.distributed_c10d")
    return f"waits for other ranks in {frame.f_code.co_name}" if inside else ""


def listed(numbers: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
    return shown if len(numbers) <= _MOST_SHOWN else f"{shown}, ... ({len(numbers)})"

"""What a trial must not do, and what says on the tape alone that a module's code cannot run on plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vescale_dtensor.engine import Crossing, Difference, Op, Ref

from ..frame import Frame


def forbidden(frame: Frame, tape: list) -> Difference | None:
    """What the tape alone says against plain tensors."""
    made: set[int] = set()
    draw = next((item for item in tape if type(item) is Op and item.random), None)
    if draw is not None:
        frame.draws = not frame.children
        return Difference(why_not(draw, made, frame), draw.line)
    twice = copied(tape)
    for item in tape:
        if type(item) is Op:
            why = why_not(item, made, frame)
            if why:
                return Difference(why, item.line)
            if twice & set(item.written):
                return Difference("writes in place where one device has a copy and the shard a view", item.line)
            made |= set(storages_in(item.out)) - set(storages_in(item.args))
        elif type(item) is Crossing and item.frame.state != frame.state:
            return Difference(
                f"calls {item.frame.site.name} under another grad mode or hooks on saved tensors (a checkpoint), "
                "so that it runs again outside of this forward",
                frame.site.line,
            )
    return None


def copied(tape: list) -> set[int]:
    """Storages that are one on plain tensors and two on one device, and here."""
    return {at for item in tape if type(item) is Op and item.copying for at in storages_in((item.args, item.out))}


def why_not(op: Op, made: set[int], frame: Frame) -> str:
    if op.random:
        return f"draws random numbers ({op.name.removeprefix('aten::')}) in its own forward"
    if op.reads_value:
        return "reads the value of a tensor"
    if op.communicates:
        return "communicates in its own forward"
    if op.hooked != frame.state[1]:
        return "keeps saved tensors through hooks of its own (a checkpoint)"
    if not made.issuperset(op.written):
        return "writes in place to a tensor that it did not make"
    return ""


def storages_in(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.storage
    elif isinstance(value, tuple):
        for item in value:
            yield from storages_in(item)

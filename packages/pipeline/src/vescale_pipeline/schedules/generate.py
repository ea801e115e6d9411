"""generate: a whole schedule by the name of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .._errors import ScheduleError
from ..action import Action, Schedule
from ._shape import Shape
from .dualpipe_v import dualpipe_v
from .gpipe import gpipe, looped_bfs
from .one_f_one_b import interleaved, interleaved_zb, one_f_one_b, zb_h1, zb_h2
from .proofs.communication import add_communication
from .v_pattern import v_half, v_min
from .zbv import zbv

Orders = list[list[Action]]


@dataclass(frozen=True)
class Kind:
    """Generator of a kind of schedule.

    Arguments:
        orders: what each rank computes, in order.
        virtual: stages per rank that it is for; None for any number.
        v_shaped: whether stages run down the ranks and back up.
    """

    orders: Callable[[Shape], Orders]
    virtual: int | None = 1
    v_shaped: bool = False


def _each(order: Callable[[Shape, int], list[Action]]) -> Callable[[Shape], Orders]:
    """Orders of ranks that are each written down without looking at the others."""
    return lambda shape: [order(shape, rank) for rank in range(shape.ranks)]


GENERATORS = {
    "gpipe": Kind(_each(gpipe)),
    "1f1b": Kind(_each(one_f_one_b)),
    "interleaved": Kind(_each(interleaved), virtual=None),
    "looped-bfs": Kind(_each(looped_bfs), virtual=None),
    "zb-h1": Kind(_each(zb_h1)),
    "zb-h2": Kind(_each(zb_h2)),
    "interleaved-zb": Kind(_each(interleaved_zb), virtual=None),
    "zbv": Kind(_each(zbv), virtual=2, v_shaped=True),
    "v-half": Kind(v_half, virtual=2, v_shaped=True),
    "v-min": Kind(v_min, virtual=2, v_shaped=True),
    "dualpipe-v": Kind(_each(dualpipe_v), virtual=2, v_shaped=True),
}


MOST = 2**20
"""Most forwards in a schedule, each of which is an object."""


def generate(kind: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Returns a schedule of a known kind, with communication. Every stage computes in microbatch order.

    Arguments:
        kind: a key of GENERATORS, in any case, with - or _.
        ranks: the ranks of the pipeline, 1 or more.
        microbatches: 1 or more, including fewer than ranks, and numbers that ranks do not divide.
        virtual: stages per rank. V-shaped kinds have 2, and accept 1 to mean that.

    Raises ScheduleError for an unknown kind, numbers below 1, and a number of virtual stages that the kind cannot have.
    """
    key = kind.lower().replace("_", "-")
    if key not in GENERATORS:
        raise ScheduleError("generate", f"there is no schedule {kind!r}", [f"known  {', '.join(GENERATORS)}"])
    for name, number in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if type(number) is not int or number < 1:
            raise ScheduleError("generate", f"{name} is {number!r}, not a positive integer")
    if ranks * microbatches * virtual > MOST:
        rule = f"{ranks=} times {virtual=} times {microbatches=} are more than {MOST:,} forwards"
        raise ScheduleError("generate", rule, (), [("microbatches=64", "or fewer of the others")])
    made = GENERATORS[key]
    if made.v_shaped and virtual == 1:
        virtual = 2
    if made.virtual is not None and virtual != made.virtual:
        loops = ", ".join(name for name, other in GENERATORS.items() if other.virtual is None)
        raise ScheduleError(
            "generate",
            f"{key} has {made.virtual} stages per rank, not {virtual}",
            [f"of any number  {loops}"],
            [(f"virtual={made.virtual}", "")],
        )
    shape = Shape(ranks, microbatches, virtual, made.v_shaped)
    return add_communication(key, shape.placement, microbatches, made.orders(shape))

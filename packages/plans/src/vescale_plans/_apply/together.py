"""Turns a failure of one rank into one of all, with one message: nobody is left waiting in a collective."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

from vescale_dtensor import VescaleError
from vescale_dtensor.engine import world_objects

from .._plan.parts import PlanError


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Runs the block on every rank, then lets all ranks know how it went.

    Inside there must be no collective: a rank that has failed is not in it. `what`
    continues "rank 2 failed while ...".

    Cost: one small all-gather over the world. Raises, on all ranks alike, the error of
    the first rank that failed, if it is one of ours or all ranks raised the same; any
    other as a PlanError that names the rank, the type and the text.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    verdicts = gather(_packed(failure), what)
    failed = [rank for rank, verdict in enumerate(verdicts) if verdict is not None]
    if not failed:
        return
    name, text, ours = verdicts[failed[0]]
    if failure is not None and all(verdict is not None and verdict[:2] == (name, text) for verdict in verdicts):
        raise failure
    if ours is not None:
        raise pickle.loads(ours) from failure
    raise PlanError(
        "parallelize",
        f"rank {failed[0]} failed while {what}: {name}: {text}",
        [f"{len(failed)} of {len(verdicts)} ranks failed: {', '.join(map(str, failed))}"],
        [(f"see the traceback of rank {failed[0]}", "the other ranks stopped because it did")],
    ) from failure


def _packed(failure: Exception | None) -> tuple[str, str, bytes | None] | None:
    if failure is None:
        return None
    ours = None
    if isinstance(failure, VescaleError):
        with contextlib.suppress(Exception):  # one that cannot travel is told by its type and text
            written = pickle.dumps(failure)
            ours = written if str(pickle.loads(written)) == str(failure) else None
    return type(failure).__name__, str(failure), ours


def gather(value: Any, what: str) -> list:
    """`value` of every rank of the world, in rank order. Raises CommunicationError when a rank is gone."""
    return world_objects(value, "parallelize", what)

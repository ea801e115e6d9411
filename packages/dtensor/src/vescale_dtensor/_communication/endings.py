"""Tells the ranks that find one gone why it ended.

A rank whose user code raises between two collectives ends its process, and the others
see a broken connection. So an exception that nobody caught is written into the store
before the process's connections close, and an error about a lost connection names it.
A process that is killed writes nothing: `deaths.py` looks for such.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from .._errors import CommunicationError, VescaleError
from .._torch_private import backend_timeouts
from . import deaths
from .hangs.words import beat_seconds, heard, last_seen
from .namespace import ALONE, await_namespace, namespace

MOST_TEXT = 2000
"""Characters of an exception's text that are told."""
_UNUSED_TAG = 0x5EA1
PATIENCE_S = 1.0
"""A killed process's connections close before its end can be seen: so long it is looked for."""
_KILLED, _RAISED, _LEFT = "killed", "raised", "left"


def longest_wait() -> timedelta:
    """Returns how long a collective of the joined world waits for a rank; ten minutes if its backends do not say."""
    return timedelta(seconds=min(backend_timeouts(), default=600.0))


def tell_endings() -> None:
    """Lets the other ranks of the joined world know why this process ended. Every rank calls it; again does
    nothing. Raises CommunicationError where rank 0 is gone."""
    global _before, _told, _known
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() in ALONE:
        return
    found = await_namespace()
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _report
        atexit.register(_leave)
    if _told != found.name:
        _told, _known = found.name, None
        with contextlib.suppress(RuntimeError):
            deaths.leave_word(found.store, dist.get_rank())


def raised_here() -> bool:
    """True if this process ends by an exception."""
    return _raised


def raised_anywhere() -> bool:
    """True if an exception has ended a rank; False if the store is gone, or the world, which a thread may end."""
    with contextlib.suppress(RuntimeError, ValueError):
        return (found := namespace()) is not None and found.store.check([_RAISED])
    return False


def first_ending() -> str | None:
    """The first exception that ended a rank, or rank that was killed, or else the first rank that left; None if nothing
    is known."""
    global _known
    try:
        found = namespace()
        for key in () if found is None else (_KILLED, _RAISED, _LEFT):  # who follows a killed rank raises
            if found.store.check([key]):
                _known = found.store.get(key).decode()
                return _known
        return None
    except RuntimeError:  # the store may be gone, too
        return _known


def connection_lost(operation: str, rule: str, error: RuntimeError) -> CommunicationError:
    """The error for ranks that survive another, or wait for it in vain; names what ended that one, if it is known."""
    said, ending = str(error).splitlines()[0], _ending_behind_lost_connection()
    if ending is not None:
        told = [f"first cause: {ending}", said]
        return CommunicationError(operation, rule, told, [("mend the first cause and start again", "")])
    remedy = "look for the rank that failed first: the others see only a broken connection"
    return CommunicationError(operation, rule, [said], [(remedy, "")])


def _ending_behind_lost_connection() -> str | None:
    """`first_ending`; where nothing is known yet, ranks of this machine that were killed are looked for, and what is
    found, here or elsewhere, is known to all; of other machines, ranks that fell silent. Takes `PATIENCE_S` and a few
    seconds at most, on a rank that is about to raise."""
    until = time.monotonic() + (PATIENCE_S if _before is not None else 0.0)  # else nobody has left word
    while (ending := first_ending()) is None and (found := namespace()) is not None:
        lost = None
        try:
            deaths.remember(found.store)
        except RuntimeError:
            lost = "the process that holds the ranks' store (rank 0's, or torchrun's) is gone: see what ended it"
        ended = deaths.ended()
        if ended is not None and lost is not None:
            return f"{ended} ended, and with it the ranks' store, where the cause would be: see what ended it"
        if ended is not None:
            _write(_KILLED, f"{ended} ended without a word{last_seen(found.store, deaths.gone())}: by {deaths.WAYS}")
        elif time.monotonic() > until:
            return lost or _silent(found.store)
        else:
            time.sleep(0.02)
    return ending


def _silent(store: dist.Store) -> str | None:
    """The ranks that say no more that they live, in words: of a rank killed on another machine nothing else is known.

    Takes as long as a rank takes to say so twice, where ranks do.
    """
    size = dist.get_world_size()
    before = {rank: word for rank, word in heard(store, range(size)) if word is not None and not word.has_ended}
    if before:
        time.sleep(2.5 * beat_seconds(size))
    gone = [rank for rank, word in heard(store, before) if word == before[rank] and rank != _rank()]
    if not gone:
        return None
    ranks = f"rank {gone[0]} gives" if len(gone) == 1 else f"ranks {', '.join(map(str, gone[:8]))} give"
    return f"{ranks} no sign of life any more{last_seen(store, gone[:8])}"


def tell_first(what: str) -> None:
    """Says why ranks will end, where nobody has said that yet."""
    _write(_RAISED, what)
    first_ending()


def close(group: dist.ProcessGroup | None) -> None:
    """Ends this rank's connections of the group (None: of all): who waits there for this rank gets an error at once."""
    group = group or dist.group.WORLD
    with contextlib.suppress(RuntimeError, ValueError):  # of a group that the program has destroyed meanwhile
        if dist.get_backend(group) in ALONE or group.size() < 2:
            return
        if dist.get_backend(group) != "gloo":
            group.abort()
            return
        # Gloo has no abort; a wait that takes too long closes all pairs of its context.
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def described(error: BaseException) -> str:
    """Type, text and place of an exception, of a length that can travel, whatever its `__str__` does."""
    try:
        text = str(error)
    except BaseException as second:  # the user's code; the first error is what counts
        text = f"(its text cannot be told: __str__ raised {type(second).__name__})"
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}... ({len(text):,} characters)"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said}, at {frames[-1].filename}:{frames[-1].lineno}" if frames else said


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _raised
    _raised = True
    own = f"rank {_rank()} raised {described(error)}"
    _write(_RAISED, own)
    if isinstance(error, RuntimeError) and not isinstance(error, VescaleError):  # torch.distributed's know no cause
        first = first_ending()
        if first not in (None, own):
            error.add_note(f"first cause: {first}")
    _before(kind, error, trace)
    if _rank() == 0 and dist.get_world_size() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(2 * PATIENCE_S)  # the store is in this process: the others are to find there why it ends


def _leave() -> None:
    if not _raised:
        _write(_LEFT, f"rank {_rank()} came to the end of its script, or called sys.exit")


def _write(key: str, what: str) -> None:
    with contextlib.suppress(RuntimeError):
        if (found := namespace()) is not None:
            found.store.compare_set(key, "", what)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


_known: str | None = None  # what was found, for when the store is gone
_before = None
_raised = False
_told = ""  # the namespace in which this process has left word

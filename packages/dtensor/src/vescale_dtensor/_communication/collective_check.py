"""Ranks of one machine see in shared memory which collective the others are in, and no two different ones meet.

A backend pairs collectives by their order alone. Where one rank runs code that the others do not (`if rank == 0:`
around an evaluation, or a norm of sharded gradients), its collective meets another one: numbers change hands, or gloo
aborts the process. So each rank writes its collective's number and what it is onto a board before it begins, and then
looks at what the others have written under that number: of two ranks that differ the one that comes second sees it,
and raises before anything has met.

Compared are the kind, whether gradients are recorded, and the bytes where they are equal by construction; not the lines
of code, of which different ones may rightly ask for the same. Ranks on other machines are not seen. A board has a name
of its world's (`namespace.py`); until a rank knows that, it only counts. Cost: a microsecond per collective, and a page
of memory per group and rank. A file stays until all ranks have opened it. What killed processes leave goes when this
user's next world starts: who has a file mapped holds a lock on it.

    VESCALE_BOARD    "0" turns the comparison off
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import mmap
import os
import zlib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import is_grad_enabled

from vescale_trace.stack import user_line

from .._errors import CommunicationError
from . import events
from .endings import close, described, tell_first
from .namespace import ALONE, namespace

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "vescale-board-"
_PLACES = 32
"""Collectives that stay written: more than a rank has under way."""
_TEXT = 120
"""Bytes of what a collective is, in words."""
_PAGE, _WORD = 4096, 8
"""Bytes of a rank: its places' numbers and digests, a word each, and then their texts."""
_EQUAL = frozenset({"all_gather", "all_reduce"})
"""Kinds of which every rank receives equally many bytes."""
_NUMBERS = 1 << 32
_MOST_KNOWN = 4096


class Board:
    """Memory that a group's ranks write, on one machine. `rank`: this one's in the group; `ranks`: theirs in the
    world."""

    def __init__(self, group_name: str, rank: int, ranks: Sequence[int]) -> None:
        self._name, self._rank, self._ranks = group_name, rank, ranks
        self._count, self._is_open = 0, False
        self._others: list[int] = []
        self._known: dict[tuple, tuple[int, bytes]] = {}

    def _open(self) -> None:
        """Under the name of the world, once this rank knows it. Without memory to share nothing is compared."""
        found = namespace()
        if found is None:
            return
        self._is_open = True
        _remove_left()
        key = sha256(f"{found.name} {self._name} {self._ranks}".encode()).hexdigest()[:24]
        with contextlib.suppress(OSError):
            self._map(_SHARED_MEMORY / f"{_PREFIX}{key}")

    def _map(self, path: Path) -> None:
        rank, size = self._rank, len(self._ranks)
        neighbours = {(rank + 1) % size, (rank - 1) % size}  # of ranks that differ, two stand next to each other
        file = _opened(path)
        try:
            os.ftruncate(file, size * _PAGE)
            for one in {rank, *neighbours}:  # a page that is not to be had is an error here, and a signal later
                os.posix_fallocate(file, one * _PAGE, _PAGE)
            self._memory = memoryview(mmap.mmap(file, size * _PAGE))
        finally:
            os.close(file)  # the map has a descriptor of its own, and with it the lock
        self._cells = self._memory.cast("Q")
        self._path, self._own, self._is_listed = path, rank * _PAGE // _WORD, True
        self._others = [one * _PAGE // _WORD for one in sorted(neighbours)]
        self._texts = [_text_of(rank, place) for place in range(_PLACES)]
        atexit.register(path.unlink, missing_ok=True)

    def post(self, kind: str, received: int, asked: Any) -> None:
        """This rank begins a collective over a `RankGroup`. Raises CommunicationError where another rank's of the same
        number differs, and ends the group's connections: whoever waits there gets an error, too."""
        self._count = number = self._count + 1
        if not self._others:
            if not self._is_open:
                self._open()
            if not self._others:
                return
        function = events._current  # by name: what is known here holds nothing of the program's
        name = function if type(function) is str else getattr(function, "__name__", None)
        key = (kind, received if kind in _EQUAL else 0, is_grad_enabled(), name)
        known = self._known.get(key)
        if known is None:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = _described(*key)
        place = number % _PLACES
        self._memory[self._texts[place]] = known[1]
        cells = self._cells
        cells[self._own + place] = cell = number % _NUMBERS << 32 | known[0]
        for other in self._others:
            seen = cells[other + place]
            if seen != cell and seen >> 32 == cell >> 32:
                self._refuse(other * _WORD // _PAGE, asked)
        if self._is_listed and (number >= _PLACES or self._are_here(place, cell)):
            self._path.unlink(missing_ok=True)
            self._is_listed = False

    def _are_here(self, place: int, cell: int) -> bool:
        """True if all ranks have opened the file: of few, as all are neighbours. Of many, all have come to the first
        collective when one has come to as many as there are places."""
        return len(self._ranks) <= 3 and all(self._cells[other + place] == cell for other in self._others)

    def _refuse(self, other: int, asked: Any) -> None:
        line, place = user_line(), self._count % _PLACES
        operands = []
        for rank in sorted((self._rank, other)):
            text = bytes(self._memory[_text_of(rank, place)]).decode(errors="replace").strip()
            where = f", at {line}" if line and rank == self._rank else ""
            operands.append(f"rank {self._ranks[rank]}  in {text}{where}")
        axes = ", ".join(map(repr, asked.axes))
        rule = (
            f"collective {self._count:,} over axis {axes} is not the same on all ranks: some of them run code that "
            "others do not"
        )
        error = CommunicationError(
            events.cause().function,
            rule,
            operands,
            [
                ("run it on every rank", "code that computes with shards communicates, including evaluation and norms"),
                ("tensor.full_tensor()", "on every rank, before `if rank == 0:`: a gather, and then no communication"),
                ("VESCALE_BOARD=0", "turns this check off, if you know that they match"),
            ],
        )
        tell_first(f"rank {self._ranks[self._rank]} raised {described(error)}")
        close(asked.process_group())
        raise error


def _text_of(rank: int, place: int) -> slice:
    begins = rank * _PAGE + _PLACES * _WORD + place * _TEXT
    return slice(begins, begins + _TEXT)


def board_of(group: dist.ProcessGroup) -> Board | None:
    """The group's board, one per process; None if its ranks are no processes."""
    if os.environ.get("VESCALE_BOARD") == "0" or group.size() < 2 or dist.get_backend(group) in ALONE:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    boards, name = _boards.setdefault(dist.group.WORLD, {}), group.group_name
    return boards.get((name, ranks)) or boards.setdefault((name, ranks), Board(name, group.rank(), ranks))


def _opened(path: Path) -> int:
    """The file, locked by whoever has it open or mapped; made again if the start of another world has removed it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)


def _remove_left() -> None:
    """Removes the files of this user's that no process has mapped."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, gone meanwhile, or in use
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_uid == os.geteuid():
                    path.unlink()
            finally:
                os.close(file)


def _described(kind: str, received: int, is_recorded: bool, name: str | None) -> tuple[int, bytes]:
    """A collective's digest, and what it is in words of a fixed length. Who asked is no part of the digest; and what
    ranks tell each other, some of them perhaps in a handler of an exception, is so with gradients or without."""
    compared = f"{kind} of {received:,} B" if received else kind
    if kind != "gather_objects":
        compared += f", {'with' if is_recorded else 'without'} gradients"
    text = f"{compared}, for {events.function_name(name)}" if name else compared
    return zlib.crc32(compared.encode()), text.encode()[:_TEXT].ljust(_TEXT)


_boards: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Board]] = WeakKeyDictionary()
"""Boards by world, then by a group's name and ranks: a group made again under one name goes on counting, on all
ranks."""

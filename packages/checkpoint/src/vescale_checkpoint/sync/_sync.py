"""Exchange between ranks during a save or a load: the one module here that communicates.

A `Session` is one operation on all ranks of the world. Coordination goes through
the store of torch.distributed (every backend has one), never through collectives:
a background save must not meet the training's, and a rank that died must not hang
the others. What ranks say goes to rank 0, which reads all of it at once and answers all
with one value: three requests per rank and gather, however many ranks there are, and of
equal payloads, which most are, the bytes of one. Every wait ends: with what was waited for, with
the error that another rank reported first (the same on all ranks), or with a PeerError that names
the rank which fell silent, ended, or stands elsewhere (`_presence`).

Bulk data of online resharding goes through `exchange_bytes`, an all-to-all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor.engine import namespace
from vescale_trace.environment import seconds

from .. import _errors
from .._errors import CheckpointError, PeerError
from .._torch_private import _get_pg_default_device
from . import _presence as beats
from ._presence import Presence, peek

T = TypeVar("T")
_INLINE = 1 << 10  # rank 0 reads so much of all ranks at once; of more, from each by itself
_PART = 4 << 20  # the store refuses values of 8 MiB and more
_LOOK_S = 0.05  # a wait asks for errors of others so often
_SLOWEST_S = 0.02  # and for what it waits for at least so often, in a small world
_PER_RANK_S = 5e-5  # in a large one the store is spared
_SHOWN = 8

_numbers: Iterator[int] = itertools.count()
_world: object = None
_presence: Presence | None = None
_world_store: Any = None
_finished: list[Session] = []


class Session:
    """One operation on all ranks. Make one with `open_session`, in the same order on every rank.

    rank, size: of the default process group; 0 of 1 without one.
    """

    def __init__(
        self, operation: str, rank: int, size: int, store: Any, number: int, presence: Presence | None = None
    ) -> None:
        self.operation, self.rank, self.size = operation, rank, size
        self._store, self._number, self._presence = store, number, presence
        self._prefix = f"vescale_checkpoint/{number}"
        self._keys: list[str] = []
        self._gathers = 0
        self._failed = False
        if presence is not None:
            presence.enter(number, operation)
            presence.on_silent = self._tell_of_silent

    def gather(self, name: str, payload: bytes = b"") -> list[bytes]:
        """Every rank's payload, in rank order, on every rank.

        Raises the first error that any rank reported, or PeerError.
        """
        self._offer(name, payload)
        return self._answered(name, payload)

    def to_first(self, name: str, payload: bytes = b"") -> list[bytes] | None:
        """Every rank's payload on rank 0; None, without waiting, on the others."""
        self._offer(name, payload)
        return None if self.rank else self._collected(name, payload)

    def agree(self, name: str, value: bytes) -> list[int]:
        """The ranks whose value differs from rank 0's."""
        values = self.gather(name, value)
        return [rank for rank, other in enumerate(values) if other != values[0]]

    def sent_to_first(self, made: Tensor | None, source: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that `source` has, on rank 0; called by these two, which hold it, or None, in one order.

        Communication: one send and one receive.
        """
        if made is not None:
            dist.send(made.detach().contiguous(), 0)
            return made
        found = torch.empty(tuple(shape), dtype=dtype, device=_get_pg_default_device())
        dist.recv(found, source)
        return found

    def part(self) -> None:
        """The last word of an operation that succeeded: rank 0, in whose process the store may live, leaves last."""
        with contextlib.suppress(CheckpointError):  # of a rank that died when all was done
            self.to_first("done")

    def fail(self, error: BaseException) -> CheckpointError:
        """Reports an error of this rank to all; returns the one that was first, to be raised."""
        data = _errors.to_json(error, self.operation)
        first, origin = data, self.rank
        if self._store is not None and not self._failed:
            self._failed = True
            with contextlib.suppress(RuntimeError):  # the store is gone: what happened here is all there is to tell
                origin, first = self._reported(data)
        raised = _errors.from_json(first)
        if self.size > 1:
            raised.add_note(f"raised first on rank {origin}")
        return raised

    def close(self) -> None:
        """Keys are deleted when the next session shows that all ranks have read them."""
        if self._presence is not None:
            self._presence.leave()
        if self._store is not None:
            _finished.append(self)

    # --- what is said ---------------------------------------------------------------

    def _offer(self, name: str, payload: bytes) -> None:
        """This rank's payload, for rank 0."""
        if self._store is not None and self.rank:
            with self._guarded("report"):
                self._put(self._key(name, self.rank), b"", payload, _INLINE)

    def _answered(self, name: str, payload: bytes) -> list[bytes]:
        """All payloads: rank 0 collects them, and answers."""
        if self._store is None:
            return [payload]
        # The answers of one session take the place of those of the session before, which all have read by then.
        place = f"vescale_checkpoint/answer/{self._gathers}"
        self._gathers += 1
        head = f"{self._number}/{name}/".encode()
        if self.rank == 0:
            values = self._collected(name, payload)
            with self._guarded("answer"):
                self._put(place, head, _packed(values), _PART, keeps=True)
            return values

        def answer() -> bytes | None:
            found = peek(self._store, place)
            return None if found is None or not found.startswith(head) else found

        return _unpacked(self._joined(place, self._awaited(name, answer)[len(head) :]))

    def _collected(self, name: str, payload: bytes) -> list[bytes]:
        """Returns, on rank 0, what all have offered."""
        if self._store is None:
            return [payload]
        keys = [self._key(name, rank) for rank in range(1, self.size)]
        self._awaited(name, lambda: self._store.check(keys) or None)
        with self._guarded("read"):
            if self._store.has_extended_api():
                found = self._store.multi_get(keys)
            else:
                found = [self._store.get(key) for key in keys]
            return [payload, *(self._joined(key, data) for key, data in zip(keys, found))]

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _put(self, key: str, head: bytes, payload: bytes, inline: int, *, keeps: bool = False) -> None:
        """A value: by itself if it is at most `inline` long, else in parts, of which the key says how many, last."""
        parts = [payload[at : at + _PART] for at in range(0, len(payload), _PART)] if len(payload) > inline else []
        for i, part in enumerate(parts):
            self._set(f"{key}/{i}", part, keeps)
        self._set(key, head + b"%d:" % len(parts) + (b"" if parts else payload), keeps)

    def _set(self, key: str, value: bytes, keeps: bool) -> None:
        self._store.set(key, value)
        if not keeps:
            self._keys.append(key)

    def _joined(self, key: str, data: bytes) -> bytes:
        count, _, first = data.partition(b":")
        if not int(count):
            return first
        with self._guarded("read"):
            return b"".join([self._store.get(f"{key}/{i}") for i in range(int(count))])

    # --- waiting --------------------------------------------------------------------

    def _awaited(self, name: str, ask: Callable[[], T | None]) -> T:
        """Waits until `ask` gives something, and returns it. Raises what another rank reported, or PeerError."""
        with self._guarded("wait"):
            began = looked = time.monotonic()
            since = 0.0 if self._presence is None else self._presence.watched
            slowest = max(_SLOWEST_S, self.size * (_PER_RANK_S / 5 if self.rank == 0 else _PER_RANK_S))
            while (found := ask()) is None:
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked = now
                    self._check_error()
                    self._check_peers(name, since)
                time.sleep(min(max(0.0002, (now - began) / 16), slowest))  # late by a small part of the wait
            return found

    def _check_error(self) -> None:
        data = peek(self._store, f"{self._prefix}/error")
        if data is not None:
            origin, _, text = data.decode().partition(":")
            self._failed = True
            raised = _errors.from_json(text.encode())
            raised.add_note(f"raised first on rank {origin}")
            raise raised

    def _check_peers(self, name: str, since: float) -> None:
        """Raises PeerError for ranks that will not come. Asks the store about those only that are suspected."""
        presence = self._presence
        if presence is None:
            return
        waited, odd = presence.watched - since, {}
        for rank in range(1, self.size) if self.rank == 0 else range(1):
            reason = presence.reason_against(rank, waited)
            if reason is not None and not (self.rank == 0 and self._store.check([self._key(name, rank)])):
                odd[rank] = reason
        if odd:
            raise self.fail(self._peer_error(odd, name))

    def _peer_error(self, odd: dict[int, str], name: str) -> PeerError:
        """Builds the error for ranks that will not come, each with its reason; says where all are, if that fits."""
        shown = dict(itertools.islice(odd.items(), _SHOWN))
        first, reason = next(iter(shown.items()))
        more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
        said = [f"rank {self.rank}  in {self.operation}, waits for {name!r}"]
        with contextlib.suppress(RuntimeError):
            others = [rank for rank in (*shown, *range(min(self.size, _SHOWN))) if rank != self.rank]
            for rank, beat in self._presence.read(dict.fromkeys(others)):
                said.append(f"rank {rank}  {'never called save or load' if beat is None else beat}")
        return PeerError(
            self.operation,
            f"rank {first} {reason}{more}",
            said,
            _remedies(self.operation),
        )

    def _tell_of_silent(self, rank: int) -> None:
        """Reports a silent rank, on rank 0, from the thread that watches: the others wait for this rank, which may be
        busy."""
        error = self._peer_error({rank: f"fell silent during {self.operation}: it shows no sign of life"}, "part")
        self._reported(_errors.to_json(error, self.operation))

    def _reported(self, data: bytes) -> tuple[int, bytes]:
        """Reports an error; the rank and the text of the one that was first."""
        found = self._store.compare_set(f"{self._prefix}/error", "", f"{self.rank}:{data.decode()}").decode()
        origin, _, text = found.partition(":")
        return int(origin), text.encode()

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Turns a broken connection to the store into a PeerError."""
        try:
            yield
        except CheckpointError:
            raise
        except RuntimeError as error:  # torch.distributed's network and store errors
            reason = str(error).splitlines()[0]
            raise PeerError(
                self.operation,
                "the process that holds the ranks' store is gone",
                [f"could not {what}: {reason}"],
                [("look for what ended rank 0, or torchrun's agent, first", "the last committed step is complete")],
            ) from error


def _remedies(operation: str) -> list[tuple[str, str]]:
    """Returns remedies for ranks that do not come."""
    return [
        (f"call {operation} on every rank, in the same order", "it is an operation of the whole world"),
        ("look for what ended that rank first", "the last committed step is complete"),
        ("VESCALE_CHECKPOINT_PATIENCE_S=600", "in the environment, if a rank may be that late"),
    ]


def _packed(values: Sequence[bytes]) -> bytes:
    """Payloads of all ranks, equal ones once: runs of ranks as JSON, and then what they said."""
    places: dict[bytes, int] = {}
    runs: list[list[int]] = []
    for value in values:
        place = places.setdefault(value, len(places))
        if runs and runs[-1][0] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    head = json.dumps([runs, [len(value) for value in places]]).encode()
    return b"%d:%s%s" % (len(head), head, b"".join(places))


def _unpacked(data: bytes) -> list[bytes]:
    size, _, rest = data.partition(b":")
    runs, lengths = json.loads(rest[: int(size)])
    ends = list(itertools.accumulate(lengths, initial=int(size)))
    values = [rest[start:end] for start, end in itertools.pairwise(ends)]
    return [values[place] for place, count in runs for _ in range(count)]


def open_session(operation: str) -> Session:
    """The session of this call of `operation`, with the same call of all other ranks."""
    global _world, _presence, _world_store, _numbers
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Session(operation, 0, 1, None, 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    if _world is not dist.group.WORLD:
        # Connections of our own: torch holds the lock of its own one while it waits for other ranks. Made once per
        # process group, as connecting to torch's store takes seconds now and then.
        store = _store_of_world(operation)
        if _presence is not None:
            _presence.end()
        _world_store, _presence = store.clone(), None
        if not in_one_process():
            _presence = Presence(store.clone(), rank, size)
            _presence.begin()
        _world, _numbers = dist.group.WORLD, itertools.count()
        _finished.clear()
    return Session(operation, rank, size, _world_store, next(_numbers), _presence)


def _store_of_world(operation: str) -> Any:
    """Under names of this world alone, which rank 0 tells the others when it has come. Raises PeerError."""
    began, patience = time.monotonic(), seconds(beats.PATIENCE, beats.PATIENCE_S)
    while (found := namespace(together=True)) is None:
        if time.monotonic() - began > patience:
            said = [f"rank {dist.get_rank()}  in {operation}, waits for the first", "rank 0  never called save or load"]
            rule = f"rank 0 did not come within {patience:g} s"
            raise PeerError(operation, rule, said, _remedies(operation))
        time.sleep(_SLOWEST_S)
    return found.store


def in_one_process() -> bool:
    """True if the ranks are simulated: threads of one process that take turns, and die together."""
    return dist.is_initialized() and dist.get_backend() == "simulated"


def forget_finished(session: Session) -> None:
    """Deletes the keys of earlier sessions; call it once all ranks are known to be in this one."""
    if session._store is None:
        return
    while _finished:
        done = _finished.pop()
        with contextlib.suppress(RuntimeError):
            for key in done._keys:
                session._store.delete_key(key)


@contextlib.contextmanager
def shared(session: Session) -> Iterator[None]:
    """An exception within is reported to the other ranks; the first of all ranks is raised, on all of them."""
    try:
        yield
    except Exception as error:
        if session._failed and isinstance(error, CheckpointError):
            raise
        raise session.fail(error) from error


@contextlib.contextmanager
def session_of(operation: str) -> Iterator[Session]:
    """A session for the length of the block, errors `shared`."""
    session = open_session(operation)
    try:
        with shared(session):
            yield session
        session.part()
    finally:
        session.close()


def mesh_ranks(device_mesh: Any) -> list[int]:
    """The global ranks of a mesh, row-major."""
    return device_mesh.mesh.flatten().tolist()


def collective_device() -> torch.device:
    """Returns the device of bulk data: the accelerator, if the world has a backend made for it, else the host."""
    if not dist.is_initialized():
        return torch.device("cpu")
    world = dist.group.WORLD
    names = {device.type: world._get_backend(device).name() for device in world._device_types}
    own = [kind for kind, name in names.items() if kind != "cpu" and name not in (names.get("cpu"), "gloo")]
    return torch.device(own[0] if own else "cpu")


def exchange_bytes(pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Sends `pieces[r]` (uint8, 1-D) to rank r of the world; returns what each sent here, of `sizes` bytes.

    Communication: one all-to-all.
    """
    if len(pieces) == 1:
        return [pieces[0]]
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=pieces[0].device)
    dist.all_to_all_single(received, torch.cat(list(pieces)), list(sizes), [len(piece) for piece in pieces])
    return list(received.split(list(sizes)))

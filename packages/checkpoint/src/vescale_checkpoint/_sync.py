"""What ranks tell each other during a save or a load: the one module here that communicates.

A `Session` is one operation on all ranks of the world. Coordination goes through
the store of torch.distributed (every backend has one), never through collectives:
a background save must not meet the training's, and a rank that died must not hang
the others. Every wait ends: with what was waited for, with the error that another
rank reported first (the same on all ranks), or with a PeerError that names the rank
which fell silent (no heartbeat for SILENT_S) or never came (PATIENCE_S).

Bulk data of online resharding goes through `exchange_bytes`, an all-to-all.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _errors
from ._errors import CheckpointError, PeerError

BEAT_S = 0.5  # a rank shows that it lives so often
SILENT_S = 6.0  # and is taken for dead after so long
PATIENCE_S = 300.0  # how much later than the first a rank may call the same operation
_PART = 4 << 20  # the store refuses values of 8 MiB and more

_numbers: Iterator[int] = itertools.count()
_world: object = None
_world_store: Any = None
_finished: list[Session] = []


class Session:
    """One operation on all ranks. Make one with `open_session`, in the same order on every rank.

    rank, size: of the default process group; 0 of 1 without one.
    """

    def __init__(self, operation: str, rank: int, size: int, store: Any, number: int) -> None:
        self.operation, self.rank, self.size = operation, rank, size
        self._store, self._prefix = store, f"vescale_checkpoint/{number}"
        self._keys: list[str] = []
        self._failed = False
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None
        if store is not None:
            self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when it was new by `_watched`
            self._watched, self._looked = 0.0, time.monotonic()
            self._pulse(0)
            self._beat = threading.Thread(target=self._keep_beating, name="vescale-checkpoint-beat", daemon=True)
            self._beat.start()

    def gather(self, name: str, payload: bytes = b"") -> list[bytes]:
        """Every rank's payload, in rank order, on every rank.

        Raises the first error that any rank reported, or PeerError.
        """
        self._put(name, payload)
        return [payload if rank == self.rank else self._get(name, rank) for rank in range(self.size)]

    def to_first(self, name: str, payload: bytes = b"") -> list[bytes] | None:
        """Every rank's payload on rank 0; None, without waiting, on the others."""
        if self.rank:
            self._put(name, payload)
            return None
        return [payload, *(self._get(name, rank) for rank in range(1, self.size))]

    def agree(self, name: str, value: bytes) -> list[int]:
        """The ranks whose value differs from rank 0's."""
        values = self.gather(name, value)
        return [rank for rank, other in enumerate(values) if other != values[0]]

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
                found = self._store.compare_set(f"{self._prefix}/error", "", f"{self.rank}:{data.decode()}").decode()
                origin_text, _, first_text = found.partition(":")
                origin, first = int(origin_text), first_text.encode()
        raised = _errors.from_json(first)
        if self.size > 1:
            raised.add_note(f"raised first on rank {origin}")
        return raised

    def close(self) -> None:
        """Ends the heartbeat. Keys are deleted when the next session shows that all ranks have read them."""
        self._ended.set()
        if self._beat is not None:
            self._beat.join(timeout=2 * BEAT_S)
        if self._store is not None:
            _finished.append(self)

    def _put(self, name: str, payload: bytes) -> None:
        if self._store is None:
            return
        key = f"{self._prefix}/{name}/{self.rank}"
        parts = [payload[at : at + _PART] for at in range(0, len(payload), _PART)] or [b""]
        with self._guarded("report"):
            for i, part in enumerate(parts[1:], 1):
                self._set(f"{key}/{i}", part)
            self._set(key, b"%d:" % len(parts) + parts[0])

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._keys.append(key)

    def _get(self, name: str, rank: int) -> bytes:
        key = f"{self._prefix}/{name}/{rank}"
        with self._guarded("wait"):
            began = time.monotonic()
            while not self._store.check([key]):
                self._check_peers(name)
                time.sleep(min(max(0.0002, (time.monotonic() - began) / 16), 0.02))  # late by a small part of the wait
            count, _, first = self._store.get(key).partition(b":")
            return first + b"".join(self._store.get(f"{key}/{i}") for i in range(1, int(count)))

    def _check_peers(self, name: str) -> None:
        """Raises what another rank reported, or PeerError for one that fell silent or never came."""
        if self._store.check([f"{self._prefix}/error"]):
            origin, _, data = self._store.get(f"{self._prefix}/error").decode().partition(":")
            self._failed = True
            raised = _errors.from_json(data.encode())
            raised.add_note(f"raised first on rank {origin}")
            raise raised
        elapsed = time.monotonic() - self._looked
        if elapsed < BEAT_S:
            return
        self._looked += elapsed
        self._watched += min(elapsed, 2 * BEAT_S)  # while this process itself was stopped it saw nobody be silent
        now = self._watched
        for rank in range(self.size):
            if rank == self.rank:
                continue
            key = f"{self._prefix}/beat/{rank}"
            beat = int(self._store.get(key)) if self._store.check([key]) else -1
            last, since = self._seen.get(rank, (-2, now))
            if beat != last:
                self._seen[rank] = (beat, now)
            elif beat < 0 and now > PATIENCE_S:
                raise self._peer(rank, f"did not call {self.operation} within {PATIENCE_S:g} s", name)
            elif beat >= 0 and now - since > SILENT_S:
                raise self._peer(rank, f"fell silent during {self.operation}: no sign of life for {SILENT_S:g} s", name)

    def _peer(self, rank: int, what: str, name: str) -> CheckpointError:
        return self.fail(
            PeerError(
                self.operation,
                f"rank {rank} {what}",
                [f"waited for  its {name!r}"],
                [("look for what ended that rank first", "the last committed step is whole")],
            )
        )

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
                [("look for what ended rank 0, or torchrun's agent, first", "the last committed step is whole")],
            ) from error

    def _keep_beating(self) -> None:
        for beat in itertools.count(1):
            if self._ended.wait(BEAT_S):
                return
            try:
                self._pulse(beat)
            except RuntimeError:  # the store is gone; whoever waits finds out by itself
                return

    def _pulse(self, beat: int) -> None:
        key = f"{self._prefix}/beat/{self.rank}"
        self._store.set(key, str(beat))
        if not beat:
            self._keys.append(key)


def open_session(operation: str) -> Session:
    """The session of this call of `operation`, with the same call of all other ranks."""
    global _world, _world_store, _numbers
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Session(operation, 0, 1, None, 0)
    if _world is not dist.group.WORLD:
        # A connection of our own: torch holds the lock of its own one while it waits for other ranks. Made once per
        # process group, as connecting to torch's store takes seconds now and then.
        _world_store = dist.distributed_c10d._get_default_store().clone()
        _world, _numbers = dist.group.WORLD, itertools.count()
        _finished.clear()
    return Session(operation, dist.get_rank(), dist.get_world_size(), _world_store, next(_numbers))


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
    """Where bulk data travels: on the accelerator, if the world has a backend made for it, else on the host."""
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

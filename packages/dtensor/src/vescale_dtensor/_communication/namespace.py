"""The names under which the ranks of one world leave word for each other in its store, and nobody of another world.

A store may outlive its ranks: torchrun keeps one over all attempts of a job. Under fixed names the ranks of an attempt
would take the words of those that died before: answers, beats, causes of failures. So whatever veScale's packages
write lies under a random name. Rank 0 makes it, and sends it through the process group, whose connections lead to the
ranks of this attempt alone; a world that is destroyed and made again has a new one.

On the host a message has a tag and meets no collective, so it is sent when rank 0 first comes here, and is there when
another rank asks. A world without a backend for the host (NCCL alone) is told by a broadcast, once all ranks ask
together. Cost: 17 bytes to each rank, once.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._errors import CommunicationError
from .._torch_private import DisableTorchFunction, _DisableTorchDispatch, _get_default_store

ALONE = frozenset({"fake", "simulated"})
"""Backends of worlds whose ranks are not processes: their store ends with them."""
_TAG = 0x5EA2
_RANDOM = 16


class Namespace(NamedTuple):
    """Names of one world. `store`: the world's, under `name`."""

    name: str
    store: dist.Store


class _Word:
    """Rank 0's word, on its way."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        # The last byte tells that all have come: to ask gloo's receive is to wait for it.
        self.said = bytearray(_RANDOM) + b"\1"
        self.works: list[dist.Work] = []
        self.namespace: Namespace | None = None
        if dist.get_backend() in ALONE:
            return
        is_first, size = world.rank() == 0, world.size()
        self.said = bytearray(secrets.token_bytes(_RANDOM) + b"\1" if is_first else _RANDOM + 1)
        with DisableTorchFunction(), _DisableTorchDispatch(), torch.no_grad():
            word = torch.frombuffer(self.said, dtype=torch.uint8)
            if size > 1 and not _has_host(world):
                there = word.to(world._device_types[0])  # type: ignore[attr-defined]
                dist.broadcast(there, 0)
                word.copy_(there)
            elif is_first:
                self.works = [world.send([word], other, _TAG) for other in range(1, size)]
            else:
                self.works = [world.recv([word], 0, _TAG)]


def namespace(*, together: bool = False) -> Namespace | None:
    """Returns the names of the joined world; None while rank 0's word has not come, or if nobody has joined.

    together: whether all ranks ask now; those of a world without a backend for the host then wait for each other.
    """
    world = dist.group.WORLD
    if world is None:
        return None
    word = _words.get(world)
    if word is None:
        if not together and not _has_host(world):
            return None
        with _lock, _typed():
            word = _words.get(world) or _words.setdefault(world, _Word(world))
    if word.namespace is None and word.said[-1]:
        name = f"vescale/{word.said[:_RANDOM].hex()}"
        word.namespace = Namespace(name, dist.PrefixStore(name, _get_default_store()))
    return word.namespace


def await_namespace() -> Namespace:
    """Returns the names of the joined world; every rank asks. Waits for rank 0 as a collective does.

    Raises CommunicationError where it is gone, or does not come within the group's time limit.
    """
    found = namespace(together=True)
    if found is None:
        with _typed():
            _words[dist.group.WORLD].works[0].wait()
        found = namespace()
    assert found is not None
    return found


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed's
        rule = "rank 0 went away, or did not come in time, while the ranks met"
        remedy = ("look for the rank that failed first", "the others see only a broken connection")
        raise CommunicationError("parallelize", rule, [str(error).splitlines()[0]], [remedy]) from error


def _has_host(world: dist.ProcessGroup) -> bool:
    return any(device.type == "cpu" for device in world._device_types)  # type: ignore[attr-defined]


_words: WeakKeyDictionary[dist.ProcessGroup, _Word] = WeakKeyDictionary()
_lock = threading.Lock()

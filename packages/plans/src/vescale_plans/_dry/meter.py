"""Meters a run on local tensors: bytes alive, by kind, and floating point operations. On meta tensors as on real.

Real tensors may meet meta ones, and the result is meta: so integers can stay real (indices, masks, what is made of
them), and a model that reads them runs, while nothing of size is computed.

Every tensor that an operator makes is noted with the storage behind it, and the storage's end with a finalizer, its
change of size where it is made (`UntypedStorage.resize_` is no operator, and is watched while a meter is entered), so
that what is counted is what is alive, views counted once: nothing is modelled, but for what gloo takes to gather
(`scratch.py`). Work inside a kernel (cuBLAS workspaces) is not seen, nor is an allocator's rounding.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps

import torch
from torch import Tensor

from vescale_dtensor.engine import under_mode, watched
from vescale_trace.meter import flops_of
from vescale_trace.values import map_tensors, tensors_in

from .._apply.generators import note_generator
from .._torch_private import DisableTorchFunctionSubclass, TorchDispatchMode
from .higher_order import check_plain
from .meta_kernels import CHOICES, STAND_INS
from .scratch import Scratch

HOST = "host"  # the kind of storages that stand for memory of the host


class Meter(TorchDispatchMode):
    """Counts while it is entered; storages that end afterwards are still noticed.

    Storages of the kind "host" stand for memory of the host, and are not counted.

    `live` is bytes by kind at this moment, `peak` at the worst moment since `mark`, `flops` since then. A storage is
    of the kind that `kind` was when it appeared, or that `label` gave it.
    """

    supports_higher_order_operators = True  # and refuses them (`check_plain`)

    def __init__(self, scratch: str = "", chooses: bool = False) -> None:
        """`scratch`: of a backend, whose collectives take memory of their own. `chooses`: what is chosen by values that
        are not there (`topk`, `argmax`) is real, each index as often as any."""
        super().__init__()
        self._scratch = Scratch(scratch, self._look)
        self._stand_ins = STAND_INS | CHOICES if chooses else STAND_INS
        self.kind = "other"
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.flops = 0
        self.listener: Callable | None = None  # told of every operator: (kind, function, args, kwargs, out)
        self._known: dict[int, tuple[str, int]] = {}

    def mark(self) -> None:
        """Restarts the peak and the count of operations."""
        self.peak, self.flops = self.live + self._scratch.taken, 0

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Says of which kind the storages behind these tensors are."""
        for tensor in tensors:
            self._note(tensor, kind, relabel=True)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        check_plain("dry_run", function)
        kwargs = kwargs or {}
        note_generator(kwargs)
        value = under_mode(self, function, types, args, kwargs)
        if value is not NotImplemented:
            return value
        # What arrives is below any subclass: a saved DTensor stands for its shard here.
        with DisableTorchFunctionSubclass():
            if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
                args, kwargs = map_tensors((args, kwargs), _meta)
                if function is torch.ops.aten._to_copy.default:  # there is nothing to bring to another device
                    kwargs = {**kwargs, "device": _META}
            elif kwargs.get("device") == _META and _makes_integers(function, args, kwargs):
                kwargs = {**kwargs, "device": _CPU}  # asked for on the device of another tensor, which is meta
            out = self._stand_ins.get(function, function)(*args, **kwargs)
            self.flops += flops_of(function.overloadpacket, args, kwargs, out)
            if function.namespace == "c10d":
                self._scratch.called(function, args, kwargs, self.kind)
            for tensor in tensors_in(out):
                self._note(tensor, self.kind)
            if self.listener is not None:
                self.listener(self.kind, function, args, kwargs, out)
        return out

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_

        @wraps(self._resize)
        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = self._resize(storage, size)
            self._resized(storage)
            return resized

        torch.UntypedStorage.resize_ = resize
        self._watching = watched(self._scratch.begins, self._scratch.ends)
        self._watching.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        self._watching.__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def _note(self, tensor: Tensor, kind: str, relabel: bool = False) -> None:
        with DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            weakref.finalize(storage, self._forget, key).atexit = False
            self._add(key, kind, storage.nbytes())
        elif relabel and known[0] != kind:
            self._forget(key)
            self._add(key, kind, known[1])
        elif storage.nbytes() != known[1]:
            self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that is known has another size: memory that ZeRO-3 lets go, and takes again."""
        if (known := self._known.get(storage._cdata)) is not None:
            self._forget(storage._cdata)
            self._add(storage._cdata, known[0], storage.nbytes())

    def _add(self, key: int, kind: str, size: int) -> None:
        self._known[key] = (kind, size)
        if kind == HOST:
            return
        self.live[kind] += size
        self._look()

    def _look(self) -> None:
        if self.live.total() + self._scratch.taken.total() > self.peak.total():
            self.peak = self.live + self._scratch.taken

    def _forget(self, key: int) -> None:
        kind, size = self._known.pop(key)
        if kind != HOST:
            self.live[kind] -= size


_META, _CPU = torch.device("meta"), torch.device("cpu")


def _makes_integers(function, args: tuple, kwargs: dict) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    return function.overloadpacket is torch.ops.aten.arange and all(isinstance(one, int) for one in args)


def _meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta or not tensor.ndim else torch.empty_like(tensor, device="meta")

"""A model as it is probed: a copy without weights, plain kernels, and hooks that tell which modules run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from vescale_rng import attributes_of, is_deferred, materialize
from vescale_trace.effects import Kept
from vescale_trace.values import tensors_in

from ..._torch_private import _VF, decomposition_table
from .operands import Operands, drawn


def on_meta(model: nn.Module, stand_ins: Mapping[str, str] | None = None) -> nn.Module:
    """A copy of the model with its parameters on the meta device, and its buffers with values on the CPU.

    Arguments:
        stand_ins: module -> another, whose children, parameters and buffers it shares in the copy: what is never to
            run need not be copied, and attributes that others read of it are there all the same.
    """
    memo: dict[int, Any] = {}
    shared = {name: model.get_submodule(name) for name in stand_ins or ()}
    for module in shared.values():
        memo[id(module)] = _shell(module)
    for parameter in model.parameters():
        meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        empty = nn.Parameter(meta, requires_grad=False)
        empty.__dict__.update(attributes_of(parameter))
        memo[id(parameter)] = empty
    copied = copy.deepcopy(model, memo)
    for name, like in (stand_ins or {}).items():
        shell, other = memo[id(shared[name])], memo[id(model.get_submodule(like))]
        for members in ("_modules", "_parameters", "_buffers"):
            shell.__dict__[members] = dict(zip(shell.__dict__[members], other.__dict__[members].values()))
    for module in copied.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.device.type != "cpu" or is_deferred(buffer)):
                module._buffers[name] = _values(buffer)
    return copied


def _shell(module: nn.Module) -> nn.Module:
    shell = object.__new__(type(module))
    for key, value in vars(module).items():
        shell.__dict__[key] = copy.copy(value) if isinstance(value, dict) else value
    return shell


def _values(buffer: Tensor) -> Tensor:
    if is_deferred(buffer):
        buffer = materialize(buffer)
    return drawn(buffer.numel(), buffer.dtype).view(buffer.shape) if buffer.is_meta else buffer.detach().cpu()


@contextmanager
def values_kept(model: nn.Module) -> Iterator[None]:
    """Restores what a forward leaves, and parameters that it replaces, as one does that casts a layer of its own
    (`self.gate = self.gate.to(torch.float32)`): each forward meets the same model."""
    parameters, kept = [(parameter, parameter.detach()) for parameter in model.parameters()], Kept(model)
    try:
        yield
    finally:
        for parameter, was in parameters:
            if parameter.untyped_storage()._cdata != was.untyped_storage()._cdata:
                parameter.data = was
        kept.restore()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention in elementary steps: a fused kernel may swallow a NaN. One thread: what is computed is small."""
    fast, threads = torch.backends.mha.get_fastpath_enabled(), torch.get_num_threads()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_num_threads(1)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_num_threads(threads)


class OnOneDevice(TorchFunctionMode):
    """Answers functions that check in C++ that all tensors lie on one device, before anything below sees them:
    attention gets values for a parameter that it is given, and recurrent layers run step by step, in products with
    theirs, by torch's decompositions."""

    def __init__(self, operands: Operands, recurrent: bool) -> None:
        super().__init__()
        self._operands, self._recurrent = operands, recurrent

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is scaled_dot_product_attention:
            kwargs = {name: self._with_values(one) for name, one in (kwargs or {}).items()}
            return function(*map(self._with_values, args), **kwargs)
        unrolled = _unrolled().get(function) if self._recurrent else None
        if unrolled is None:
            return function(*args, **(kwargs or {}))
        batch, packed = unrolled
        sizes = args[1]  # of a packed sequence's steps; of a batch the state, or a tuple of two
        is_packed = isinstance(sizes, Tensor) and not sizes.is_floating_point()
        return (packed if is_packed else batch)(*args, **(kwargs or {}))

    def _with_values(self, given: Any) -> Any:
        return self._operands.value(given) if isinstance(given, Tensor) and given.is_meta else given


@cache
def _unrolled() -> dict[Callable, tuple[Callable, Callable]]:
    """Recurrent function -> what it does to a batch, and to a packed sequence: (data, batch_sizes, ...)."""
    table, found = decomposition_table(), {}
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        operator = getattr(torch.ops.aten, name)
        found[getattr(_VF, name)] = table[operator.input], table[operator.data]
    return found


@contextmanager
def paths(
    modules: Iterable[tuple[str, nn.Module]], path: list[str], note: Callable[[str, Any, Any], None] | None
) -> Iterator[None]:
    """Keeps in `path` which of the named `modules` are running, outermost first; `note` sees what each takes and
    returns."""
    handles = []
    for name, module in modules:

        def enter(_, __, name=name):
            path.append(name)

        def leave(_, args, kwargs, output, name=name):
            path.pop()
            if note is not None:
                note(name, (args, kwargs), output)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(value: Any) -> Tensor | None:
    return next(iter(tensors_in(value)), None)

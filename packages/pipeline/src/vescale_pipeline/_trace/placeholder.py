"""Placeholder: a tensor that lives on another stage. Shape, dtype and the real device, no data.

It is a meta tensor of a subclass. Every function on it comes to `__torch_function__`,
which asks the *reader* of the moment: the dry run (`record.py`), which computes shapes,
or the run of one stage (`_runtime/skeleton.py`), which knows from the dry run what comes and
replaces placeholders by real tensors where its own part begins. Metadata is answered
at once, and the device is the one where the data would be: code such as
`torch.arange(n, device=x.device)` must not end up on meta.

Outside a forward there is no reader, and a placeholder is what the model returned
beside its loss: any use of its value is an error that names `loss_fn=`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from vescale_trace.values import map_tensors, tensors_in

from .._errors import PipelineError
from .._torch_private import DisableTorchFunctionSubclass, _swap_tensor_impl
from .meta_calls import placed

local_only = DisableTorchFunctionSubclass


class Reader(Protocol):
    """Decides what a function on a placeholder does."""

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any: ...

    def enter(self, station: Any, args: tuple, kwargs: dict) -> Any: ...


class _Current:
    """The reader of the moment; None inside a stage's own modules and outside a forward.

    `again` gives the value behind a placeholder, while user code computes again in a backward. `halves` is what the
    checkpoints of a forward are of whose backward is split (`_runtime/recomputed.py`).
    """

    __slots__ = ("reader", "again", "halves")
    reader: Reader | None
    again: Callable[[Tensor], Tensor] | None
    halves: Any


current = _Current()
current.reader = current.again = current.halves = None


class Placeholder(Tensor):
    """See the module. `key` numbers the value in its dry run; `origin` is the module that computes it.

    A placeholder of a parameter (`is_weight`) stands in a stage that does not own it. Outside a forward it is a
    parameter to whoever chooses and groups these, and `trains` is whether that has a gradient.
    """

    key: int
    origin: str
    home: torch.device
    is_weight: bool
    trains = True
    lost: Any = None  # of an evaluation's output: why nobody can tell it from the microbatches'
    before_dtensor = True
    """Functions on a placeholder and a vescale_dtensor.DTensor come here."""

    __hash__ = Tensor.__hash__

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        metadata = _METADATA.get(function)
        if metadata is not None:
            return metadata(function, args, kwargs or {})
        if function is Tensor.expand_as and len(args) == 2 and type(args[0]) is not Placeholder:
            return args[0].expand(args[1].shape)  # what every stage has goes on being there on every stage
        reader = current.reader
        if reader is None:
            if current.again is not None:
                return _once_more(function, args, kwargs or {})
            if args and type(args[0]) is Placeholder and args[0].is_weight:
                if function in _OWNERS:
                    return _OWNERS[function](*args, **(kwargs or {}))
                if function in _ALIKE:
                    return _alike(function, args, kwargs or {})
            raise used_outside(function, args)
        if function is Tensor.__iter__:
            return iter(reader.call(Tensor.unbind, args, {}))
        return reader.call(function, args, kwargs or {})


def _once_more(function: Callable, args: tuple, kwargs: dict) -> Any:
    """A function of user code that computes again."""
    real = map_tensors((args, kwargs), current.again)
    if any(type(tensor) is Placeholder for tensor in tensors_in(real)):
        raise used_outside(function, args)
    return function(*real[0], **real[1])


def placeholder(meta: Tensor, key: int, origin: str, home: torch.device, is_weight: bool = False) -> Placeholder:
    """Makes a tensor, fresh and meta as a rule, a placeholder; it changes the object."""
    meta.__class__ = Placeholder
    meta.key, meta.origin, meta.home, meta.is_weight = key, origin, home, is_weight
    return meta


def lost_output(template: Placeholder, why: Any) -> Placeholder:
    """Stands for an evaluation's output that the microbatches do not determine: its use raises, and says `why` (a
    `Lost`)."""
    with local_only():
        made = placeholder(torch.empty_like(template), template.key, template.origin, template.home)
    made.lost = why
    return made


def become(tensor: Tensor, made: Placeholder) -> None:
    """Makes a plain tensor that user code holds the placeholder `made`: from now on its value is elsewhere."""
    placeholder(tensor, made.key, made.origin, made.home, made.is_weight)


def change_places(parameter: Tensor, made: Placeholder) -> None:
    """The parameter's object becomes the placeholder, and the placeholder's what the parameter was, memory and all."""
    kind, held = parameter.__class__, parameter.__dict__
    parameter.__class__, made.__class__ = made.__class__, kind
    parameter.__dict__, made.__dict__ = made.__dict__, held
    _swap_tensor_impl(parameter, made)


def base_of(tensor: Tensor) -> Tensor:
    """Returns the base of a view, or the tensor itself."""
    with local_only():
        return tensor if tensor._base is None else tensor._base


def memory_of(tensor: Tensor) -> int:
    """The address of its storage, as a name: views have one."""
    with local_only():
        return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """Returns how often it was written in place."""
    with local_only():
        return tensor._version


def stand_in_of(tensor: Tensor) -> Tensor:
    """A meta tensor is its own; a plain tensor that became a placeholder gets one."""
    with local_only():
        if tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def weight_placeholder(
    parameter: Tensor, name: str, device: torch.device | None = None, compute: torch.dtype | None = None
) -> Placeholder:
    """Returns the stub of a parameter that another stage owns, on `device` if given.

    `shape` of a distributed one is the global shape. `compute`: the floating dtype that forwards see it in, where that
    is another.
    """
    dtype = compute if compute is not None and parameter.dtype.is_floating_point else parameter.dtype
    if type(parameter) is Placeholder:
        if dtype is parameter.dtype:
            return parameter
        device = parameter.home
    meta = torch.empty(tuple(parameter.shape), dtype=dtype, device="meta")
    home = parameter.device if device is None or parameter.device.type == "meta" else placed(device)
    made = placeholder(meta, -1, name, home, is_weight=True)
    made._is_param, made.trains = True, parameter.requires_grad  # to torch, isinstance(made, nn.Parameter)
    return made


def used_outside(function: Callable, args: tuple) -> PipelineError:
    """The error for a value read after the call, or for a parameter that another stage has."""
    weight = next((a for a in args if type(a) is Placeholder and a.is_weight), None)
    if weight is not None:
        return PipelineError(
            "pipeline",
            f"{name_of(function)} reads {weight.origin!r}, a parameter of another stage: its values are not on this "
            "rank",
            (),
            [
                ("for name, parameter in model.named_parameters(): ...", "on each rank, those of its stages"),
                ("vescale.whole_state_dict(model)", "on every rank: the values of all stages"),
                ("parallelize(plan, model, optimizer)", "an optimizer that was made before, when all values were here"),
            ],
        )
    origin = next((a.origin for a in tensors_in(args) if type(a) is Placeholder), "the model")
    lost = next((a.lost for a in tensors_in(args) if type(a) is Placeholder and a.lost is not None), None)
    if lost is not None:
        return PipelineError(
            "pipeline",
            f"{name_of(function)} was called on an output of an evaluation that comes from the batch by {lost.cause}"
            f"{f', at {lost.line}' if lost.line else ''}: it cannot be derived from the microbatches'",
            ["known  rows, means and sums over rows, and what no row enters"],
            [
                ("return the rows that it is computed from", "evaluation returns all rows, on every rank"),
                ("generate_plan(model, pin={'pp': 1}, ...)", "rows that meet do so without a pipeline"),
            ],
        )
    if current.halves is not None:
        return PipelineError(
            "pipeline",
            f"{name_of(function)} was called in a stage on a value of {origin!r} that an object has kept from an "
            "earlier call: of a call nothing is left but what it returns",
            (),
            [
                ("model.generate(..., use_cache=False)", "no cache of keys and values: a token computes all before it"),
                ("generate_plan(model, pin={'pp': 1}, ...)", "without a pipeline they keep what they do on one device"),
            ],
        )
    return PipelineError(
        "pipeline",
        f"{name_of(function)} was called on an output of {origin!r} that is not the loss: under a pipeline the "
        "backward has run when the model returns, so only the loss leaves it, and means, sums and counts over the "
        "batch's rows without a gradient",
        (),
        [
            ("return loss, (out.argmax(-1) == y).float().mean()", "in the forward: a metric, of the whole batch"),
            ("parallelize(plan, model, optimizer_fn, loss_fn=f)", "model(x, target=y) is f(output, x, target=y)"),
            ("with torch.no_grad(): model(x)", "evaluation returns whole outputs"),
        ],
    )


def read_error(function: Callable, args: tuple, where: str, is_cut: bool) -> PipelineError:
    """The error for a value read inside a forward. `is_cut`: whether a cut lies in the module `where`."""
    origin = next((a.origin for a in args if type(a) is Placeholder), "?")
    if is_cut:
        why = "which every stage runs: on the other stages the value is not there"
        fixes = [(f"a cut before or after, not inside {where!r}", "then one stage owns the reader and the value")]
    else:
        why = "which is run without values first, for the shapes of what crosses the cuts"
        fixes = [
            ("torch.where(condition, a, b)", "in place of a branch"),
            ("a mask, multiplied", "instead of a selection, whose shape depends on values"),
        ]
    return PipelineError(
        "pipeline",
        f"{name_of(function)} reads a value that {origin!r} computes, in the forward of {where!r}, {why}",
        (),
        [*fixes, ("generate_plan(model, pin={'pp': 1}, ...)", "values are read as on one device without a pipeline")],
    )


def name_of(function: Callable) -> str:
    """A function as a user knows it; a getter by its property."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__" and owner is not None:
        return getattr(owner, "__name__", "a property")
    return getattr(function, "__name__", str(function))


# --- metadata -----------------------------------------------------------------------


def _of_meta(function: Callable, args: tuple, kwargs: dict) -> Any:
    with local_only():
        return function(*args, **kwargs)


def _device(function: Callable, args: tuple, kwargs: dict) -> torch.device:
    return args[0].home


def _text(function: Callable, args: tuple, kwargs: dict) -> str:
    self = args[0]
    with local_only():
        shape, dtype = list(self.shape), self.dtype
    return f"Placeholder({shape}, {dtype}, device={self.home}, of {self.origin!r})"


def _on(kind: str) -> Callable:
    return lambda function, args, kwargs: args[0].home.type == kind


def _requires_grad(function: Callable, args: tuple, kwargs: dict) -> bool:
    if args[0].is_weight and current.reader is None:
        return args[0].trains
    with local_only():
        return args[0].is_floating_point() and torch.is_grad_enabled()


def _getters(*names: str) -> list[Callable]:
    return [getattr(Tensor, name).__get__ for name in names]


_METADATA: dict[Callable, Callable] = {
    **dict.fromkeys(
        [
            *_getters("shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested"),
            *_getters("itemsize", "nbytes", "is_leaf", "grad", "grad_fn", "_base", "is_mkldnn"),
            *(getattr(Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement", "stride")),
            *(getattr(Tensor, name) for name in ("is_contiguous", "is_floating_point", "is_complex", "element_size")),
            *(getattr(Tensor, name) for name in ("storage_offset", "__len__", "is_signed", "is_conj", "is_neg")),
            *(torch.is_floating_point, torch.is_complex, torch.numel, torch.result_type, torch.is_same_size),
        ],
        _of_meta,
    ),
    **dict.fromkeys([Tensor.__repr__, Tensor.__str__], _text),
    Tensor.device.__get__: _device,
    Tensor.get_device: lambda function, args, kwargs: -1 if args[0].home.type == "cpu" else args[0].home.index or 0,
    Tensor.requires_grad.__get__: _requires_grad,
    Tensor.is_meta.__get__: _on("meta"),
    Tensor.is_cpu.__get__: _on("cpu"),
    Tensor.is_cuda.__get__: _on("cuda"),
    Tensor.is_xpu.__get__: _on("xpu"),
    Tensor.is_mps.__get__: _on("mps"),
}


def _train(weight: Placeholder, trains: bool = True, **given: bool) -> Placeholder:
    weight.trains = given.get("requires_grad", trains)
    return weight


_OWNERS: dict[Callable, Callable] = {
    Tensor.requires_grad_: _train,
    Tensor.requires_grad.__set__: _train,
    Tensor.grad.__set__: lambda weight, gradient: None,
    Tensor.register_hook: lambda weight, hook: no_handle(),
    Tensor.register_post_accumulate_grad_hook: lambda weight, hook: no_handle(),
}
"""Changes of a parameter that a loop makes by its name, and only the stage that owns it has to make: for the others,
what is returned."""


def no_handle() -> RemovableHandle:
    """Returns the handle of a hook that is registered on another stage."""
    return RemovableHandle(OrderedDict())


FACTORIES = frozenset(
    [
        *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
    ]
)
"""Functions that read no value of their tensor: every stage computes them for real."""


_ALIKE = FACTORIES | {Tensor.detach, Tensor.clone, torch.clone, Tensor.data.__get__}


def _alike(function: Callable, args: tuple, kwargs: dict) -> Placeholder:
    """Stands for a tensor like another stage's parameter, made before anything is computed, as optimizers make their
    states: it takes no memory, and its use raises."""
    with local_only():
        return placeholder(function(*args, **kwargs), -1, args[0].origin, args[0].home, is_weight=True)


def make(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """One of FACTORIES on the real device."""
    model = args[0] if args else kwargs.get("input")
    kwargs = {"device": model.home, **kwargs} if kwargs.get("device") is None else kwargs
    with local_only():
        return function(*args, **kwargs)

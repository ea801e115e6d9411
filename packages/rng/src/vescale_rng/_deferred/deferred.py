"""deferred_init: a model is built without memory; what its tensors would hold is recorded.

Within the block every factory gives a `Deferred`: a tensor with sizes, strides, dtype
and device, and no data. What is done to it comes here below autograd, as ATen calls
(`__torch_dispatch__`), and goes on a tape (`tape.py`); in-place, views, `.data`, tied
parameters, buffers and copies of modules are torch's own doing. Random numbers are
gone past at once, so that the generator is at every moment where a plain build would
have it; the state before each draw is kept. `materialize.py` runs the tape.

Code that reads values (`tensor.item()`, `if mask.any()`), or draws in another way than
a fill (multinomial, randperm), gets real values: the tensors that it reads are made
for the purpose, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import OperatorError
from vescale_dtensor.engine import attributes_beside

from .._cpu.stream import Draw, take
from .._torch_private import (
    TorchDispatchMode,
    _disable_current_modes,
    _disabled_torch_function_impl,
    _make_wrapper_subclass,
    no_dispatch,
    tree_flatten,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from .tape import NEVER, Entry, Memory, Slot, history

aten = torch.ops.aten
_FILLS = "normal_ uniform_ random_ exponential_ cauchy_ geometric_ log_normal_ bernoulli_".split()
# Random factories are an empty tensor and a fill.
_FILLED = {"rand": "uniform_", "randn": "normal_", "randint": "random_"}
_FILLED |= {f"{name}_like": fill for name, fill in _FILLED.items()}
_OVERWRITES = {"zero_", "fill_", "copy_", *_FILLS}
_CPU = torch.device("cpu")


@contextmanager
def deferred_init() -> Iterator[None]:
    """Creates tensors inside the block without memory; `parallelize` or `materialize` allocates them and fills in their
    values.

    Example::

        with vescale.deferred_init():
            model = AutoModelForCausalLM.from_config(config)
        model, optimizer = vescale.parallelize(plan, model, optimizer_fn)  # only shards are ever allocated

    The values are bitwise those that the same lines would give without the block, from the same state of the default
    generator (or of one passed in), and the generator ends in the same state. A function that reads values meanwhile,
    such as `nn.init.trunc_normal_` of torch 2.13, costs the memory and time of the tensor that it reads, once.

    Raises OperatorError for functions that change a tensor's storage (`resize_`, `set_`). No communication.
    """
    with _Recording():
        yield


def is_deferred(tensor: object) -> bool:
    """True if the tensor does not have its values yet."""
    return isinstance(tensor, Deferred)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Returns the attributes users put on a tensor, deferred or not, and whether it is a parameter."""
    return {key: value for key, value in attributes_beside(tensor).items() if key != "_slot"}


class Deferred(Tensor):
    """A tensor that has no memory yet: an entry of the tape stands for its values."""

    _slot: Slot
    __torch_function__ = _disabled_torch_function_impl

    @staticmethod
    def of(slot: Slot, requires_grad: bool = False) -> Deferred:
        meta = slot.meta
        tensor = _make_wrapper_subclass(
            Deferred, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=slot.device, requires_grad=requires_grad,
        )  # fmt: skip
        tensor._slot = slot
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return record(function, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not is_deferred(value):
            value = Deferred.of(_constant(value))
        Tensor.data.__set__(self, value)
        self._slot = value._slot

    def __deepcopy__(self, memo: dict) -> Deferred:
        if id(self) not in memo:
            with torch.no_grad():
                copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update(attributes_of(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OperatorError(
            "pickle",
            "a deferred tensor has no values to save yet",
            [repr(self)],
            [("vescale.parallelize(plan, model)", ""), ("vescale.materialize(model)", "the whole of it, on this rank")],
        )

    def tolist(self) -> Any:
        return value_of(self._slot).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return value_of(self._slot).numpy(force=force)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        kind = "Parameter, deferred" if getattr(self, "_is_param", False) else "deferred"
        return f"Tensor({kind}, {list(self.shape)}, {self.dtype}, {self.device})"


class _Recording(TorchDispatchMode):
    """Catches the factories, whose arguments hold no tensor that could; all else it leaves alone."""

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        if any(is_deferred(leaf) for leaf in leaves):
            return record(function, args, kwargs)
        if any(isinstance(leaf, Tensor) for leaf in leaves) or not _makes_tensor(function):
            return function(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            return function(*args, **kwargs)
        return record(function, args, kwargs)


def _makes_tensor(function: Callable) -> bool:
    returns = function._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor" and "device" in _argument_names(function)


def _argument_names(function: Callable) -> list[str]:
    return [argument.name for argument in function._schema.arguments]


# --- recording --------------------------------------------------------------------


def record(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Records an ATen call on deferred tensors; returns deferred tensors, or real values where it must."""
    name = function._schema.name.removeprefix("aten::")
    if name in ("resize_", "set_", "resize_as_"):
        raise OperatorError(
            name,
            "the storage of a deferred tensor cannot be changed",
            [repr(leaf) for leaf in tree_flatten((args, kwargs))[0] if is_deferred(leaf)],
            [("build this part of the model outside deferred_init()", "")],
        )
    if torch.Tag.nondeterministic_seeded in function.tags:
        return _random(name, function, args, kwargs)
    if torch.Tag.inplace_view in function.tags:
        return _changed_view(function, args, kwargs)
    if not all("Tensor" in str(returned.type) for returned in function._schema.returns):
        return _at_once(function, args, kwargs)
    slots = _slots((args, kwargs))
    if any(_written(function, args, kwargs, lambda value: not is_deferred(value))):
        return _at_once(function, args, kwargs)
    on_meta = tree_map_only(Slot, lambda slot: slot.meta, slots)
    place = next((slot.device for slot in tree_flatten(slots)[0] if isinstance(slot, Slot)), _CPU)
    if "device" in _argument_names(function):
        given = kwargs.get("device")
        place = place if given is None else torch.device(given)
        on_meta[1].update(device="meta", **({"pin_memory": False} if "pin_memory" in kwargs else {}))
    try:
        out = function(*on_meta[0], **on_meta[1])
    except (NotImplementedError, RuntimeError):  # what it gives depends on values, or it is in error: let it say so
        return _at_once(function, args, kwargs)
    flat, spec = tree_flatten(out)
    if "dtype" in _argument_names(function) and kwargs.get("dtype") is None and flat and not _tensors(slots):
        slots[1]["dtype"] = flat[0].dtype  # the default may be another one when it is made
    entry = Entry(function, *slots)
    return tree_unflatten(_noted(entry, name, function, args, kwargs, flat, place), spec)


def _noted(entry: Entry, name: str, function: Callable, args: tuple, kwargs: dict, flat: list, place) -> list:
    """The outputs of an entry, as deferred tensors; the entry learns what it reads, writes and makes."""
    inputs = _tensors((entry.args, entry.kwargs))
    by_storage = {slot.meta.untyped_storage()._cdata: slot for slot in inputs}
    written = list(_written(function, args, kwargs, is_deferred))
    targets = {value._slot: value for value in written}
    entry.overwrites = name in _OVERWRITES and all(slot.is_all_of_its_memory for slot in targets)
    outs, made = [], []
    for position, meta in enumerate(flat):
        if not isinstance(meta, Tensor):
            outs.append(meta)
            continue
        same = next((value for slot, value in targets.items() if slot.meta is meta), None)
        if same is None:
            source = by_storage.get(meta.untyped_storage()._cdata)
            slot = Slot(meta, place, Memory() if source is None else source.memory, entry)
            made.append((position, slot))
            same = Deferred.of(slot)
        outs.append(same)
    entry.made = tuple(made)
    views = {slot.memory for _, slot in made}
    entry.reads = tuple(
        (slot, NEVER if slot.memory in views or entry.overwrites and slot in targets else entry.number)
        for slot in inputs
    )
    for slot, before in entry.reads:
        if before != NEVER and slot not in targets:
            slot.memory.read_at = entry.number
    for slot in targets:
        entry.write_to(slot)
    return outs


def _random(name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Fills are taken now, and placed when the tensor is made; other draws are made at once."""
    if name in _FILLED and (kwargs.get("device") is None or torch.device(kwargs["device"]).type == "cpu"):
        return _filled_factory(name, function, args, kwargs)
    own = args[0] if args else None
    generator = kwargs.get("generator")
    on_host = is_deferred(own) and own.device.type == "cpu" and (generator is None or generator.device.type == "cpu")
    if name not in _FILLS or not on_host or any(isinstance(value, Tensor) for value in args[1:]):
        return _at_once(function, args, kwargs)
    draw = Draw(getattr(Tensor, name), tuple(args[1:]), dict(kwargs))
    entry = Entry(function, *_slots((args, {})), taken=take(draw, own._slot.meta))
    return _noted(entry, name, function, args, kwargs, [own._slot.meta], own.device)[0]


def _filled_factory(name: str, function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """rand, randn, randint and their likes, as torch makes them."""
    names = _argument_names(function)
    given = dict(zip(names, args)) | kwargs
    generator = given.pop("generator", None)
    if name == "randint":
        given.setdefault("dtype", torch.int64)
    options = {key: given[key] for key in ("dtype", "device", "pin_memory", "memory_format") if given.get(key)}
    if name.endswith("_like"):
        fresh = record(aten.empty_like.default, (given["self"],), options)
    else:
        fresh = record(aten.empty.memory_format, (given["size"],), options)
    bounds = (given.get("low", 0), given["high"]) if "high" in given else ()
    fill = aten.random_.__getattr__("from") if bounds else getattr(aten, _FILLED[name]).default
    return record(fill, (fresh, *bounds), {"generator": generator})


def _changed_view(function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """t_, squeeze_ and the like: the same object, another view of its memory."""
    own = args[0]
    meta = aten.alias(own._slot.meta)
    function(meta, *args[1:], **kwargs)
    with no_dispatch():
        function(own, *args[1:], **kwargs)
    entry = Entry(_on_alias(function), *_slots((args, kwargs)))
    slot = Slot(meta, own.device, own._slot.memory, entry)
    entry.reads, entry.made = ((own._slot, NEVER),), ((0, slot),)
    own._slot = slot
    return own


def _on_alias(function: Callable) -> Callable:
    def run(own: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return function(aten.alias(own), *args, **kwargs)

    return run


def _at_once(function: Callable, args: tuple, kwargs: dict) -> Any:
    """The call on real values; what it writes to deferred tensors goes on the tape as a value."""
    real_args, real_kwargs = tree_map(
        lambda value: value_of(value._slot) if is_deferred(value) else value, (args, kwargs)
    )
    out = function(*real_args, **real_kwargs)
    originals = {}
    for value, real in zip(tree_flatten((args, kwargs))[0], tree_flatten((real_args, real_kwargs))[0]):
        if is_deferred(value):
            originals[id(real)] = value
    for value in _written(function, args, kwargs, is_deferred):
        real = next(real for real in tree_flatten((real_args, real_kwargs))[0] if originals.get(id(real)) is value)
        record(aten.copy_.default, (value, real), {})
    return tree_map(lambda value: originals.get(id(value), value), out)


def _written(function: Callable, args: tuple, kwargs: dict, condition: Callable) -> Iterator[Any]:
    """The tensors that the call writes to, of those that meet a condition."""
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for one in tree_flatten(value)[0]:
                if isinstance(one, Tensor) and condition(one):
                    yield one


def _slots(values: Any) -> Any:
    """`values` with slots for tensors: those of the deferred, fresh ones that hold a copy of the others."""

    def slot(value: Any) -> Any:
        if is_deferred(value):
            return value._slot
        return _constant(value) if isinstance(value, Tensor) else value

    return tree_map(slot, values)


def _constant(value: Tensor) -> Slot:
    """A real tensor on the tape: a copy, since its owner may write to it."""
    kept = value.detach().clone()
    slot = Slot(kept.to("meta"), value.device, Memory(), Entry(None, constant=kept))
    slot.entry.made = ((0, slot),)
    return slot


def _tensors(slots: Any) -> list[Slot]:
    return [slot for slot in tree_flatten(slots)[0] if isinstance(slot, Slot)]


# --- values -----------------------------------------------------------------------


def value_of(slot: Slot) -> Tensor:
    """The whole tensor, made anew by stock torch."""
    values: dict[Slot, Tensor] = {}
    with _disable_current_modes(), torch.no_grad():
        for entry in history(slot):
            flat = tree_flatten(entry.call(values))[0]
            values.update((made, flat[position]) for position, made in entry.made)
    return values[slot]

"""The other stages' gradients, as one more parameter: `clip_grad_norm_(model.parameters())` is global.

Under a pipeline `model.parameters()` ends with an `OtherStages`, a parameter of no elements. It and its gradient, which
has no elements either, have the norm of all that this rank does not hold: so any code that takes the norm of every
parameter or gradient and combines them gets the global norm, and what it then multiplies by is the same on all ranks.
torch's own clipping stacks the norms of all gradients first: in place of that stack comes one of all norms in the order
of the whole model, each as the first stage that holds its gradient tells it. So the total has the same bits on all
ranks, whichever function took the norms here, and one device's wherever the norms have them.

A sum of squares or of absolute values, a largest absolute value, and whether all is finite follow from norms. What
changes elements one by one changes none here. Every other function that makes one number of many (a mean, a product of
two gradients, a concatenation) is an error: it would have a value of this rank's stages alone.

`named_parameters`, `state_dict` and the optimizer know nothing of it. Norms are numbers of the device throughout: the
host never waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vescale_trace.values import map_tensors, tensors_in

from ..._errors import PipelineError
from ..._torch_private import DisableTorchFunctionSubclass, _foreach_norm, make_subclass
from .told import Placed, Told, combined

NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm))
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_VIEWS = frozenset(
    (Tensor.detach, torch.detach, Tensor.contiguous, Tensor.cpu, Tensor.view, Tensor.reshape, torch.reshape,
     Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel, _DATA)
)  # fmt: skip
_SAME = _VIEWS | frozenset(
    (Tensor.clone, torch.clone, Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)
)
_ABSOLUTE = frozenset((torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute))
_POWERS = frozenset((torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__))
_PRODUCTS = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply))
_SUMS = frozenset((torch.sum, Tensor.sum))
_LARGEST = frozenset((torch.max, Tensor.max, torch.amax, Tensor.amax))
_ASKED = {torch.isfinite: torch.isfinite, Tensor.isfinite: torch.isfinite, torch.isnan: torch.isnan,
          Tensor.isnan: torch.isnan}  # fmt: skip
_ANSWERS = {torch.all: torch.isfinite, Tensor.all: torch.isfinite, torch.any: torch.isnan, Tensor.any: torch.isnan}
_COMPUTED = _ABSOLUTE | _POWERS | _PRODUCTS | _SUMS | _LARGEST | NORMS | _ASKED.keys()
_FOLLOWED = _SAME | _COMPUTED
_COPIES = frozenset(("__deepcopy__", "__reduce_ex__"))
_METADATA = frozenset(
    """__get__ __set__ __delete__ __hash__ __repr__ __format__ __len__ size dim ndimension numel nelement stride
    storage_offset element_size is_floating_point is_complex is_contiguous is_signed is_same_size get_device data_ptr
    requires_grad_ register_hook register_post_accumulate_grad_hook zeros_like ones_like empty_like full_like rand_like
    randn_like new_zeros new_empty new_ones new_full new_tensor""".split()
)
"""Functions that read no value of the elements."""


@dataclass(frozen=True)
class Norms:
    """Norms that this rank is told, of gradients or of values elsewhere, as these are now.

    Arguments:
        of: gives them, of an order; communicates.
        now: gives another thing whenever what they are of may have changed.
        then: of a copy, what `now` gave when it was made.
    """

    of: Callable[[float], Placed]
    now: Callable[[], Any]
    then: Any = None

    def copied(self) -> Norms:
        return self if self.then is not None else replace(self, then=self.now())

    @property
    def is_old(self) -> bool:
        """True if they are no longer those of the copy."""
        return self.then is not None and self.now() != self.then


class OtherStages(nn.Parameter):
    """See the module. `norm_of(order, values)` gives the norms, of values or of gradients; it communicates.
    `now(values)` gives another thing whenever these may have changed.

    Of a model with trained and frozen parameters there are two, so that code that chooses by `requires_grad` gets what
    it chose.
    """

    before_dtensor = True
    exists: bool  # the gradients
    leaf: nn.Parameter  # in its place among tensors of other classes

    def __new__(
        cls,
        norm_of: Callable[[float, bool], Placed],
        now: Callable[[bool], Any],
        device: torch.device,
        trained: bool = True,
    ) -> OtherStages:
        made = make_subclass(cls, torch.empty(0, device=device), trained)
        made.exists, made.leaf = False, nn.Parameter(torch.empty(0, device=device), requires_grad=trained)
        made.gradients = Remote(Norms(partial(norm_of, values=False), partial(now, False)), device)
        made.values = Remote(Norms(partial(norm_of, values=True), partial(now, True)), device)
        return made

    @property
    def grad(self) -> Tensor | None:
        return self.gradients if self.exists else None

    @grad.setter
    def grad(self, value: Any) -> None:
        """Ignores what is set: it is always what the other stages hold."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _FOLLOWED:
            args, kwargs = map_tensors((args, kwargs), lambda t: t.values if type(t) is cls else t)
            return function(*args, **kwargs)
        if function is torch.autograd.grad:
            return cls._gradients(*args, **kwargs)
        if not {kind for kind in types if issubclass(kind, Tensor)} <= {cls, Tensor, nn.Parameter}:
            leaves = map_tensors((args, kwargs), lambda t: t.leaf if type(t) is cls else t)
            return _checked(function, function(*leaves[0], **leaves[1]), args)
        with DisableTorchFunctionSubclass():
            return _checked(function, _tried(function, args, kwargs), args)

    @classmethod
    def _gradients(cls, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`: what this rank holds has gradients; of those elsewhere nothing is known."""
        asked = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        here = [one for one in asked if type(one) is not cls]
        found = iter(torch.autograd.grad(outputs, here, *args, **kwargs) if here else ())
        return tuple(Remote(None, one.device) if type(one) is cls else next(found) for one in asked)


class Remote(Tensor):
    """All gradients elsewhere, or all values, and what becomes of them element by element.

    Arguments:
        norms: of what it began as; None if they say nothing any more of what it is now.
        power: what every element was raised to since.
        is_absolute: whether no element can be negative.
        asked: what is asked of every element: `torch.isfinite` or `torch.isnan`.
    """

    before_dtensor = True
    norms: Norms | None

    def __new__(
        cls,
        norms: Norms | None,
        device: torch.device,
        power: float = 1,
        is_absolute: bool = False,
        asked: Callable | None = None,
    ) -> Remote:
        made = make_subclass(cls, torch.empty(0, device=device))
        made.norms, made.power, made.is_absolute, made.asked = norms, power, is_absolute, asked
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args and type(args[0]) is cls else None
        if self is not None and (found := self._followed(function, args, kwargs)) is not None:
            return found
        if function is _foreach_norm:
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            norms = iter(function(others, order) if others else ())
            return [cls.__torch_function__(torch.norm, types, (t, order)) if type(t) is cls else next(norms)
                    for t in args[0]]  # fmt: skip
        name = getattr(function, "__name__", "")
        if name in ("mul_", "div_", "_foreach_mul_", "_foreach_div_"):
            if isinstance(args[0], Tensor):
                return args[0]
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            return function(others, *args[1:], **kwargs) if others else None
        with DisableTorchFunctionSubclass():
            if name in _COPIES:
                return function(torch.empty(0, device=args[0].device), *args[1:])
            out = _checked(function, _tried(function, args, kwargs), args)
            if type(out) is Tensor and name not in _METADATA and not any(out is tensor for tensor in tensors_in(args)):
                return cls(None, out.device)
            return out

    def _followed(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Computes a function from norms; None if they do not suffice."""
        power, absolute = self.power, self.is_absolute
        if function in _VIEWS:
            return Remote(self.norms, self.device, power, absolute, self.asked)
        if self.norms is not None and self.norms.is_old and (function in _COMPUTED or function in _ANSWERS):
            raise refused(function, is_old=True)
        if function in NORMS:
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            order = 2.0 if order in (None, "fro") else float(order)
            if self.norms is None or self.power != 1 or self.asked is not None:
                raise refused(function)
            return Told(self.norms.of(order), order, self.device)
        if function in _ANSWERS and self.asked is _ANSWERS[function] and len(args) == 1 and not kwargs:
            return self.asked(self._largest())
        if self.norms is None or self.asked is not None:
            return None
        if function in _SAME:
            return self._made_of(power, absolute)
        if function in _ASKED:
            return self._made_of(power, absolute, _ASKED[function])
        if function in _ABSOLUTE:
            return self._made_of(power, True)
        if function in _POWERS:
            by = args[1] if len(args) > 1 else kwargs.get("exponent", 2)
            if isinstance(by, (int, float)) and by > 0 and (absolute or by == int(by)):
                return self._made_of(power * by, absolute or by % 2 == 0)
        if function in _PRODUCTS and len(args) == 2 and self._is_like(args[1]):
            return self._made_of(power * 2, True)
        if len(args) == 1 and not kwargs.keys() - {"dtype"} and absolute:
            if function in _SUMS:
                return Told(self.norms.of(float(power)).each(lambda norm: norm**power), None, self.device)
            if function in _LARGEST:
                return self._largest() ** power
        return None

    def _made_of(self, power: float, is_absolute: bool, asked: Callable | None = None) -> Remote:
        """Returns a copy computed from it now, which does not change with it."""
        return Remote(self.norms.copied(), self.device, power, is_absolute, asked)

    def _is_like(self, other: Any) -> bool:
        other = other.values if type(other) is OtherStages else other
        if type(other) is not Remote or other.norms is None:
            return False
        if other.norms.is_old:
            raise refused(torch.mul, is_old=True)
        mine = self.norms.of, self.power, self.is_absolute, None
        return (other.norms.of, other.power, other.is_absolute, other.asked) == mine

    def _largest(self) -> Tensor:
        placed = self.norms.of(float("inf"))
        largest = combined(placed.elsewhere, float("inf"), self.device)
        return largest.to(placed.dtype or torch.get_default_dtype())


def _tried(function: Callable, args: tuple, kwargs: dict) -> Any:
    try:
        return function(*args, **kwargs)
    except (RuntimeError, IndexError) as error:  # as a maximum over no elements
        raise refused(function) from error


def _checked(function: Callable, out: Any, args: tuple) -> Any:
    """A result is none of the other stages' if it has elements, or is a number, and the arguments were not changed."""
    name = getattr(function, "__name__", "")
    if name in _METADATA or name.startswith("_") and not name.startswith("__") or name.endswith("_"):
        return out
    given = {id(tensor) for tensor in tensors_in(args)}
    if any(tensor.numel() and id(tensor) not in given for tensor in tensors_in(out)) or isinstance(out, (float, bool)):
        raise refused(function)
    return out


def refused(function: Callable, is_old: bool = False) -> PipelineError:
    known = (
        "a copy of it was made before a call, a backward or a step, and this rank knows it as it is now"
        if is_old
        else "this rank knows norms, sums of squares and of absolute values of it, and nothing else"
    )
    return PipelineError(
        "pipeline",
        f"{getattr(function, '__name__', function)} takes the last of model.parameters(), which stands for all that "
        f"other stages hold: {known}",
        (),
        [
            ("torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])", "the norm over all stages"),
            ("for name, parameter in model.named_parameters(): ...", "on each rank, those of its stages"),
            ("vescale.whole_state_dict(model)", "on every rank: the values of all stages"),
        ],
    )

"""What the other stages hold, as one more parameter: `clip_grad_norm_(model.parameters())` is global.

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

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._errors import PipelineError
from .._torch_private import DisableTorchFunctionSubclass, _foreach_norm, make_subclass
from .._trace.containers import map_tensors, tensors_in
from .._transport.p2p import Part
from .member import Member


class Placed(NamedTuple):
    """The norms of a model's gradients, by the parameters' places in it.

    Arguments:
        elsewhere: of those elsewhere, numbers on this rank's device.
        dtype: of those elsewhere together; None where there are none.
        here: of those that this rank holds, the same numbers as on all ranks.
    """

    elsewhere: dict[int, Tensor]
    dtype: torch.dtype | None
    here: dict[int, Tensor]


NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm))
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SAME = frozenset(
    (Tensor.detach, torch.detach, Tensor.clone, torch.clone, Tensor.contiguous, Tensor.to, Tensor.type, Tensor.cpu,
     Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.view, Tensor.reshape, torch.reshape,
     Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel, _DATA)
)  # fmt: skip
_ABSOLUTE = frozenset((torch.abs, Tensor.abs, Tensor.__abs__, torch.absolute, Tensor.absolute))
_POWERS = frozenset((torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__))
_PRODUCTS = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply))
_SUMS = frozenset((torch.sum, Tensor.sum))
_LARGEST = frozenset((torch.max, Tensor.max, torch.amax, Tensor.amax))
_ASKED = {torch.isfinite: torch.isfinite, Tensor.isfinite: torch.isfinite, torch.isnan: torch.isnan,
          Tensor.isnan: torch.isnan}  # fmt: skip
_ANSWERS = {torch.all: torch.isfinite, Tensor.all: torch.isfinite, torch.any: torch.isnan, Tensor.any: torch.isnan}
_FOLLOWED = _SAME | _ABSOLUTE | _POWERS | _PRODUCTS | _SUMS | _LARGEST | NORMS | _ASKED.keys()
_COPIES = frozenset(("__deepcopy__", "__reduce_ex__"))
_METADATA = frozenset(
    """__get__ __set__ __delete__ __hash__ __repr__ __format__ __len__ size dim ndimension numel nelement stride
    storage_offset element_size is_floating_point is_complex is_contiguous is_signed is_same_size get_device data_ptr
    requires_grad_ register_hook register_post_accumulate_grad_hook zeros_like ones_like empty_like full_like rand_like
    randn_like new_zeros new_empty new_ones new_full new_tensor""".split()
)
"""Functions that read no value of the elements."""


class OtherStages(nn.Parameter):
    """See the module. `norm_of(order, values)` gives the norms, of values or of gradients; it communicates."""

    before_dtensor = True
    exists: bool  # the gradients
    leaf: nn.Parameter  # in its place among tensors of other classes

    def __new__(cls, norm_of: Callable[[float, bool], Placed], device: torch.device) -> OtherStages:
        made = make_subclass(cls, torch.empty(0, device=device), True)
        made.exists, made.leaf = False, nn.Parameter(torch.empty(0, device=device))
        made.gradients = Remote(lambda order: norm_of(order, False), device)
        made.values = Remote(lambda order: norm_of(order, True), device)
        return made

    @property
    def grad(self) -> Tensor | None:
        return self.gradients if self.exists else None

    @grad.setter
    def grad(self, value: Any) -> None:
        """Nothing to keep: it is always what the other stages hold."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _FOLLOWED:
            args, kwargs = map_tensors((args, kwargs), lambda t: t.values if type(t) is cls else t)
            return function(*args, **kwargs)
        if not {kind for kind in types if issubclass(kind, Tensor)} <= {cls, Tensor, nn.Parameter}:
            leaves = map_tensors((args, kwargs), lambda t: t.leaf if type(t) is cls else t)
            return _checked(function, function(*leaves[0], **leaves[1]), args)
        with DisableTorchFunctionSubclass():
            return _checked(function, _tried(function, args, kwargs), args)


class Remote(Tensor):
    """All gradients elsewhere, or all values, and what becomes of them element by element.

    Arguments:
        norm_of: the norms of what it began as; None where they say nothing any more of what it is now.
        power: what every element was raised to since.
        is_absolute: whether no element can be negative.
        asked: what is asked of every element: `torch.isfinite` or `torch.isnan`.
    """

    before_dtensor = True
    norm_of: Callable[[float], Placed] | None

    def __new__(
        cls,
        norm_of: Callable[[float], Placed] | None,
        device: torch.device,
        power: float = 1,
        is_absolute: bool = False,
        asked: Callable | None = None,
    ) -> Remote:
        made = make_subclass(cls, torch.empty(0, device=device))
        made.norm_of, made.power, made.is_absolute, made.asked = norm_of, power, is_absolute, asked
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
        """What norms tell; None if they do not."""
        power, absolute = self.power, self.is_absolute
        if function in NORMS:
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            order = 2.0 if order in (None, "fro") else float(order)
            if self.norm_of is None or self.power != 1 or self.asked is not None:
                raise refused(function)
            return Norms(self.norm_of(order), order, self.device)
        if function in _ANSWERS and self.asked is _ANSWERS[function] and len(args) == 1 and not kwargs:
            return self.asked(self._norm(float("inf")))
        if self.norm_of is None or self.asked is not None:
            return None
        if function in _SAME:
            return Remote(self.norm_of, self.device, power, absolute)
        if function in _ASKED:
            return Remote(self.norm_of, self.device, power, absolute, _ASKED[function])
        if function in _ABSOLUTE:
            return Remote(self.norm_of, self.device, power, True)
        if function in _POWERS:
            by = args[1] if len(args) > 1 else kwargs.get("exponent", 2)
            if isinstance(by, (int, float)) and by > 0 and (absolute or by == int(by)):
                return Remote(self.norm_of, self.device, power * by, absolute or by % 2 == 0)
        if function in _PRODUCTS and len(args) == 2 and self._is_like(args[1]):
            return Remote(self.norm_of, self.device, power * 2, True)
        if len(args) == 1 and not kwargs.keys() - {"dtype"} and absolute:
            if function in _SUMS:
                return self._norm(float(power)) ** power
            if function in _LARGEST:
                return self._norm(float("inf")) ** power
        return None

    def _is_like(self, other: Any) -> bool:
        mine = self.norm_of, self.power, self.is_absolute, None
        return type(other) is Remote and (other.norm_of, other.power, other.is_absolute, other.asked) == mine

    def _norm(self, order: float) -> Tensor:
        placed = self.norm_of(order)
        return combined(list(placed.elsewhere.values()), order, self.device).to(torch.get_default_dtype())


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


def refused(function: Callable) -> PipelineError:
    return PipelineError(
        "pipeline",
        f"{getattr(function, '__name__', function)} takes the last of model.parameters(), which stands for all that "
        "other stages hold: this rank knows norms, sums of squares and of absolute values of it, and nothing else",
        (),
        [
            ("torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])", "the norm over all stages"),
            ("for name, parameter in model.named_parameters(): ...", "on each rank, those of its stages"),
            ("vescale.whole_state_dict(model)", "on every rank: the values of all stages"),
        ],
    )


class Norms(Tensor):
    """The norm of all gradients elsewhere, a number; in a stack with the norms of those here, each by itself."""

    before_dtensor = True
    placed: Placed

    def __new__(cls, placed: Placed, order: float, device: torch.device) -> Norms:
        total = combined(list(placed.elsewhere.values()), order, device)
        made = make_subclass(cls, total.to(torch.get_default_dtype()))
        made.placed = placed
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.to:
            return args[0]
        if function is torch.stack:
            (own,) = [tensor for tensor in args[0] if type(tensor) is cls]
            placed = own.placed
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            if len(others) == len(placed.here) and (others or placed.elsewhere):
                dtypes = [*(tensor.dtype for tensor in others), *((placed.dtype,) if placed.dtype is not None else ())]
                norms = placed.elsewhere | placed.here
                return torch.stack([norms[place] for place in sorted(norms)]).to(reduce(torch.promote_types, dtypes))
        with DisableTorchFunctionSubclass():
            args = (
                [[x.as_subclass(Tensor) if type(x) is cls else x for x in args[0]], *args[1:]]
                if function is torch.stack
                else args
            )
            return function(*args, **kwargs)


def combined(norms: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """The norm of several vectors' concatenation, from their norms; without any, 0."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.stack(norms)
    return joined.sum() if order == 0 else torch.linalg.vector_norm(joined, order)


def norms_of_gradients(gradients: Sequence[Tensor], order: float, whole: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """As torch computes them, one by one; of distributed gradients, those of the whole. Cost: what the norms cost."""
    return [whole(norm) for norm in _foreach_norm(gradients, order)] if gradients else []


def norms_on_other_stages(member: Member, order: float, values: bool = False) -> Placed:
    """The norms of the gradients, or of the values, that this rank does not hold. Call it on all ranks of the pipeline.

    Cost: to and from each rank one message of 8 bytes per gradient, told by the first that holds it, and a word of
    which there are.
    """
    placement, tag, peers = member.schedule.placement, member.tags("norm"), member.others
    places = {name: place for place, name in enumerate(member.owned.stages)}
    first = {name: placement[stages[0]] for name, stages in member.owned.stages.items()}
    parameters = {name: member.parameters[name] for name in places if name in member.parameters}
    held = {name: one.detach() if values else one.grad for name, one in parameters.items()}
    here = {name: gradient for name, gradient in held.items() if gradient is not None}
    mine = [name for name in here if first[name] == member.rank]
    with torch.no_grad():
        norms = norms_of_gradients([here[name] for name in mine], order, member.codec.whole)
    word = [(places[name], norm.dtype) for name, norm in zip(mine, norms)]
    told = torch.stack(norms).double() if norms else torch.empty(0, dtype=torch.float64, device=member.link.device)
    for peer in peers:
        member.link.send_object(peer, tag, word)
    known, at_hand = {places[name] for name in held}, {places[name] for name in here}
    words = [member.link.receive_object(peer, tag) for peer in peers]
    arrivals = [
        member.link.swap(peer, tag + 2, [told], (Part((len(theirs),), (1,), torch.float64, False),))
        for peer, theirs in zip(peers, words)
    ]
    norms_here = dict(zip([place for place, _ in word], told.unbind()))
    elsewhere, dtypes = {}, []
    for theirs, arrival in zip(words, arrivals):
        for (place, dtype), norm in zip(theirs, arrival.wait()[0].unbind()):
            if place not in known:
                elsewhere[place] = norm
                dtypes.append(dtype)
            elif place in at_hand:
                norms_here[place] = norm
    member.link.flush()
    dtype = reduce(torch.promote_types, dtypes) if dtypes else None
    return Placed(elsewhere, dtype, norms_here)

"""The gradients of the other stages, as one more parameter: `clip_grad_norm_(model.parameters())` is global.

Under a pipeline `model.parameters()` ends with an `Elsewhere`, a parameter of no elements. Its gradient has no elements
either, but its norm is that of all gradients that this rank does not hold: so any code that takes the norm of every
gradient and combines them gets the global norm, and what it then multiplies by is the same on all ranks. torch's own
clipping stacks the norms of all gradients first: in place of that stack comes one of all norms in the order of the
whole model, each as the first stage that holds its gradient tells it. So the total has the same bits on all ranks,
whichever function took the norms here, and one device's wherever the norms have them.
`named_parameters`, `state_dict` and the optimizer know nothing of it. Norms are numbers of the device throughout: the
host never waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_private import DisableTorchFunctionSubclass, _foreach_norm, make_subclass
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


class OtherStagesGradients(nn.Parameter):
    """See the module. `norm_of(order)` gives the norms; it communicates."""

    before_dtensor = True
    norm_of: Callable[[float], Placed]

    def __new__(cls, norm_of: Callable[[float], Placed], device: torch.device) -> OtherStagesGradients:
        made = make_subclass(cls, torch.empty(0, device=device), True)
        made.norm_of, made.exists = norm_of, False
        return made

    @property
    def grad(self) -> Tensor | None:
        return Remote(self.norm_of, self.device) if self.exists else None

    @grad.setter
    def grad(self, value: Any) -> None:
        """Nothing to keep: it is always what the other stages hold."""


class Remote(Tensor):
    """The gradient of an `Elsewhere`."""

    before_dtensor = True
    norm_of: Callable[[float], Placed]

    def __new__(cls, norm_of: Callable[[float], Placed], device: torch.device) -> Remote:
        made = make_subclass(cls, torch.empty(0, device=device))
        made.norm_of = norm_of
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in NORMS:
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            self = args[0]
            order = 2.0 if order in (None, "fro") else float(order)
            return Norms(self.norm_of(order), order, self.device)
        if function is _foreach_norm:
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            norms = iter(function(others, order) if others else ())
            return [cls.__torch_function__(torch.norm, types, (t, order)) if type(t) is cls else next(norms)
                    for t in args[0]]  # fmt: skip
        if getattr(function, "__name__", "") in ("mul_", "div_", "_foreach_mul_", "_foreach_div_"):
            if isinstance(args[0], Tensor):
                return args[0]
            others = [tensor for tensor in args[0] if type(tensor) is not cls]
            return function(others, *args[1:], **kwargs) if others else None
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


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


def norms_on_other_stages(member: Member, order: float) -> Placed:
    """The norms of the gradients that this rank does not hold. Call it on all ranks of the pipeline.

    Cost: to and from each rank one message of 8 bytes per gradient, told by the first that holds it, and a word of
    which there are.
    """
    placement, tag, peers = member.schedule.placement, member.tags("norm"), member.others
    places = {name: place for place, name in enumerate(member.owned.stages)}
    first = {name: placement[stages[0]] for name, stages in member.owned.stages.items()}
    held = {name: member.parameters[name].grad for name in places if name in member.parameters}
    here = {name: gradient for name, gradient in held.items() if gradient is not None}
    mine = [name for name in here if first[name] == member.rank]
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

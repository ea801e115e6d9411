"""Numbers of what other stages hold, known for every gradient by itself: its norm, as the first stage that holds the
gradient tells it.

A rank adds up what it holds itself in an order of its own, and would round in another way than the others: what is
multiplied by the result would drift apart, a weight that is tied over stages among it. Where the sum here is that of
all that is told of here, the result is the sum of what all ranks were told, in the order of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vescale_trace.values import map_tensors

from ..._torch_private import DisableTorchFunctionSubclass, _foreach_norm, make_subclass
from ..._transport.p2p import Part
from ..call_exchange import left_out
from ..member import Member


class Placed(NamedTuple):
    """Numbers of a whole model's parameters, in double precision, on this rank's device, the same on all ranks.

    Arguments:
        numbers: by the parameters' places in the model.
        held: the places of what this rank holds.
        asked: the places that are asked for: of what is trained, or is not, or all.
        dtype: of what the numbers are of; None if there are none.
        whole: makes a distributed number of this rank's a plain one.
    """

    numbers: dict[int, Tensor]
    held: frozenset[int]
    asked: frozenset[int]
    dtype: torch.dtype | None
    whole: Callable[[Tensor], Tensor] = lambda number: number

    def each(self, function: Callable[[Tensor], Tensor]) -> Placed:
        return self._replace(numbers={place: function(one) for place, one in self.numbers.items()})

    def at(self, places: Set[int]) -> list[Tensor]:
        """Returns the numbers at `places`, in the order of the model."""
        return [self.numbers[place] for place in sorted(places & self.numbers.keys())]

    @property
    def elsewhere(self) -> list[Tensor]:
        return self.at(self.asked - self.held)


class Told(Tensor):
    """A number for all gradients elsewhere: the norm of all, or a sum over all. In a stack, or a sum, with numbers of
    those here each counts by itself.

    Arguments:
        order: of the norm; None of a sum.
    """

    before_dtensor = True
    placed: Placed | None

    def __new__(cls, placed: Placed, order: float | None, device: torch.device) -> Told:
        total = combined(placed.elsewhere, order, device)
        made = make_subclass(cls, total.to(placed.dtype or torch.get_default_dtype()))
        made.placed, made.order = placed, order
        return made

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function is Tensor.to and not any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
            return args[0]
        if function is torch.stack and (numbers := cls._stacked(args[0])) is not None:
            return function(numbers, *args[1:], **kwargs)
        operands = (*args, 2) if name == "square" else args
        if len(operands) == 2 and not kwargs and (found := cls._followed(name.strip("_"), *operands)) is not None:
            return found.to(args[0].dtype) if name in ("add_", "__iadd__") else found
        if name.endswith("_") and not name.startswith("_") and type(args[0]) is cls:
            args[0].placed = None
        return function(*map_tensors(args, _plain), **map_tensors(kwargs, _plain))

    @classmethod
    def _stacked(cls, given: Sequence[Tensor]) -> list[Tensor] | None:
        """Returns the stacked numbers in the order of the whole model; None if they do not stack with such a number."""
        told = [one for one in given if type(one) is cls]
        if not all(one.placed is not None and one.order == told[0].order for one in told):
            return None
        placed, others = told[0].placed, [one for one in given if type(one) is not cls]
        dtype = reduce(torch.promote_types, [one.dtype for one in given])
        asked = frozenset().union(*(one.placed.asked for one in told))
        if len(others) == len(placed.at(asked & placed.held)):
            numbers = placed.at(asked)
        else:
            numbers = [*others, *placed.at(asked - placed.held)]
        return [one.to(dtype) for one in numbers] or [_plain(told[0])]

    @classmethod
    def _followed(cls, name: str, first: Any, second: Any) -> Any:
        """Computes sums, powers and multiples, if they are known; None if not."""
        own, other = (first, second) if type(first) is cls else (second, first)
        if type(own) is not cls or type(other) is cls or own.placed is None:
            return None
        device = own.device
        if name in ("add", "radd", "iadd"):
            if isinstance(other, Tensor):
                return None if other.ndim or not other.is_floating_point() else _added(other, own)
            return Told(own.placed, None, device) if other == 0 else None
        if isinstance(other, Tensor) or own is not first and name != "mul":
            return None
        if name in ("pow", "square") and own.order is not None and other == own.order:
            return Told(own.placed.each(lambda one: one**other), None, device)
        if name in ("mul", "rmul", "multiply") and other > 0:
            return Told(own.placed.each(lambda one: one * other), own.order, device)
        if name in ("div", "truediv", "divide") and other > 0:
            return Told(own.placed.each(lambda one: one / other), own.order, device)
        return None


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) is not Told:
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _added(total: Tensor, told: Told) -> Tensor:
    """The sum of what this rank added up, with its gradient, and of what is told of the others; with the same bits on
    all ranks where this rank added up all that it holds."""
    placed = told.placed
    total = placed.whole(total)
    dtype, mine = torch.promote_types(total.dtype, told.dtype), total.detach().double()
    fine, coarse = torch.finfo(total.dtype).eps, torch.finfo(told.dtype).eps
    off = fine * (_ROUNDINGS[total.itemsize >= 4] + len(placed.numbers) / 2) + 2 * coarse

    def sum_at(places: Set[int]) -> Tensor:
        return combined(placed.at(places), None, told.device)

    elsewhere, asked = placed.asked - placed.held, placed.asked
    result = mine + sum_at(elsewhere)
    rest = frozenset(placed.numbers) - elsewhere
    for before in (placed.held, rest, asked & placed.held):  # of two kinds, one may have been added already, or neither
        known = sum_at(before)
        result = torch.where((mine - known).abs() <= off * known.abs(), sum_at(before | elsewhere), result)
    result = result.to(dtype)
    return result + (total - total.detach()) if total.requires_grad else result


_ROUNDINGS = (4, 16)
"""Roundings of one gradient's number, at most, in bits of its last place: half precision is added up in single."""


def combined(numbers: Sequence[Tensor], order: float | None, device: torch.device) -> Tensor:
    """The norm of several vectors' concatenation, from their norms, or a sum; without any, 0."""
    if not numbers:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.stack(list(numbers))
    return joined.sum() if order in (0, None) else torch.linalg.vector_norm(joined, order)


def norms_of_gradients(gradients: Sequence[Tensor], order: float, whole: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Computes norms one by one, as torch does; of distributed gradients, those of the whole. Cost: what the norms
    cost."""
    return [whole(norm) for norm in _foreach_norm(gradients, order)] if gradients else []


def norms_of_model(member: Member, order: float, values: bool = False, trained: bool | None = None) -> Placed:
    """The norms of all gradients, or of all values; asked for are those of what is `trained`, or is not, or of all.
    Call it on all ranks of the pipeline.

    Each is told by the first rank that holds it. Cost: that of `exchange`.
    """
    placement = member.schedule.placement
    places = {name: place for place, name in enumerate(member.owned.stages)}
    first = {name: placement[stages[0]] for name, stages in member.owned.stages.items()}
    parameters = {name: member.parameters[name] for name in places if name in member.parameters}
    found = {name: one.detach() if values else one.grad for name, one in parameters.items()}
    mine = [name for name, one in found.items() if one is not None and first[name] == member.rank]
    with torch.no_grad():
        norms = norms_of_gradients([found[name] for name in mine], order, member.codec.whole)
    numbers, dtypes, asked = {}, [], set()
    told = exchange(member, [(places[name], parameters[name].requires_grad) for name in mine], norms)
    for (place, is_trained), dtype, norm in told:
        numbers[place] = norm
        dtypes.append(dtype)
        if trained is None or is_trained is trained:
            asked.add(place)
    held = frozenset(places[name] for name in found)
    dtype = reduce(torch.promote_types, dtypes) if dtypes else None
    return Placed(numbers, held, frozenset(asked), dtype, member.codec.whole)


def exchange(member: Member, words: Sequence[Any], numbers: Sequence[Tensor]) -> list[tuple[Any, torch.dtype, Tensor]]:
    """Exchanges numbers between all ranks, in their order: for each a word (picklable) that says what it is of, its
    dtype, and the number in double precision. Call it on all ranks of the pipeline.

    Cost: to and from each rank one message of 8 bytes per number, and one of the words. Raises PipelineError, on all
    ranks, where some have left out a backward; PipelineFailure where a rank is lost.
    """
    with member.beside("the exchange of norms"):
        tag = member.tags("norm")
        word = list(zip(words, [one.dtype for one in numbers]))
        told = (
            torch.stack(list(numbers)).double()
            if numbers
            else torch.empty(0, dtype=torch.float64, device=member.link.device)
        )
        for peer in member.others:
            member.link.send_object(peer, tag, (member.link.backwards, word))
        told_of = {peer: member.link.receive_object(peer, tag) for peer in member.others}
        backwards = {member.rank: member.link.backwards} | {peer: count for peer, (count, _) in told_of.items()}
        if len(set(backwards.values())) > 1:
            member.link.flush()
            raise left_out(backwards)
        heard = {peer: theirs for peer, (_, theirs) in told_of.items()}
        arrivals = {
            peer: member.link.swap(peer, tag + 2, [told], (Part((len(theirs),), (1,), torch.float64, False),))
            for peer, theirs in heard.items()
        }
        columns = {member.rank: (word, told), **{peer: (heard[peer], one.wait()[0]) for peer, one in arrivals.items()}}
        member.link.flush()
    return [
        (*known, number)
        for _, (known_of, column) in sorted(columns.items(), key=lambda one: one[0])
        for known, number in zip(known_of, column.unbind())
    ]

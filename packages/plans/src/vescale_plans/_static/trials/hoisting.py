"""Conversions of a module's own input, parameters and output, which go to its boundary: the rest of its code converts
nothing."""

from __future__ import annotations

from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.engine import (
    Conversion,
    Crossing,
    Difference,
    Op,
    Ref,
    Storages,
    communicates,
    convert,
    local_only,
    route_between,
)

from ..frame import Boundary, Frame, Step, tensors_of
from .forbidden import storages_in


def hoisted(frame: Frame, storages: Storages) -> tuple[list, Difference | None]:
    """The tape without the conversions of the module's own input, parameters and output, which go to its boundary."""
    parameters = {id(p): name for name, p in frame.module.named_parameters(remove_duplicate=False)}
    inputs = {id(tensor): i for i, tensor in enumerate(frame.inputs)}
    outputs = {id(tensor): i for i, tensor in enumerate(tensors_of(frame.out))}
    before: dict[int | str, Conversion] = {}
    after: dict[int, Conversion] = {}
    moved: dict[str, Tensor] = {}
    made_by: dict[int, Op] = {}
    rest: list = []
    crossed = False  # a module was called, which may communicate: what communicates may not be moved before it
    for item in frame.tape:
        crossed = crossed or type(item) is Crossing
        if type(item) is Op:
            made_by.update(dict.fromkeys(set(storages_in(item.out)) - set(storages_in(item.args)), item))
        if type(item) is not Conversion or item.by is not None:
            rest.append(item)
        elif item.result is item.source:
            continue
        elif (at := inputs.get(id(item.source), parameters.get(id(item.source)))) is not None:
            known = before.setdefault(at, item)
            if known.result is not item.result:
                return rest, Difference(f"has {_named(at)} in two layouts", item.line)
            if known is item and crossed and communicates(item.before, item.after):
                return rest, Difference(f"converts {_named(at)} after it called another module", item.line)
        elif id(item.result) in outputs:
            after[outputs[id(item.result)]] = item
        elif (name := _parameter_behind(item, made_by, frame, storages)) is not None and name not in before:
            before[name] = item
            moved[name] = convert(frame.module.get_parameter(name), item.after, item.cause, own=True)
        else:
            return rest, Difference(f"converts {item.before!r} to {item.after!r} in between", item.line)
    frame.conversions = {at: item.result for at, item in before.items()} | moved
    frame.moved = frozenset(route_between(before[name].before, before[name].after) for name in moved)
    frame.sources = {at: item.source for at, item in after.items()}
    frame.crossed = {
        item.by: Step(0, route_between(item.before, item.after), item.cause)
        for item in rest
        if type(item) is Conversion
    }
    frame.boundary = Boundary(
        tuple(Step(at, route_between(i.before, i.after), i.cause) for at, i in before.items()),
        tuple(Step(at, route_between(i.before, i.after), i.cause) for at, i in after.items()),
    )
    return rest, None


# Of one parameter and of numbers: their gradient is linear in the one that comes, and nothing if that is nothing.
_OF_A_PARAMETER = frozenset({"aten::add", "aten::sub", "aten::rsub", "aten::mul", "aten::neg", "aten::_to_copy"})


def _parameter_behind(item: Conversion, made_by: dict[int, Op], frame: Frame, storages: Storages) -> str | None:
    """The parameter that a converted value is computed from alone, where it may as well be converted before.

    So it is with `(1 + self.weight) * x` where only the weight's gradient is another (R to I): values stay, and
    whether gradients flow the same ways is looked at in the graph.
    """
    route = route_between(item.before, item.after)
    if not route.is_alias:
        return None
    storage = item.refs[0].storage
    while (op := made_by.get(storage)) is not None:
        behind = {ref.storage for ref in op.args if isinstance(ref, Ref)}
        if op.name not in _OF_A_PARAMETER or len(behind) != 1 or op.random or op.written:
            return None
        (storage,) = behind
    with local_only():
        for name, parameter in frame.module.named_parameters(recurse=False):
            fits = type(parameter) is DTensor and parameter._layout.base is item.before
            if fits and storages.ref(parameter).storage == storage:
                return name
    return None


def _named(at: int | str) -> str:
    return f"its parameter {at}" if isinstance(at, str) else f"its input {at}"

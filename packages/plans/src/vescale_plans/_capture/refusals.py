"""Refusals of calls whose graph would not do what the code does that it was made from.

Everything is read from what the tracer noted while it went through the code, before anything has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from .._torch_private import TracingContext, traced_output


class Refused(Exception):
    """Why a call is not compiled. `lasts`: nor are others of its kind."""

    def __init__(self, why: str, lasts: bool = True) -> None:
        super().__init__(why)
        self.lasts = lasts


def check_traced(tensors: Sequence[fx.Node]) -> None:
    """Raises Refused for what the traced code did beside its graph, or read unguarded.

    Arguments:
        tensors: the graph's inputs.
    """
    effects = traced_output().side_effects
    for one in effects.id_to_variable.values():
        is_old = type(one.mutation_type).__name__.endswith("Existing")  # older than the call
        if is_old and effects.is_modified(one) and not _is_put_back(one, effects):
            raise Refused(f"it changes what outlives its call: {_name_of(one.source, type(one).__name__)}")
    if effects.tensor_hooks:
        raise Refused("it hooks a tensor")
    memory = {value.untyped_storage()._cdata: one for one in tensors if isinstance(value := _value_of(one), Tensor)}
    for one in tensors[0].graph.nodes if tensors else ():
        value = _value_of(one)
        is_written = isinstance(value, Tensor) and value._version  # `.data` counts its own
        if is_written and (given := memory.get(value.untyped_storage()._cdata)) is not None:
            raise Refused(f"it writes in place to {_named(given)}")
        entering = one.args[1:2] if one.kwargs.get("use_reentrant") else None
        if entering is not None and not any(getattr(_value_of(each), "requires_grad", False) for each in entering):
            raise Refused("a reentrant checkpoint is given no gradient, and gives none, which the compiler's does")
    names = [guard.name for guard in TracingContext.get().guards_context.dynamo_guards]
    if remembered := [name for name in names if name.endswith(".__wrapped__")]:
        raise Refused(f"it calls a function that remembers results ({remembered[0].removesuffix('.__wrapped__')})")
    for tensor in map(_named, tensors):
        if read := [name for name in names if name.startswith(f"{tensor}.")]:
            raise Refused(f"it reads an attribute of a tensor ({read[0]})")


def _value_of(node: fx.Node) -> Any:
    """Returns what a tracer computed for a node."""
    return node.meta.get("example_value")


def is_read(value: object) -> bool:
    """True if the code that is traced came to an object."""
    return id(value) in traced_output().side_effects.id_to_variable


def _is_put_back(variable: Any, effects: Any) -> bool:
    """True if all attributes that are set end as the constants that they are."""
    stored, held = effects.store_attr_mutations.get(variable, {}), vars(getattr(variable, "value", variable))
    return bool(stored) and all(
        name in held and value.is_python_constant() and value.as_python_constant() is held[name]
        for name, value in stored.items()
    )


def _named(node: fx.Node) -> str:
    """Returns where the code finds a tensor: "L['self']._buffers['mean']"."""
    return _name_of(getattr(node.meta.get("grapharg"), "source", None), node.name)


def _name_of(source: Any, otherwise: str) -> str:
    name = getattr(source, "name", otherwise)
    return name() if callable(name) else name  # a method in older releases

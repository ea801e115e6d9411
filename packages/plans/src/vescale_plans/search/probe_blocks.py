"""Repeated blocks: found by structure, and all but the first few skipped while a model is probed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._containers import map_first

KEPT = 2
"""Of equal blocks so many really run: two show what one hands to the next."""


@dataclass(frozen=True)
class Chain:
    """Blocks of one container, in the order of their registration.

    Arguments:
        names: of the modules.
        kinds: per block a number; equal numbers are equal structure.
    """

    names: tuple[str, ...]
    kinds: tuple[int, ...]


def chains(model: nn.Module) -> tuple[Chain, ...]:
    """Containers with at least two children of equal structure, outermost first; none inside another's block."""
    found: list[Chain] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for chain in found for block in chain.names):
            continue
        children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        kinds = _kinds([child for _, child in children])
        heavy = [any(True for _ in child.parameters()) for _, child in children]
        if len(children) > max(1, len(set(kinds))) and any(heavy):
            found.append(Chain(tuple(one for one, _ in children), tuple(kinds)))
    return tuple(found)


def _kinds(blocks: list[nn.Module]) -> list[int]:
    """A number per block, equal for blocks that do the same: classes, shapes and plain settings, without names.

    A setting that counts up from block to block is the block's place, and no difference.
    """
    forms = [_form(block) for block in blocks]
    settings = [_settings(block) for block in blocks]
    keys: list[Hashable] = []
    for form, own in zip(forms, settings):
        like = [(at, other) for at, other in enumerate(settings) if forms[at] == form and len(other) == len(own)]
        counted = {
            column
            for column in range(len(own))
            if len(
                {(type(other[column]), other[column] - at if type(other[column]) is int else at) for at, other in like}
            )
            == 1
        }
        keys.append((form, tuple(value for column, value in enumerate(own) if column not in counted)))
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _form(block: nn.Module) -> Hashable:
    return tuple(
        (
            type(module),
            tuple(tuple(one.shape) for one in module._parameters.values() if one is not None),
            tuple(tuple(one.shape) for one in module._buffers.values() if one is not None),
        )
        for module in block.modules()
    )


def _settings(block: nn.Module) -> list[Hashable]:
    plain = bool | int | float | str
    return [value for module in block.modules() for value in module.__dict__.values() if isinstance(value, plain)]


@contextmanager
def skipping(model: nn.Module, found: tuple[Chain, ...]) -> Iterator[None]:
    """Blocks beyond the first KEPT of their kind hand on what they are given, in the form their like returned."""
    undo: list[nn.Module] = []
    last: dict[tuple[int, int], Any] = {}

    def replace(block: nn.Module, kind: tuple[int, int]) -> None:
        def handed_on(*args: Any, **kwargs: Any) -> Any:
            carried = _first((args, kwargs))
            return map_first(last[kind], lambda tensor: carried)

        block.forward = handed_on
        undo.append(block)

    handles = []
    for number, chain in enumerate(found):
        seen: dict[int, int] = defaultdict(int)
        for name, kind in zip(chain.names, chain.kinds):
            block = model.get_submodule(name)
            seen[kind] += 1
            if seen[kind] > KEPT:
                replace(block, (number, kind))
            else:

                def remember(_, __, output, kind=(number, kind)):
                    last[kind] = output

                handles.append(block.register_forward_hook(remember))
    try:
        yield
    finally:
        for block in undo:
            del block.forward
        for handle in handles:
            handle.remove()


def _first(value: Any) -> Tensor:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_first(value, keep)
    return found[0]

"""Repeated blocks: found by structure, and all but the first few skipped while a model is probed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from vescale_trace.values import map_first

from ..structure import Blocks
from .model import first_tensor

KEPT = 2
"""Number of equal blocks that really run: two show what one hands to the next."""


LISTS = nn.ModuleList | nn.ModuleDict
"""Containers that have no forward."""


def skipped(found: Iterable[Blocks]) -> dict[str, str]:
    """Blocks beyond the first KEPT of their kind -> the first of that kind."""
    alike: dict[tuple[Blocks, int], list[str]] = defaultdict(list)
    for chain in found:
        for name, kind in zip(chain.names, chain.kinds):
            alike[chain, kind].append(name)
    return {name: names[0] for names in alike.values() for name in names[KEPT:]}


def chains(model: nn.Module) -> tuple[Blocks, ...]:
    """Containers with at least two children of equal structure, outermost first; none inside another's block. A list
    among a list's children is called by nobody: what it holds stands for it.

    Children of a list that differ from one another are a chain of different kinds, where no chain lies inside of them:
    none stands for another, but a pipeline may be cut between them. So are those of other containers where modules
    around modules, or settings, are all that tells them apart.
    """
    found: list[Blocks] = []
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        blocks = list(_called(name, module))
        kinds, names = [], tuple(one for one, _, _ in blocks)
        if isinstance(module, LISTS | nn.Sequential) and any(True for _ in module.parameters()):
            kinds = _kinds([block for _, block, _ in blocks], [place for _, _, place in blocks])
        if len(kinds) > max(1, len(set(kinds))):
            found.append(Blocks(names, tuple(kinds)))
            return
        before = len(found)
        for key, child in module.named_children():
            walk(f"{name}.{key}" if name else key, child)
        listed = isinstance(module, nn.ModuleList) and all(list(block.parameters()) for _, block, _ in blocks)
        differ = 1 if listed else len({_bare(block) for _, block, _ in blocks})
        if len(kinds) > max(1, differ) and len(found) == before:
            found.append(Blocks(names, tuple(kinds)))

    walk("", model)
    return tuple(found)


def _called(name: str, module: nn.Module, place: tuple[int, ...] = ()) -> Iterator[tuple[str, nn.Module, tuple]]:
    """The children, each with its place; of a list's children that are lists, theirs, with the places of both."""
    for at, (key, child) in enumerate(module.named_children()):
        full = f"{name}.{key}" if name else key
        if isinstance(module, nn.ModuleList) and isinstance(child, LISTS):  # a dict names parts of several kinds
            yield from _called(full, child, (*place, at))
        else:
            yield full, child, (*place, at)


def _kinds(blocks: list[nn.Module], places: list[tuple[int, ...]]) -> list[int]:
    """A number per block, equal for blocks that do the same: classes, shapes and plain settings, without names.

    A setting that counts up from block to block, or from list to list of them, is the block's place, and no difference.
    """
    settings = [_settings(block) for block in blocks]
    families: dict[Hashable, list[int]] = defaultdict(list)
    for at, (block, own) in enumerate(zip(blocks, settings)):
        families[_form(block), len(own)].append(at)
    keys: dict[int, Hashable] = {}
    for form, members in families.items():
        counts = [members, *zip(*(places[at] for at in members))]
        columns = [
            column
            for column in zip(*(settings[at] for at in members))
            if not any(_counts(column, count) for count in counts)
        ]
        for row, at in enumerate(members):
            keys[at] = (form, tuple(column[row] for column in columns))
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(keys[at], len(numbers)) for at in range(len(blocks))]


def _counts(column: Sequence[Hashable], places: Sequence[int]) -> bool:
    """True if these values are their places plus a constant."""
    if len(column) == 1:
        return True
    return all(type(value) is int for value in column) and len({v - at for v, at in zip(column, places)}) == 1


def _form(block: nn.Module) -> Hashable:
    return tuple(
        (
            type(module),
            tuple(tuple(one.shape) for one in module._parameters.values() if one is not None),
            tuple(tuple(one.shape) for one in module._buffers.values() if one is not None),
        )
        for module in block.modules()
    )


def _bare(block: nn.Module) -> Hashable:
    """The form without modules that hold one other and nothing else."""
    return tuple(one for one, module in zip(_form(block), block.modules()) if any(one[1:]) or len(module._modules) != 1)


def _settings(block: nn.Module) -> list[Hashable]:
    plain = bool | int | float | str
    return [value for module in block.modules() for value in module.__dict__.values() if isinstance(value, plain)]


def hand_on(model: nn.Module, found: Sequence[Blocks]) -> None:
    """Makes skipped blocks of `model` return their input, from now on, in the form that their like returned last."""
    last: dict[str, Any] = {}
    stand_ins = skipped(found)
    for chain in found:
        for name, kind in zip(chain.names, chain.kinds):
            block = model.get_submodule(name)
            if name in stand_ins:
                block.forward = partial(_hand_on, last, stand_ins[name])
            else:
                block.register_forward_hook(partial(_remember, last, chain.names[chain.kinds.index(kind)]))


def _hand_on(last: Mapping[str, Any], like: str, *args: Any, **kwargs: Any) -> Any:
    carried = first_tensor((args, kwargs))
    return map_first(last[like], lambda tensor: carried)


def _remember(last: dict[str, Any], like: str, _: nn.Module, args: tuple, output: Any) -> None:
    last[like] = output

"""Finds a model's blocks: the modules that ZeRO gathers, frees and reduces as one. Pure.

Blocks are the modules that a model repeats: the members of its outermost lists
(ModuleList, Sequential, ModuleDict), lists in lists opened up. What lies in no block is
the root's. A parameter that two blocks share is the root's too: it must be gathered while
either runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: nn.Module, closed: Collection[nn.Module] = ()) -> list[tuple[str, nn.Module]]:
    """(name, module) of every block that has parameters, in the order of the model. `closed` lists hold none."""
    found = list(_walk("", model, isinstance(model, _LISTS), {id(each) for each in closed}))
    return [(name, module) for name, module in found if next(module.parameters(), None) is not None]


def _walk(prefix: str, module: nn.Module, in_list: bool, closed: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if id(child) in closed:
            continue
        if isinstance(child, _LISTS) or not in_list:
            yield from _walk(f"{path}.", child, isinstance(child, _LISTS), closed)
        else:
            yield path, child


def owners(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> dict[int, int]:
    """id(parameter) -> index of its block, -1 for the root's."""
    seen: dict[int, int] = {}
    for index, (_, module) in enumerate(blocks):
        for parameter in module.parameters():
            seen[id(parameter)] = index if seen.get(id(parameter), index) == index else -1
    inside = {id(child) for _, module in blocks for child in module.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                seen[id(parameter)] = -1
    return seen

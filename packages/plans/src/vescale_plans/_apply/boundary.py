"""Boundaries of modules: steps of their calls that convert, and the scopes in which conversions are remembered."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    canonical_states,
    close_scope,
    convert,
    open_scope,
)
from vescale_trace.values import map_first, map_tensors

from .._calls.chain import add_step
from .._plan.parts import Boundary, Placements
from .inference import writes_counted


class Converter:
    """Converts a tensor to the placements that a plan names; axes not named stay as they are."""

    def __init__(self, placements: Placements, where: str) -> None:
        self._placements = placements
        self.__name__ = where  # what traces and errors call it
        self._targets: dict[Layout, Layout] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Converts a DTensor; a plain tensor stays."""
        if type(tensor) is not DTensor:
            return tensor
        layout = tensor._layout.base
        target = self._targets.get(layout)
        if target is None:
            target = self._targets[layout] = self._target(layout)
        if target is layout:
            return tensor
        if not torch.is_inference_mode_enabled():
            return convert(tensor, target, self)
        with writes_counted():
            made = convert(tensor, target, self)
            return made.clone() if made.is_inference() else made  # a part of what was made in that mode is of it

    def _target(self, layout: Layout) -> Layout:
        mesh = layout.mesh
        placements = [self._placements.get(name, now) for name, now in zip(mesh.names, layout.placements)]
        wanted = canonical_states(self.__name__, placements, mesh, layout.shape)
        states = []
        for name, now, goal in zip(mesh.names, layout.states, wanted):
            if name not in self._placements or (goal is REPLICATE and now.is_replicated):
                goal = now
            elif goal is REPLICATE and now is PARTIAL:
                goal = INVARIANT  # after a sum the value is alike on all ranks; its backward is free
            states.append(goal)
        return layout.with_states(states)


def install_boundary(module: nn.Module, name: str, boundary: Boundary) -> None:
    """Steps that convert what enters and leaves `module`."""
    if boundary.input:
        convert_input = Converter(boundary.input, f"{name} (input boundary)")

        def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args and isinstance(args[0], Tensor):
                return (convert_input(args[0]), *args[1:]), kwargs
            return map_first((args, kwargs), convert_input)

        add_step(module, "boundary", before=enter)
    if boundary.arguments:
        positions = list(inspect.signature(module.forward).parameters)
        converters = {
            argument: Converter(placements, f"{name} (argument {argument})")
            for argument, placements in boundary.arguments.items()
        }

        def enter_named(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            args, kwargs = list(args), dict(kwargs)
            for argument, converter in converters.items():
                if argument in kwargs:
                    kwargs[argument] = map_tensors(kwargs[argument], converter)
                elif argument in positions and positions.index(argument) < len(args):
                    at = positions.index(argument)
                    args[at] = map_tensors(args[at], converter)
            return tuple(args), kwargs

        add_step(module, "arguments", before=enter_named)
    if boundary.output:
        convert_output = Converter(boundary.output, f"{name} (output boundary)")

        def leave(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            return map_first(output, convert_output)

        add_step(module, "boundary", after=leave)


def install_scopes(root: nn.Module, axes: Collection[int] = ()) -> None:
    """Conversions are remembered while a module that has children runs: its children share them.

    axes: mesh axes that cut weights of modules, and share no batch.
    """
    for module in root.modules():
        if next(module.children(), None) is not None:
            object.__setattr__(module, "_cut_axes", _cut_axes(module, axes))
            add_step(module, "sharing", _open, _close)


def _cut_axes(module: nn.Module, axes: Collection[int]) -> tuple[int, ...]:
    """Returns those of the axes that cut weights of the module, or of a child of it."""
    layouts = [
        parameter.mesh_layout
        for one in (module, *module.children())
        for parameter in one.parameters(recurse=False)
        if isinstance(parameter, DTensor) and parameter.ndim > 1
    ]
    return tuple(axis for axis in axes if any(layout.states[axis].is_sharded for layout in layouts))


def _open(module: nn.Module, args: tuple, kwargs: dict) -> None:
    open_scope(module._cut_axes)


def _close(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    close_scope()

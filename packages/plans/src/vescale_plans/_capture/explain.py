"""Compile mode as a user turns it on, and asks what became of it."""

from __future__ import annotations

import warnings
from math import prod

from torch import nn

from vescale_dtensor.engine import Mesh, mesh_of
from vescale_trace.stack import users_level

from .._apply.blocks import blocks_of
from .._plan.parts import PlanError
from .code import Code
from .front import Captured, CompileWarning
from .steps import Steps, has_step

_SPLIT = "its pipeline's schedule computes gradients of inputs and of weights apart, which one graph computes as one"

_EXCHANGE = ("experts", "list")
_STEPS = (*_EXCHANGE, "beside", "checkpoint", "saving")
"""Steps that may not lie inside of a graph, but around it."""


class Regions:
    """The compiled parts of a model: the root's forward on one rank, each block's on several, and each of its stage's
    under a pipeline. Where they exchange rows, or lie inside of a checkpoint, their largest parts that do not.

    Attributes:
        regions: in the order of the model.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, backend: str) -> None:
        self.mesh, self.backend = mesh, backend
        self.regions: list[Captured] = []
        self._between: list[str] = []  # why some of what lies between regions is eager
        known: dict[tuple, Code] = {}
        for name, module in self._parts(model):
            boundaries = model._vescale.recipe.below(name).fit.boundaries
            steps, own = Steps(module), id(module) if "forward" in module.__dict__ else 0
            kind = (*map(type, module.modules()), *steps.kind, repr(boundaries), own)
            self.regions.append(Captured(module, mesh, backend, known.setdefault(kind, Code()), steps))

    @property
    def graphs(self) -> int:
        """The number of graphs of all regions; blocks that are alike share theirs."""
        return sum(code.graphs for code in {id(one.code): one.code for one in self.regions}.values())

    @property
    def is_asking(self) -> bool:
        """True while the compiler traces a region, or asks its guards."""
        return any(one.is_asking for one in self.regions)

    @property
    def last(self) -> str:
        """Why the last calls were eager, "" if all were compiled."""
        return next((one.last for one in self.regions if one.last), "")

    def reasons(self) -> list[str]:
        """Returns why calls are eager, each once."""
        found = [why for one in self.regions for why in (*one.refusals.values(), one.last) if why]
        return list(dict.fromkeys((*self._between, *found)))

    def _parts(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        runtime = model._vescale.runtime
        blocks = blocks_of(model)
        if runtime is not None:
            blocks = [(name, block) for name, block in blocks if runtime.is_of_one_stage(block)]
        elif prod(self.mesh.sizes) == 1 or not blocks:
            blocks = [("", model)]
        found = [part for name, block in blocks for part in self._without_exchange(name, block)]
        self._between += [] if found or self._between else ["it has no repeated block of its own"]
        return found

    def _without_exchange(self, name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Returns the module, or its largest parts in which no rank is given rows of others, whose number depends on
        values; none of a leaf, whose guards would cost more than a graph of it saves."""
        if has_step(module, *_EXCHANGE):
            self._between.append(f"{name} gives rows to experts of other ranks")
            return []
        if not any(has_step(one, *_STEPS) for one in module.modules() if one is not module):
            return [(name, module)]
        return [
            part
            for child, inside in module.named_children()
            if next(inside.children(), None) is not None
            for part in self._without_exchange(f"{name}.{child}" if name else child, inside)
        ]


def _is_split(model: nn.Module) -> bool:
    runtime = model._vescale.runtime
    return runtime is not None and runtime.schedule.splits_backwards


def compiled(model: nn.Module, backend: str = "inductor") -> None:
    """Puts a parallelized model into compile mode, in place. Warns that it runs eagerly under a pipeline whose schedule
    splits the backward."""
    held = model._vescale
    held.compiler = backend
    if _is_split(model):
        warnings.warn(f"{type(model).__name__} runs eagerly: {_SPLIT}", CompileWarning, stacklevel=users_level())
    else:
        held.captured = Regions(model, mesh_of(held.device_mesh), backend)


class Explanation:
    """A report of compile mode on a model. `str` gives it in a few lines.

    Attributes:
        graphs: how many graphs were made, each for other sizes or other Python values that the forward reads.
        eager: why calls are eager, one reason each; empty if none was.
    """

    def __init__(self, name: str, graphs: int, eager: list[str]) -> None:
        self._name, self.graphs, self.eager = name, graphs, eager

    def __str__(self) -> str:
        lines = [f"{self._name}: {self.graphs} compiled graph{'s' * (self.graphs != 1)}"]
        return "\n".join([*lines, *(f"    eager: {why}" for why in self.eager)])


def explain_compile(model: nn.Module) -> Explanation:
    """Prints and returns what compile mode made of `model`: its graphs, and why calls of it are eager.

    No communication. Raises PlanError if the model is not parallelized.
    """
    held = getattr(model, "_vescale", None)
    if held is None:
        remedies = [("parallelize(plan, model) first", "")]
        raise PlanError("explain_compile", "the model is not parallelized", (), remedies)
    captured = held.captured
    if captured is None:
        why = [_SPLIT if _is_split(model) else 'the model was parallelized with mode="eager"']
    else:
        why = captured.reasons()
    found = Explanation(type(model).__name__, 0 if captured is None else captured.graphs, why)
    print(found)
    return found

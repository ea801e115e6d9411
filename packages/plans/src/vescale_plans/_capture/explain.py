"""Compile mode as a user turns it on, and asks what became of it."""

from __future__ import annotations

import warnings
from math import prod

from torch import nn

from vescale_dtensor.engine import Mesh, mesh_of

from .._apply.blocks import blocks_of
from .._plan.parts import PlanError
from .code import Code
from .front import Captured, CompileWarning
from .steps import Steps

_PIPELINE = "under a pipeline, compile mode computes eagerly so far"


class Regions:
    """The compiled parts of a model: the root's forward on one rank, each block's on several.

    Attributes:
        regions: in the order of the model.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, backend: str) -> None:
        self.mesh, self.backend = mesh, backend
        self.regions: list[Captured] = []
        known: dict[tuple, Code] = {}
        alone = prod(mesh.sizes) == 1
        for name, module in [("", model)] if alone else blocks_of(model) or [("", model)]:
            boundaries = model._vescale.recipe.below(name).boundaries
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
        return list(dict.fromkeys(found))


def compiled(model: nn.Module, backend: str = "inductor") -> None:
    """Puts a parallelized model into compile mode, in place. Under a pipeline it warns that the model runs eagerly."""
    held = model._vescale
    if getattr(held, "runtime", None) is not None:
        warnings.warn(_PIPELINE, CompileWarning, stacklevel=4)
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
        is_pipeline = getattr(held, "runtime", None) is not None
        why = [_PIPELINE if is_pipeline else 'the model was parallelized with mode="eager"']
    else:
        why = captured.reasons()
    found = Explanation(type(model).__name__, 0 if captured is None else captured.graphs, why)
    print(found)
    return found

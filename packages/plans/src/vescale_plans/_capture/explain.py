"""Compile mode as a user turns it on, and asks what became of it."""

from __future__ import annotations

import warnings

from torch import nn

from vescale_dtensor.engine import mesh_of

from .._plan.parts import PlanError
from .front import Captured, CompileWarning

_SEVERAL = "on several ranks, and under a pipeline, compile mode computes eagerly so far"


def compiled(model: nn.Module, backend: str = "inductor") -> None:
    """Puts a parallelized model into compile mode, in place. On several ranks it warns that the model runs eagerly."""
    held = model._vescale
    if held.device_mesh.size() > 1 or getattr(held, "runtime", None) is not None:
        warnings.warn(_SEVERAL, CompileWarning, stacklevel=4)
    else:
        held.captured = Captured(model, mesh_of(held.device_mesh), backend)


class Explanation:
    """What compile mode made of a model. `str` gives it in a few lines.

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
        several = held.device_mesh.size() > 1 or getattr(held, "runtime", None) is not None
        why = [_SEVERAL] if several else ['the model was parallelized with mode="eager"']
    else:
        why = list(dict.fromkeys([*captured.refusals.values(), *([captured.last] if captured.last else [])]))
    found = Explanation(type(model).__name__, 0 if captured is None else captured.graphs, why)
    print(found)
    return found

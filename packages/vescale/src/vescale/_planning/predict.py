"""predict with the pipeline's own simulator: what a schedule takes is simulated, not estimated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from vescale_pipeline import Costs, simulate
from vescale_plans import Pipeline
from vescale_plans.search import Prediction
from vescale_plans.search import predict as _predict
from vescale_plans.search.pricing.predict import Pace
from vescale_trace.arguments import typed_call

from .._stages import unproved
from .from_config import as_plan


def makespan(
    pipeline: Pipeline, ranks: int, forward: Sequence[float], backward: Sequence[float], transfer: float, pace: Pace
) -> float:
    """Seconds of the plan's schedule, of whose backwards half is for inputs where it tells them apart."""
    half = [seconds / 2 for seconds in backward]
    return simulate(unproved(pipeline, ranks), Costs(forward, half, half, transfer)).makespan_at(pace)


if TYPE_CHECKING:  # one signature for both
    from vescale_plans.search import predict as predict
else:

    @wraps(_predict)
    @typed_call
    def predict(plan: Any, model: Any, *given: Any, **more: Any) -> Prediction:
        return _predict(as_plan(plan, model), model, *given, **{"simulator": makespan, **more})

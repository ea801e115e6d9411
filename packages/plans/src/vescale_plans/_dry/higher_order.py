"""Operators that take functions (`cond`): torch compiles them as a whole, and no mode sees inside. (The function
flex_attention does not come to its operator: dtensor has what stands in for it.)"""

from __future__ import annotations

from typing import Any

from .._plan.parts import PlanError


def check_plain(asked: str, function: Any) -> None:
    """Raises PlanError for such an operator, which `asked` met. Only a mode that says that it supports them is told."""
    if hasattr(function, "_schema"):
        return
    name = function.name()
    raise PlanError(
        asked,
        f"the model calls {name}, an operator that torch compiles as a whole: which rows and features it mixes is not "
        "seen, and it does not run on shards",
        (),
        [
            ('attn_implementation="sdpa"', "a library's other function for the same, which has a rule"),
            (f"local_map({name}, ...)", "in the model, with a plan by hand: it runs on this rank's shards"),
        ],
    )

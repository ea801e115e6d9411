"""All cases of an architecture: its plan by the planner, what came of it, what its cut weights should send."""

from __future__ import annotations

import datetime
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import vescale
from vescale_plans import InfeasibleError, PlanError
from vescale_testkit import run_ranks, warm_up

from . import outcome
from .register import ROWS, build, inputs_of

warm_up("torch._dynamo", "vescale", "transformers")

PINS: dict[str, dict[str, int]] = {
    "tp 2": {"pp": 1, "dp": 1, "tp": 2},
    "dp 2 x tp 2, zero 3": {"pp": 1, "dp": 2, "tp": 2, "zero": 3},
    "pp 2": {"pp": 2, "dp": 1, "tp": 1},
}
TRAININGS = ("tp 2", "dp 2 x tp 2, zero 3")
CASES = (*TRAININGS, "pp 2", "generate")
RIGHT, ALONE, LIMIT_S = "right", "not on one device", 300.0


@functools.lru_cache(maxsize=2)  # generate takes that of "tp 2"
def planned(name: str, case: str) -> vescale.Plan:
    """The planner's plan with the case's degrees."""
    with outcome.quiet():
        pin = PINS[case]
        degrees = pin["pp"] * pin["dp"] * pin["tp"]
        return vescale.generate_plan(
            build(name), world_size=degrees, batch=ROWS, hardware="h100", sample=inputs_of(name), pin=pin
        )


def tried(name: str, case: str) -> dict[str, Any]:
    """`outcome`: "right", "wrong: ..", "no plan: .." or "raises: .."; and figures."""
    began = time.monotonic()
    found: dict[str, Any] = {"name": name, "case": case}
    try:
        plan = planned(name, case if case in PINS else "tp 2")
    except (InfeasibleError, PlanError) as error:
        return found | {"outcome": f"no plan: {_said(error)}"}
    except Exception as error:  # a raw error out of the planner
        return found | {"outcome": f"no plan, untyped: {_said(error)}"}
    found["planning s"] = round(time.monotonic() - began, 1)
    judge: Callable[..., Any] = outcome.generated if case == "generate" else outcome.judged
    try:
        answers = run_ranks(plan.world_size, judge, name, plan, timeout=LIMIT_S)
    except Exception as error:  # of any rank
        return found | {"outcome": f"raises: {_said(error)}"}
    if case == "generate" and None in answers:
        return found | {"outcome": ALONE}
    if case == "generate":
        return found | {"outcome": RIGHT if all(answers) else "wrong: tokens"}
    worst = {key: max(answer[key] for answer in answers) for key in outcome.BOUNDS}
    beyond = [far for answer in answers for far in outcome.wrong(answer).items()]
    held = {one for answer in answers for one in answer["gradients"]}  # a stage of a pipeline has its own alone
    beyond += [(one, "no gradient") for one in answers[0]["gradients wanted"] if one not in held]
    found |= worst | {"collectives": max(answer["collectives"] for answer in answers)}
    if case == "tp 2":
        found["minimum"] = answers[0]["minimum"]
    return found | {"outcome": f"wrong: {dict(beyond)}" if beyond else RIGHT}


def run(names: Iterable[str], into: str | None, cases: Iterable[str] = CASES) -> None:
    """Try all; a line of JSON each, printed, and added to the file `into`, whose own are not tried again."""
    logging.disable(logging.WARNING)
    file = Path(into) if into else None
    done = (
        {(one["name"], one["case"]) for one in map(json.loads, file.read_text().splitlines())}
        if file and file.exists()
        else set()
    )
    for name in names:
        for case in cases:
            if (name, case) in done or (case == "generate" and name.startswith("other: ")):
                continue
            line = json.dumps(tried(name, case) | {"day": datetime.date.today().isoformat()})
            print(line, flush=True)
            if file:
                with file.open("a") as stream:
                    stream.write(line + "\n")


def _said(error: Exception) -> str:
    """The last that an error says of itself, or of the rank that it came from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return f"{type(error).__name__}: {(named or lines or [''])[-1 if named else 0]}"[:300]

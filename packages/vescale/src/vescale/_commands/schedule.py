"""`vescale schedule`: generates or reads a schedule of a pipeline, proves it, times it, draws it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vescale_pipeline import Costs, PipelineError, Schedule, Simulation, Verdict, draw, generate, simulate, verify

from .._machine.text_file import text_of

Time = Annotated[float, typer.Option(min=0, help="Time on each stage, in any unit.")]


def schedule(
    kind: Annotated[str, typer.Option(help="Kind of schedule, such as 1f1b or zbv.")] = "1f1b",
    stages: Annotated[int, typer.Option(help="Ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Number of parts of a batch.")] = 8,
    virtual: Annotated[int, typer.Option(help="Stages per rank; kinds in a V have 2.")] = 1,
    file: Annotated[Path | None, typer.Option(help="Read this schedule's JSON instead.")] = None,
    forward: Time = 1.0,
    input_gradient: Time = 1.0,
    weight_gradient: Time = 1.0,
    transfer: Annotated[float, typer.Option(min=0, help="Time of a send.")] = 0.0,
    budget: Annotated[float | None, typer.Option(help="Most microbatches alive on a rank.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a timeline, .png or .svg.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Chrome, .json.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the schedule's JSON.")] = None,
) -> None:
    """Shows the costs of a pipeline schedule: bubble, critical path, memory. Proves that the schedule is correct."""
    costs = Costs(forward, input_gradient, weight_gradient, transfer)
    if file is None:
        subject = generate(kind, stages, microbatches, virtual)
    else:
        subject = Schedule.from_json(text_of(file, PipelineError, "vescale schedule"))
    verdict = verify(subject, transport="buffered", budget=budget, costs=costs)
    simulation = simulate(subject, costs)
    for line in _report(verdict, simulation):
        typer.echo(line)
    for path in (png, trace):
        if path is not None:
            typer.echo(f"{'written':<15}{draw(simulation, path)}")
    if out is not None:
        out.write_text(json.dumps(subject.to_json()))
        typer.echo(f"{'written':<15}{out}")


def _report(verdict: Verdict, simulation: Simulation) -> Iterator[str]:
    subject, path = verdict.schedule, simulation.critical_path
    sizes = f"{subject.ranks} ranks, {subject.stages} stages, {subject.microbatches} microbatches"
    order = "in microbatch order" if verdict.adds_in_order else "in another order: equal to one device's up to rounding"
    facts = {
        "schedule": f"{subject.name}: {sizes}",
        "actions": f"{sum(map(len, subject.actions))}, {subject.hash[:16]}",
        "makespan": f"{simulation.makespan:g}",
        "bubble": f"{simulation.bubble:.1%} at a barrier, {simulation.window_bubble:.1%} in ranks' own windows",
        "peak memory": f"{', '.join(f'{peak:g}' for peak in verdict.peak_memory)} microbatches, by rank",
        "critical path": f"{len(path)} actions, {path[0].action} to {path[-1].action}",
        "adds up": order,
    }
    yield from (f"{name:<15}{fact}" for name, fact in facts.items())
    for model, circle in verdict.deadlocks.items():
        yield f"would deadlock on a transport that is {model!r}:"
        yield from (f"  {line}" for line in circle)

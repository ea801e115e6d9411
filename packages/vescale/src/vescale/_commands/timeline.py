"""`vescale timeline`: the ranks' records of a step as one trace, and what each rank's time went to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._recorded.spans import lost, straggler, waited
from ..timeline import merge_timeline, read_timeline, totals


def timeline(
    folder: Annotated[Path, typer.Argument(help="Folder that vescale.timeline wrote.")],
    out: Annotated[Path | None, typer.Option(help="The trace, .json; FOLDER/trace.json by default.")] = None,
) -> None:
    """Merges the timelines of all ranks into a trace for Chrome or Perfetto, and says what each did and waited for."""
    ranks = read_timeline(folder)
    gone = lost(ranks)
    for rank, spans in sorted(ranks.items()):
        for name, (count, seconds) in sorted(totals(spans).items(), key=lambda row: -row[1][1]):
            typer.echo(f"rank {rank:<4} {name:<20} {1e3 * seconds:9.2f} ms  {count:>5} times")
        typer.echo(f"rank {rank:<4} {'exposed collectives':<20} {1e3 * gone[rank].exposed:9.2f} ms")
    for said in waited(ranks):
        typer.echo(said)
    if said := straggler(ranks):
        typer.echo(said)
    typer.echo(f"written to {merge_timeline(folder, out)}")

"""`vescale compare`: the first place at which two recorded runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compare import compare as _compare


def compare(
    run_a: Annotated[Path, typer.Argument(help="Folder that vescale.record wrote.")],
    run_b: Annotated[Path, typer.Argument(help="Another such folder.")],
    rtol: Annotated[float, typer.Option(help="Largest distance, relative to the norm; 0 compares every bit.")] = 0.0,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
) -> None:
    """Names the first step, module, direction and tensor at which two runs differ; exit status 1 if they do."""
    comparison = _compare(run_a, run_b, rtol=rtol)
    typer.echo(str(comparison))
    if html is not None:
        typer.echo(f"written to {comparison.write_html(html)}")
    if not comparison.equal:
        raise typer.Exit(1)

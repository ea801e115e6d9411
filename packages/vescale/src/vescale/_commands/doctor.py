"""`vescale doctor`: whether this environment can train, and what to mend."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from vescale_trace.environment import count

from ..doctor import examine


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead.")] = False) -> None:
    """Checks this environment and says what to fix; exit status 1 if something must be. Under torchrun, all ranks."""
    examination = examine()
    if count("RANK", 0) == 0:
        typer.echo(json.dumps(examination.as_json()) if as_json else str(examination))
    if not examination.healthy:
        raise typer.Exit(1)

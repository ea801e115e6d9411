"""The command `vescale`: a register of commands, each of which is one function in a module of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer

from vescale_dtensor import VescaleError

from ._commands.calibrate import calibrate
from ._commands.checkpoint import app as checkpoint
from ._commands.compare import compare
from ._commands.doctor import doctor
from ._commands.plan import plan
from ._commands.schedule import schedule
from ._commands.timeline import timeline
from ._commands.train import train
from ._version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(schedule)
app.command()(compare)
app.command()(calibrate)
app.command()(doctor)
app.command()(timeline)
app.command()(plan)
app.command()(train)
app.add_typer(checkpoint, name="checkpoint")


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vescale {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Says the version and exits.")
    ] = False,
) -> None:
    """veScale on the command line."""


def main() -> None:
    """Runs a command. What the user can mend is said in its own words, with exit status 2 and no traceback; 1 is
    the answer of a command that looks for something."""
    try:
        app()
    except (VescaleError, OSError) as error:  # a file that cannot be written, for one
        typer.echo(str(error), err=True)
        sys.exit(2)

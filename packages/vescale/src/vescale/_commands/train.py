"""`vescale train`: trains by a configuration, on this machine's ranks or torchrun's, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vescale_dtensor import VescaleError


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file, such as recipes/shakespeare.toml.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Entries to replace: training.steps=50.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of this machine; one a GPU by default.")] = None,
    script: Annotated[Path | None, typer.Option(help="Write the same training as a script, and train nothing.")] = None,
    dry_run: Annotated[int | None, typer.Option(min=1, help="Plan for so many ranks, and train nothing.")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device hour, for --dry-run.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a configuration.")] = False,
) -> None:
    """Trains a model by a configuration.

    It goes on from the newest checkpoint in the run's folder, on any number of ranks and under any plan. SIGTERM,
    SIGUSR1 and Ctrl-C make it save and end; under Slurm it is requeued then.
    """
    try:
        from .._training import launch
        from .._training.config import Config, read_config
        from .._training.planning import foretold
        from .._training.run import train as run
        from .._training.script import script_of
    except ImportError as error:
        remedies = [("pip install 'vescale[train]'", "")]
        raise VescaleError("vescale train", f"it needs {error.name}, which is not here", (), remedies) from error
    if schema:
        typer.echo(json.dumps(Config.model_json_schema(), indent=1))
        return
    if config is None:
        remedies = [("vescale train recipes/shakespeare.toml", ""), ("vescale train --schema", "what may be said")]
        raise VescaleError("vescale train", "it names no configuration", (), remedies)
    asked = read_config(config, overrides or ())
    if dry_run is not None:
        told, console = foretold(asked, dry_run), Console()
        console.print(told.why)
        console.print(told.summary(price), highlight=False)
        return
    if script is not None:
        script.write_text(script_of(asked))
        typer.echo(f"written to {script}")
        return
    count = launch.ranks_here(ranks)
    if launch.is_worker():
        run(asked)
    elif count * launch.nodes() == 1:
        if not run(asked):
            launch.requeue()
    elif not launch.launched(asked, [str(config), *(overrides or ())], count):
        launch.requeue()

"""`vescale checkpoint`: look at committed steps, check, compare, export and rewrite them. In one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from vescale_checkpoint import tools

from ..pretrained import places_of
from .plan import model_of
from .serving import checked, copy_what_is_beside
from .step_words import as_commands

app = typer.Typer(no_args_is_help=True, help="Committed steps: look at, check, compare, export, rewrite.")
Where = Annotated[str, typer.Argument(help="A run's directory (its latest step), or one step's.")]
Key = Annotated[str, typer.Option(help="The model's key in the state that was saved.")]
Step = Annotated[int | None, typer.Option(help="A committed step of the run.")]


@app.command()
@as_commands()
def inspect(path: Where, step: Step = None, tensors: Annotated[bool, typer.Option(help="List each tensor.")] = True):
    """Shows what a step contains: when and how it was saved, its tensors and its files."""
    with tools.opened(path, step) as source:
        kept, console = source.manifest, Console()
        head = f"{source.folder}: step {kept.step}, {counted(len(kept.tensors), 'tensor')}, {size_of(kept.nbytes)}"
        console.print(plain(head), highlight=False)
        for key, value in kept.about.items():
            if value not in (None, {}, []):
                said = value if isinstance(value, str) else tools.shown(value, 4000)
                console.print(plain(f"  {key}  {said}".replace("\n", "\n    "), lines=True), highlight=False)
        if not tensors:
            return
        table = Table("tensor", "dtype", "shape", "sections", "size", "tied to")
        for name, tensor in kept.tensors.items():
            shape, parts = str(list(tensor.shape)), str(len(tensor.sections))
            tied = plain(", ".join(tensor.tied))
            table.add_row(plain(name), tensor.dtype, shape, parts, size_of(tensor.nbytes), tied)
        console.print(table)


@app.command()
@as_commands()
def verify(path: Where, step: Step = None):
    """Reads every byte of a step and checks it. Exit status 1 if anything is wrong."""
    with tools.opened(path, step) as source:
        total = sum(info.nbytes for info in source.manifest.files.values())
        with progress("verify", total) as advance:
            faults = tools.verify(source, advance)
        for fault in faults:
            typer.echo(fault)
        verdict = counted(len(faults), "fault") if faults else f"whole, {size_of(total)}"
        typer.echo(tools.printable(f"{source.folder}: {verdict}"))
    if faults:
        raise typer.Exit(1)


@app.command()
@as_commands()
def diff(first: Where, second: Where):
    """Lists every tensor and value that differs between two steps, bit for bit. Exit status 1 if any does."""
    with tools.opened(first) as a, tools.opened(second) as b:
        with progress("diff", a.manifest.nbytes) as advance:
            found = tools.diff(a, b, advance)
        for difference in found:
            typer.echo(f"{difference.name}: {difference.what}")
        typer.echo(counted(len(found), "difference") if found else "no difference")
    if found:
        raise typer.Exit(1)


@app.command()
@as_commands()
def export(
    path: Where,
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    step: Step = None,
    key: Key = "model",
    like: Annotated[
        Path | None, typer.Option(help="A folder with the model's config.json and tokenizer, to write beside.")
    ] = None,
):
    """Writes a model's weights as a HuggingFace folder of safetensors; with --like as servers load it."""
    places = None if like is None else places_of(model_of(like))
    finish = (lambda folder: None) if like is None else partial(copy_what_is_beside, like)
    with tools.opened(path, step) as source, progress("export", source.manifest.nbytes) as advance:
        tools.export(source, out, key, advance, places, finish)
    typer.echo(str(out))


@app.command()
@as_commands()
def serve_check(
    folder: Annotated[Path, typer.Argument(help="An export: weights and config.json.")],
    against: Annotated[
        str | None, typer.Option(help="The run, or the step, that was exported: compares logits.")
    ] = None,
    step: Step = None,
    key: Key = "model",
):
    """Checks that an export can be served: loads it in transformers, compares its names and dtypes with those that are
    published, and its logits with the training's. Exit status 1 if anything is wrong."""
    found = list(checked(folder, against, step, key))
    for right, said in found:
        typer.echo(tools.printable(f"{'ok   ' if right else 'WRONG'} {said}"))
    if not all(right for right, _ in found):
        raise typer.Exit(1)


@app.command()
@as_commands()
def reshard(
    path: Where,
    out: Annotated[Path, typer.Argument(help="Another run's directory.")],
    ranks: Annotated[int, typer.Option(help="How many files to write.")],
    step: Step = None,
):
    """Rewrites a step for another number of ranks. Loading does not need this: any step loads anywhere."""
    with tools.opened(path, step) as source, progress("reshard", source.manifest.nbytes) as advance:
        made = tools.reshard(source, out, ranks, advance)
    typer.echo(made)


def plain(text: str, *, lines: bool = False) -> Text:
    """Wraps others' text for rich: neither markup nor control characters, but line feeds on request."""
    return Text(tools.printable(text, lines=lines), overflow="fold")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on the terminal's error stream; gives a function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def size_of(nbytes: int) -> str:
    """Formats bytes in binary units."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"

"""Train a GPT and a HuggingFace Llama on one process, then on four, and compare.

    python examples/demo.py                                  # starts the four processes itself
    torchrun --nproc-per-node 4 examples/demo.py             # uses torchrun's

Both models are single-device code and so is the loop in `train`: the parallel run adds
a plan and the `parallelize` line. Seed, optimizer and global batches are the same, so
every step's loss must be, up to the order of float32 sums. Ends with status 1 if not.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from comparison import Comparison
from corpus import VOCABULARY, Corpus, CorpusError, read_corpus
from launch import LaunchError, Stream, launch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

BATCH_SIZE = 16
SEQUENCE_LENGTH = 128
# Where training amplifies rounding, no two summation orders agree, on one device either. At
# 1e-3 the GPT does: the same batches in four microbatches are 2e-5 off by step 30. At 5e-4
# they stay within 2e-7 for 60 steps, so that any real difference stands out.
LEARNING_RATE = 5e-4

OnStep = Callable[[float], None]


# The models. ---------------------------------------------------------------------------


def build_gpt() -> nn.Module:
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=SEQUENCE_LENGTH))


def gpt_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(inputs, targets)


def build_llama() -> nn.Module:
    from llama.model import build  # here: importing transformers takes seconds

    return build(vocab_size=VOCABULARY)


def llama_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    # transformers shifts the labels by itself, so `targets` is not needed.
    return model(input_ids=inputs, labels=inputs).loss


@dataclass(frozen=True)
class Example:
    """A model, how it yields a loss, and by its name the plan in `vescale_plans.library`."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


EXAMPLES = {
    example.name: example
    for example in (
        Example("gpt", "GPT", build_gpt, gpt_loss),
        Example("llama", "HuggingFace Llama", build_llama, llama_loss),
    )
}


# Training: the loop of a single device. ------------------------------------------------


def train(example: Example, corpus: Corpus, options: Options, on_step: OnStep, plan: Any = None) -> None:
    """Train from scratch for `options.steps`; in parallel when a `plan` is given."""
    torch.manual_seed(options.seed)
    model = example.build().to(corpus.tokens.device)

    def optimizer_fn(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)

    if plan is None:
        optimizer = optimizer_fn(model.parameters())
    else:
        import vescale

        model, optimizer = vescale.parallelize(plan, model, optimizer_fn)

    for step in range(options.steps):
        inputs, targets = corpus.batch(step, BATCH_SIZE, SEQUENCE_LENGTH)
        loss = example.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(loss.item())


def library_plan(example: Example, options: Options) -> Any:
    """The plan that veScale ships for this model, on the mesh asked for."""
    try:
        from vescale_plans import library
    except ImportError as error:
        raise OptionError(
            f"{error}: the parallel run needs veScale; `make demo` installs it and runs this "
            f"(`make setup` only installs, then .venv/bin/python examples/demo.py)"
        ) from error
    plan = getattr(library, example.name)
    return plan(mesh=options.mesh, sequence_parallel=options.sequence_parallel)


# Options. ------------------------------------------------------------------------------


class OptionError(ValueError):
    """The command line asks for something impossible; the message says what is possible."""


@dataclass(frozen=True)
class Options:
    """The command line, strict."""

    steps: int
    seed: int
    data: Path | None
    out: Path
    models: tuple[str, ...]
    mesh: dict[str, int]
    sequence_parallel: bool
    stream: Path | None

    @property
    def processes(self) -> int:
        return prod(self.mesh.values())

    @property
    def layout(self) -> str:
        """The parallel run in words."""
        axes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        return f"{self.processes} processes, {axes}" + (" + SP" if self.sequence_parallel else "")

    def arguments(self, model: str) -> list[str]:
        """The command line of the parallel run of one model."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        arguments = ["--models", model, "--mesh", mesh]
        arguments += ["--steps", str(self.steps), "--seed", str(self.seed)]
        arguments += ["--data", str(self.data)] if self.data else []
        arguments += [] if self.sequence_parallel else ["--no-sequence-parallel"]
        return arguments


def parse_options(arguments: list[str] | None = None) -> Options:
    """Read the command line (and, under torchrun, the number of processes).

    Raises:
        OptionError: values that no run could have.
    """
    parser = argparse.ArgumentParser(
        description="Train a GPT and a HuggingFace Llama on one process and on several; compare.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=30, help="optimizer steps per run (default: %(default)s)")
    add("--seed", type=int, default=0, help="of parameters and batches (default: %(default)s)")
    add("--data", type=Path, metavar="FILE", help="train on this file's bytes instead")
    add("--out", type=Path, default=Path("demo_output"), metavar="FOLDER", help="for PNG and JSON")
    add("--models", default=",".join(EXAMPLES), help="comma-separated (default: %(default)s)")
    add("--mesh", help="sizes of the data and tensor parallel axes (default: dp=2,tp=2)")
    add("--processes", type=int, help="how many; without --mesh half of them for each axis")
    add("--no-sequence-parallel", dest="sequence_parallel", action="store_false")
    add("--stream", type=Path, help=argparse.SUPPRESS)  # this is a rank, started by `launch`
    given = parser.parse_args(arguments)

    if given.steps < 1:
        raise OptionError(f"--steps {given.steps}: at least 1 is needed to compare anything")
    models = tuple(given.models.split(","))
    if unknown := [model for model in models if model not in EXAMPLES]:
        raise OptionError(f"--models {unknown[0]}: there are {', '.join(EXAMPLES)}")
    mesh = parse_mesh(given.mesh, given.processes or int(os.environ.get("WORLD_SIZE", 0)) or None)
    return Options(
        steps=given.steps,
        seed=given.seed,
        data=given.data,
        out=given.out,
        models=models,
        mesh=mesh,
        # One rank has nobody to share the sequence with.
        sequence_parallel=given.sequence_parallel and mesh.get("tp", 1) > 1,
        stream=given.stream,
    )


def parse_mesh(text: str | None, processes: int | None) -> dict[str, int]:
    """Axis sizes from "dp=2,tp=2", checked against the number of processes if there is one.

    Example:
        >>> parse_mesh("dp=1,tp=4", None)
        {'dp': 1, 'tp': 4}
        >>> parse_mesh(None, 8)
        {'dp': 4, 'tp': 2}
    """
    if text is None:
        processes = 4 if processes is None else processes
        tp = 2 if processes % 2 == 0 else 1
        return {"dp": processes // tp, "tp": tp}
    mesh = {"dp": 1, "tp": 1}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if axis not in mesh or not size.isdecimal() or int(size) < 1:
            raise OptionError(
                f"--mesh {text}: cannot read {item!r}; write sizes for the axes dp (data "
                f"parallel) and tp (tensor parallel), such as dp=2,tp=2 or tp=4"
            )
        mesh[axis] = int(size)
    if processes is not None and processes != prod(mesh.values()):
        raise OptionError(
            f"--mesh {text} has {mesh['dp']} x {mesh['tp']} = {prod(mesh.values())} ranks, but "
            f"there are {processes} processes; the product of the axes must be their number"
        )
    return mesh


# Running. ------------------------------------------------------------------------------


def choose_device(processes: int) -> torch.device:
    """A GPU for each process of this machine if there are as many, else the CPU."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if torch.cuda.is_available() and torch.cuda.device_count() >= here:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


@contextmanager
def progress_bar(console: Console, what: str, steps: int, losses: list[float]) -> Iterator[OnStep]:
    """A bar on the terminal; each call with a loss moves it by one step, and adds to `losses`."""
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:<12}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=steps, loss="starting ...")

        def on_step(loss: float) -> None:
            losses.append(loss)
            progress.update(task, advance=1, loss=f"loss {loss:.4f}")

        yield on_step


def compare(example: Example, corpus: Corpus, options: Options, console: Console) -> Comparison:
    """Train on one process, then on all. Under torchrun every rank calls this."""
    single: list[float] = []
    parallel: list[float] = []
    with progress_bar(console, f"{example.title}, 1 process", options.steps, single) as on_step:
        train(example, corpus, options, on_step)
    title = f"{example.title}, {options.processes} processes"
    with progress_bar(console, title, options.steps, parallel) as on_step:
        if "RANK" in os.environ:
            train(example, corpus, options, on_step, library_plan(example, options))
        else:
            start_processes(example, options, on_step)
    return Comparison(example.name, example.title, options.layout, tuple(single), tuple(parallel))


def start_processes(example: Example, options: Options, on_step: OnStep) -> None:
    """Run the parallel half of one example in processes of its own, started here."""
    with tempfile.TemporaryDirectory() as folder:
        for loss in launch(
            Path(__file__),
            options.arguments(example.name),
            processes=options.processes,
            folder=Path(folder),
            log=options.out / f"{example.name}.log",
        ):
            on_step(loss)


def make_output_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if not any(path.iterdir()):  # new, so ours: keep it out of the repository that it may be in
        (path / ".gitignore").write_text("*\n")


def run(options: Options) -> int:
    """Everything that the command line asked for; the exit status."""
    examples = [EXAMPLES[name] for name in options.models]
    device = choose_device(options.processes)
    corpus = read_corpus(options.data, seed=options.seed, device=device)

    # What cannot work is refused now, not after the first training.
    corpus.sample_start(0, SEQUENCE_LENGTH)
    plans = [library_plan(example, options) for example in examples]

    # The processes share the machine's cores, and the one that trains alone gains nothing at these
    # sizes: its second thread waits by spinning, 20 times slower beside another busy process.
    torch.set_num_threads(1)
    if options.stream:
        with Stream(options.stream) as on_step:
            for example, plan in zip(examples, plans, strict=True):
                train(example, corpus, options, on_step, plan)
        return 0

    from report import plot, print_comparison, write_json  # here: started ranks need no matplotlib

    first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not first)
    console.print(f"Training on {corpus.origin}, {len(corpus.tokens):,} bytes, on {device.type}.\n")
    if first:
        make_output_folder(options.out)
    comparisons = []
    for example in examples:
        comparisons.append(compare(example, corpus, options, console))
        print_comparison(console, comparisons[-1])
    if first:
        plot(options.out / "losses.png", comparisons)
        write_json(options.out / "losses.json", comparisons)
    console.print(f"Curves: {options.out / 'losses.png'}   All losses: losses.json beside it.")
    return 0 if all(runs.agrees for runs in comparisons) else 1


def main() -> int:
    # Ended from outside, leave as by control-C, so that the processes started are ended too. Not
    # in a rank: one that waits in a collective would never get to run the handler.
    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return run(parse_options())
    except (OptionError, CorpusError, LaunchError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

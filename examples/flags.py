"""The command line that every `pretrain.py` takes: a size per mesh axis, and what goes on top."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from vescale import Pipeline

AXES = {"pp": "pipeline stages", "dp": "parts of the batch", "ep": "groups of experts, beside which the batch is split",
        "tp": "parts of every block's matrices, and of the sequence between blocks"}  # fmt: skip


@dataclass(frozen=True)
class Flags:
    """The command line, strict; `mesh` holds the axes asked for, outermost first."""

    mesh: dict[str, int]
    sequence_parallel: bool
    zero: int
    schedule: str
    microbatches: int
    checkpointing: bool
    mode: str
    data: Path | None
    steps: int
    batch: int
    sequence: int
    rate: float
    seed: int
    out: Path
    resume: Path | None
    against: Path | None

    @property
    def device(self) -> torch.device:
        """This rank's GPU where there is one, else the CPU."""
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else _CPU

    @property
    def layout(self) -> str:
        """In words."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        return axes + (f", ZeRO-{self.zero}" if self.zero else "") + (", compiled" if self.mode == "compile" else "")

    def changes(self, blocks: str, count: int) -> dict[str, Any]:
        """What they ask for beyond tensor and data parallelism, as fields of a plan whose model has `count` blocks."""
        stages = self.mesh.get("pp", 1)
        cuts = [f"{blocks}.{count * stage // stages}" for stage in range(1, stages)]
        return {
            "data_axis": "ep" if "ep" in self.mesh else "dp" if "dp" in self.mesh else None,
            "expert_axis": "ep" if "ep" in self.mesh else None,
            "zero": self.zero,
            "checkpointing": {f"{blocks}.*": True} if self.checkpointing else {},
            "pipeline": Pipeline(cuts=cuts, schedule=self.schedule, microbatches=self.microbatches) if cuts else None,
        }


def read_flags(about: str, arguments: Sequence[str] | None = None) -> Flags:
    """Reads a command line; exits with what is possible where it asks for what no run could have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for axis, meaning in AXES.items():
        add(f"--{axis}", type=int, default=1, help=meaning)
    add("--no-sequence-parallel", dest="sequence_parallel", action="store_false")
    add("--zero", type=int, default=0, choices=range(4), help="what is sharded over the batch's axis as well")
    add("--schedule", default="1f1b", help="of the pipeline: gpipe, 1f1b, interleaved, zbh1, ...")
    add("--microbatches", type=int, default=4, help="that a pipeline runs the batch in")
    add("--checkpointing", action="store_true", help="compute blocks again in the backward instead of keeping them")
    add("--compile", dest="mode", action="store_const", const="compile", default="eager", help="compile mode")
    add("--data", type=Path, help="any file: its bytes are the tokens (default: Python's standard library)")
    add("--steps", type=int, default=30)
    add("--batch", type=int, default=8, help="samples of a step, over all ranks")
    add("--sequence", type=int, default=32)
    add("--rate", type=float, default=5e-4)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("pretrain_output"), help="for the checkpoint, losses.json and losses.png")
    add("--resume", type=Path, help="go on from what a run left here, on whatever mesh it was")
    add("--against", type=Path, help="draw the losses beside those of the run that left its here")
    given = vars(parser.parse_args(arguments))
    mesh = {axis: size for axis in AXES if (size := given.pop(axis)) > 1} or {"dp": 1}
    world = int(os.environ.get("WORLD_SIZE", prod(mesh.values())))
    if "ep" in mesh and "dp" in mesh:
        parser.error("--ep splits the batch as well: leave --dp out")
    if prod(mesh.values()) != world:
        axes = " x ".join(f"--{axis} {size}" for axis, size in mesh.items())
        parser.error(f"{axes} is {prod(mesh.values())} ranks, and torchrun started {world}: they must be as many")
    return Flags(mesh=mesh, **given)


_CPU = torch.device("cpu")

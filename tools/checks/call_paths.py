"""How far a call leads through the sources: files of veScale that it enters, and moves from one to another.

    python tools/checks/call_paths.py     a table: a warm dropout and loss, parallelize, a pipeline's step, save, load

A file is entered where a function of it is called; a move is such a call out of another file of veScale, whatever of
torch's lies between. Counted on rank 0 of two. Who reads the code along one call reads these files, in so many steps.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import vescale
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks


def path_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Files entered, and moves between them."""
    files: set[str] = set()
    stack: list[str] = []
    moves = 0

    def noted(frame: Any, event: str, _: Any) -> None:
        nonlocal moves
        file = frame.f_code.co_filename
        if "/src/vescale" not in file.replace("\\", "/"):
            return
        if event == "call":
            moves += bool(stack) and stack[-1] != file
            stack.append(file)
            files.add(file)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(noted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), moves


def paths(folder: str) -> dict[str, tuple[int, int]]:
    """On a rank of two: per call."""
    mesh = mesh_of(2, names=("tp",))
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    scores = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])
    target = torch.tensor([0, 3, 5, 7])
    warm = {
        "dropout of a sharded tensor, warm": lambda: F.dropout(x, 0.5),
        "cross_entropy over a sharded vocabulary, warm": lambda: F.cross_entropy(scores, target),
    }
    found = {}
    for name, call in warm.items():
        call(), call()
        found[name] = path_of(call)
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    made: list[Any] = []
    found["parallelize (ZeRO-3)"] = path_of(lambda: made.extend(vescale.parallelize(plan, model, torch.optim.AdamW)))
    model, optimizer = made
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    found["a step of a pipeline, warm"] = path_of(_pipeline_step())
    state = {"model": model, "optimizer": optimizer}
    found["save"] = path_of(lambda: vescale.save(folder, state, step=1))
    found["load"] = path_of(lambda: vescale.load(folder, state))
    return found


def _pipeline_step() -> Callable[[], None]:
    """Returns a training step of 1F1B over two stages, run twice already."""
    pipeline = vescale.Pipeline(cuts=("2",), schedule="1f1b", microbatches=2)
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    model, optimizer = vescale.parallelize(
        plan, torch.nn.Sequential(*layers), torch.optim.AdamW, loss_fn=lambda out, batch: out.square().mean()
    )

    def step() -> None:
        model(torch.ones(4, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    return step


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        for name, (entered, moved) in run_ranks(2, partial(paths, own))[0].items():
            print(f"{name:<48}{entered:>4} files{moved:>7} moves")

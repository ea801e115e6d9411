"""The scripts of examples/libraries: three lines from one device to two, and the same losses."""

import difflib
import importlib
from pathlib import Path

import pytest

from vescale_testkit import in_turns, run_ranks, warm_up

pytest.importorskip("accelerate", reason="the scripts are of transformers' Trainer and accelerate")
warm_up("vescale", "transformers.models.llama.modeling_llama")

FOLDER = Path(__file__).absolute().parents[4] / "examples" / "libraries"
SCRIPTS = {"trainer": "accelerate", "accelerated": "accelerate", "lora": "peft", "fabric": "lightning", "sft": "trl"}
"""And the package that each needs."""
LOSS = 1e-5


def code(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()[1:]
    return [line for line in lines if line]


@pytest.mark.parametrize("name", SCRIPTS)
def test_three_lines(name):
    changes = [line for line in difflib.ndiff(code(name), code(f"{name}_parallel")) if line[0] in "+-"]
    assert len(changes) <= 3 and all(line.startswith("+") and len(line) <= 122 for line in changes), changes


def losses(name, folder, is_parallel):
    import os

    import torch
    from accelerate.state import AcceleratorState

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    kept = {one: os.environ.pop(one, None) for one in names}
    os.environ.update({one: str(value) for one, value in names.items()} if is_parallel else {})
    AcceleratorState._reset_state(True)
    try:
        return importlib.import_module(f"libraries.{name}{'_parallel' * is_parallel}").train(folder)
    finally:
        AcceleratorState._reset_state(True)
        for one, value in kept.items():
            os.environ.pop(one, None)
            if value is not None:
                os.environ[one] = value


@in_turns(3)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_losses_are_those_of_one_device(name, tmp_path):
    pytest.importorskip(SCRIPTS[name], reason=f"{name}.py needs it")
    (wanted,) = run_ranks(1, losses, name, str(tmp_path / "one"), False, timeout=200)
    first, second = run_ranks(2, losses, name, str(tmp_path / "two"), True, timeout=200)
    assert first == second and len(first) == len(wanted) == 10 and first[-1] < first[0]
    assert max(abs(a - b) / b for a, b in zip(first, wanted)) <= LOSS

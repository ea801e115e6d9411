"""What parallelism asks of a user: the lines by which an example on many devices differs from it on one, and that the
losses are the same.

The veScale paper's count for nD parallelism, read off its chart: 29-38 lines for itself, 63-100 for TorchTitan, 82-162
for Megatron-LM.
"""

import difflib
import importlib
import os
from pathlib import Path

import pytest
import torch

from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

EXAMPLES = Path(__file__).absolute().parents[4] / "examples"
# Ranks, and a part of the mesh that is left out where the whole grid is not asked for: eight processes are many.
FAMILIES = {"nanogpt": (4, None), "llama": (8, '"dp": 2, '), "mixtral": (4, None)}
MOST, STEPS = 12, 10


def code(family, module):
    """Its lines, without blank ones, comments and the docstring at the top."""
    text = (EXAMPLES / family / f"{module}.py").read_text()
    lines = [line.split("  # ")[0].rstrip() for line in text.splitlines()[1:]]
    return [line for line in lines if line and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_to_write(family):
    changes = list(difflib.ndiff(code(family, "train"), code(family, "train_parallel")))
    written = [line[2:] for line in changes if line.startswith("+ ")]
    replaced = [line[2:] for line in changes if line.startswith("- ")]
    assert len(written) <= MOST, "\n".join(written)
    assert [line.strip() for line in replaced] == ["optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)"]
    assert all(len(line) <= 120 for line in written)


def losses(family, left_out):
    """Of the parallel script, and of the one for one device."""
    if left_out is None:
        parallel = importlib.import_module(f"{family}.train_parallel").train
    else:
        scope = {"__name__": "script"}
        text = (EXAMPLES / family / "train_parallel.py").read_text()
        assert left_out in text
        exec(text.replace(left_out, ""), scope)
        parallel = scope["train"]
    found = parallel(STEPS)
    return found, importlib.import_module(f"{family}.train").train(STEPS)


@in_turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_are_those_of_one_device(family):
    ranks, left_out = FAMILIES[family]
    if os.environ.get("VESCALE_GRID") == "full":
        left_out = None
    elif left_out is not None:
        ranks //= 2
    for found, wanted in run_ranks(ranks, losses, family, left_out, timeout=300):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)

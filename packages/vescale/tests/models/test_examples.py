"""Each example trains under any parallelism by flag, goes on under another mesh, and draws its curve beside one device

Losses are held against those of one device at the standard tolerance, before the stop and after it.
"""

import importlib
import os
from pathlib import Path

import pytest
import torch

from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

EXAMPLES = Path(__file__).absolute().parents[4] / "examples"
FAMILIES = ("nanogpt", "llama", "mixtral")
MOST_LINES, STEPS, LOSS = 60, 8, 1e-5
LAYOUTS = [
    ("nanogpt", "--dp 2 --tp 2 --zero 1"),
    ("nanogpt", "--tp 4 --checkpointing"),
    ("nanogpt", "--dp 2 --pp 2 --zero 2"),
    ("nanogpt", "--dp 2 --tp 2"),
    ("nanogpt", "--tp 2 --no-sequence-parallel"),
    ("llama", "--dp 2 --tp 2 --zero 3"),
    ("llama", "--pp 2 --tp 2 --schedule gpipe --microbatches 2"),
    ("llama", "--dp 4 --zero 3 --checkpointing"),
    ("mixtral", "--ep 2 --tp 2"),
    ("mixtral", "--dp 2 --tp 2 --zero 2"),
]


def _ranks(flags):
    words = flags.split()
    count = 1
    for axis in ("--pp", "--dp", "--ep", "--tp"):
        count *= int(words[words.index(axis) + 1]) if axis in words else 1
    return count


def _pretrain(family, flags, out):
    # The pool's ranks stay: what torchrun says of their number is theirs only for this call.
    os.environ["WORLD_SIZE"], os.environ["RANK"] = (
        str(torch.distributed.get_world_size()), str(torch.distributed.get_rank())
    )  # fmt: skip
    return importlib.import_module(f"{family}.pretrain").main([*flags.split(), "--out", out])


def _losses(family, flags, out, ranks=None):
    first, *others = run_ranks(ranks or _ranks(flags), _pretrain, family, flags, str(out), timeout=300)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("family", FAMILIES)
def test_its_length(family):
    assert len((EXAMPLES / family / "pretrain.py").read_text().splitlines()) <= MOST_LINES


@pytest.fixture(scope="session")
def one_device(tmp_path_factory):
    """By family, the folder of a run on one device, and its losses."""
    runs = {}

    def of(family):
        if family not in runs:
            out = tmp_path_factory.mktemp(family)
            runs[family] = out, _losses(family, f"--steps {STEPS}", out)
        return runs[family]

    return of


@pytest.mark.parametrize(("family", "flags"), slice_of(LAYOUTS, 6))
def test_every_parallelism_by_flag(family, flags, one_device, tmp_path):
    one, wanted = one_device(family)
    found = _losses(family, f"{flags} --steps {STEPS} --against {one}", tmp_path)
    assert wanted[-1] < wanted[0]
    torch.testing.assert_close(found, wanted, rtol=LOSS, atol=0)
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@in_turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_goes_on_under_another_mesh(family, one_device, tmp_path):
    wanted = one_device(family)[1]
    half, there, back = STEPS // 2, tmp_path / "there", tmp_path / "back"
    _losses(family, f"--dp 2 --tp 2 --zero 2 --steps {half}", there)
    found = _losses(family, f"--tp 2 --steps {STEPS} --resume {there}", back)
    torch.testing.assert_close(found, wanted, rtol=LOSS, atol=0)


def test_any_text_file(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("It was the best of times, it was the worst of times. " * 40)
    losses = _losses("nanogpt", f"--data {book} --steps 12 --rate 5e-3", tmp_path / "out")
    assert losses[-1] < losses[0] / 1.5


def test_a_mesh_of_another_size_than_the_world_is_refused(tmp_path):
    def refused():
        import contextlib
        import io

        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            _pretrain("nanogpt", "--dp 2 --tp 2", "nowhere")
        return said.getvalue()

    for said in run_ranks(2, refused):
        assert "--dp 2 x --tp 2 is 4 ranks, and torchrun started 2" in said

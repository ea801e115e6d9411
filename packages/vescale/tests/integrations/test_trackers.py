"""Writers of `vescale.metrics` by other packages: one run, of the first rank, with the values that were told."""

import os

import pytest
import torch

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("vescale")

PLAN = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)


def told(writer, kept=lambda: None):
    """What a training of two steps told, and what is `kept` at its end."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    model, optimizer = vescale.parallelize(PLAN, model, lambda p: torch.optim.AdamW(p, lr=0.1))
    found = []
    with vescale.metrics(model, optimizer, writers=[writer]) as meter:
        for step in range(2):
            loss = model(torch.full((4, 4), 1.0 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(meter.step(loss))
        there = kept()
    return [one.as_dict() for one in found], there


def board(folder):
    return told(vescale.TensorBoard(f"{folder}/{torch.distributed.get_rank()}"))


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="the writer is its")
    (first, _), _ = run_ranks(2, board, str(tmp_path), timeout=120)
    assert os.listdir(tmp_path) == ["0"]
    kept = events.EventAccumulator(str(tmp_path / "0")).Reload()
    for name in ("loss", "gradient_norm", "tokens_per_second"):
        scalars = kept.Scalars(name)
        assert [one.step for one in scalars] == [1, 2]
        assert [one.value for one in scalars] == pytest.approx([one[name] for one in first])
    assert "mfu" not in kept.Tags()["scalars"]  # of a processor that no data sheet is known of


def run(folder):
    import wandb

    summary = lambda: wandb.run and (wandb.run.step, dict(wandb.run.summary))
    found, kept = told(vescale.WandB(project="tests", mode="offline", dir=folder), summary)
    assert wandb.run is None
    return found, kept


def test_wandb(tmp_path):
    pytest.importorskip("wandb", reason="the writer is its")
    (first, (step, kept)), (_, other) = run_ranks(2, run, str(tmp_path), timeout=200)
    assert other is None and len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    assert step >= 2 and all(kept[name] == pytest.approx(first[-1][name]) for name in ("loss", "gradient_norm"))

"""A step's timeline holds what every rank did: modules both ways, each collective with its cause, pipeline actions."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import vescale
from vescale import Boundary, Pipeline, Plan, Replicate, Shard
from vescale._recorded.spans import exposed, lost, straggler, waited
from vescale.cli import app
from vescale.timeline import LANES, read_timeline
from vescale_pipeline import generate
from vescale_testkit import run_ranks, warm_up

warm_up("vescale")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def _loss(output, batch):
    return (output - batch).square().mean()


def _model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def _step(plan, folder):
    """Two steps, the second on the timeline and its collectives counted."""
    model, optimizer = vescale.parallelize(plan, _model(), torch.optim.AdamW, loss_fn=_loss)
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def step():
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    with vescale.timeline(folder, model), vescale.comm_trace(model) as trace:
        loss = step()
    assert step() < loss
    return len(trace), sorted({event.kind for event in trace.events})


TENSOR = Plan(
    mesh={"dp": 2, "tp": 2},
    parameters={"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    boundaries={"*": Boundary(output={"tp": Replicate()})},
    zero=3,
)


def _spans(folder, lane):
    return {rank: [span for span in spans if span["lane"] == lane] for rank, spans in read_timeline(folder).items()}


def test_modules_and_collectives_of_four_ranks(tmp_path):
    counted = run_ranks(4, _step, TENSOR, str(tmp_path))
    assert sorted(read_timeline(tmp_path)) == [0, 1, 2, 3]
    compute, collectives = _spans(tmp_path, "compute"), _spans(tmp_path, "collectives")
    for rank, (count, kinds) in enumerate(counted):
        shown = collectives[rank]
        assert count and len(shown) >= count  # a reduction on gloo takes two calls
        assert sorted({span["name"] for span in shown}) == kinds
        assert all(span["end"] >= span["start"] for span in shown)
        assert {span["about"]["direction"] for span in shown} == {"forward", "backward"}
        assert all(span["about"]["function"] for span in shown)
        along = {"dp": [rank % 2, rank % 2 + 2], "tp": [rank // 2 * 2, rank // 2 * 2 + 1], "dp tp": [0, 1, 2, 3]}
        assert all(span["about"]["ranks"] == along[" ".join(span["about"]["axes"])] for span in shown)
        names = [span["name"] for span in compute[rank]]
        assert names.count("AdamW.step") >= 1
        root = [span for span in compute[rank] if span["name"] == "Sequential"]
        (whole,) = root
        for module in ("0", "0.up", "0.down", "1", "1.up", "1.down"):
            (span,) = [span for span in compute[rank] if span["name"] == module]
            assert whole["start"] <= span["start"] <= span["end"] <= whole["end"]
        (first,) = [span for span in compute[rank] if span["name"] == "1 (backward)"]
        (last,) = [span for span in compute[rank] if span["name"] == "0 (backward)"]
        assert whole["end"] <= first["start"] <= last["start"] <= last["end"]
    merged = json.loads(vescale.merge_timeline(tmp_path).read_text())["traceEvents"]
    assert {row["pid"] for row in merged} == {0, 1, 2, 3}
    assert sum(row["ph"] == "X" for row in merged) == sum(map(len, read_timeline(tmp_path).values()))
    assert min(row["ts"] for row in merged if row["ph"] == "X") == 0


def test_a_pipelines_actions(tmp_path):
    pipeline = Pipeline(cuts=("1",), schedule="1f1b", microbatches=4)
    run_ranks(2, _step, Plan(mesh={"pp": 2}, parameters={"*": {}}, data_axis=None, pipeline=pipeline), str(tmp_path))
    schedule = generate("1f1b", 2, 4)
    for rank, spans in _spans(tmp_path, "pipeline").items():
        assert [span["name"] for span in spans] == [str(action) for action in schedule.actions[rank]]
    shown = json.loads(vescale.merge_timeline(tmp_path, tmp_path / "merged.json").read_text())["traceEvents"]
    lanes = {row["args"]["name"] for row in shown if row["name"] == "thread_name"}
    assert lanes == set(LANES)


def test_the_command_sums_up(tmp_path):
    model = _model()
    with vescale.timeline(tmp_path, model):
        _loss(model(torch.ones(2, 8)), 0.0).backward()
    said = CliRunner().invoke(app, ["timeline", str(tmp_path), "--out", str(tmp_path / "out.json")])
    assert said.exit_code == 0, said.output
    assert "forward" in said.output and "backward" in said.output and (tmp_path / "out.json").exists()
    empty = CliRunner().invoke(app, ["timeline", str(tmp_path / "nothing")])
    assert empty.exit_code == 1 and "holds no rank-*.json" in str(empty.exception)


def _span(lane, name, start, end, **about):
    return {"lane": lane, "name": name, "start": start, "end": end, "about": about}


def _gathered(start, end, line="train.py:3"):
    return _span("collectives", "all_gather", start, end, axes=["dp"], line=line, direction="forward", received=64)


def test_a_collective_is_exposed_but_for_what_ran_beside():
    compute = [
        _span("compute", "waits", 0.0, 9.0, phase="forward", depth=0),  # around it: it waits for it
        _span("compute", "a", 2.0, 4.0, phase="forward", depth=1),
        _span("compute", "a.up", 2.5, 3.0, phase="forward", depth=2),
        _span("compute", "b", 5.0, 6.0, phase="forward", depth=1),
        _span("compute", "late", 7.0, 8.5, phase="forward", depth=1),  # outlasts it
    ]
    assert exposed(_gathered(1.0, 8.0), compute) == pytest.approx(7.0 - 2.0 - 1.0)


def test_who_waited_for_whom_is_named_in_the_command_and_the_trace(tmp_path):
    """Ranks 0 and 1 gather, and apart from them 2 and 3, at the same line: 1 and 2 are late, by much and by little."""
    for rank, late in enumerate((0.0, 0.3, 0.1, 0.0)):
        spans = [_gathered(step + late * step, step + 0.9) for step in range(2)]
        for span in spans:
            span["about"]["ranks"] = [rank // 2 * 2, rank // 2 * 2 + 1]
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "spans": spans}))
    assert list(waited(read_timeline(tmp_path))) == [
        "rank 0 waited 300.00 ms for rank 1, 300.00 ms in all_gather, train.py:3",
        "rank 3 waited 100.00 ms for rank 2, 100.00 ms in all_gather, train.py:3",
    ]
    said = CliRunner().invoke(app, ["timeline", str(tmp_path)]).output
    assert "rank 3 waited 100.00 ms for rank 2" in said and "rank 0 waited 300.00 ms for rank 1" in said
    shown = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = {(row["pid"], row["args"]["waited for"]) for row in shown if "waited for" in row["args"]}
    assert told == {(0, "rank 1, 300.00 ms"), (3, "rank 2, 100.00 ms")}


def test_who_comes_last_is_named():
    ranks = {
        rank: [_gathered(step + 0.5 * (rank == 2), step + 0.75, line=f"train.py:{step % 2}") for step in range(6)]
        for rank in range(3)
    }
    found = lost(ranks)
    assert [found[rank].last for rank in range(3)] == [0, 0, 6] and found[2].met == 6
    assert [found[rank].waiting for rank in range(3)] == pytest.approx([3.0, 3.0, 0.0])
    assert straggler(ranks) == "rank 2 came last to 6 of 6 collectives; the others waited 6000.00 ms"
    assert straggler({0: ranks[0]}) == straggler({0: [], 1: []}) == ""
    by_turns = {rank: [_gathered(step + 0.1 * (step % 2 == rank), step + 0.5) for step in range(6)] for rank in (0, 1)}
    assert straggler(by_turns) == ""

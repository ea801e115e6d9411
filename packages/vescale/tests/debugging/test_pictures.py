"""Pictures of plans, and what `explain` says of the conversions at a plan's boundaries."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


ROWS, COLUMNS = {"tp": vescale.Shard(0)}, {"tp": vescale.Shard(1)}
PARAMETERS = {"*.up.*": ROWS, "*.down.weight": COLUMNS, "*": {}}


def texts(svg: str) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text")]


def test_a_plan_is_drawn_with_a_row_per_kind_of_parameter(tmp_path: Path) -> None:
    plan = vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters=PARAMETERS, zero=3)
    picture = plan.draw(net())
    written = texts(picture.svg)
    assert written[0] == "parameters of Sequential on (dp=2, tp=2)"
    assert "*.up.weight (of 2)  [64, 16]" in written and "*.norm.bias (of 2)  [16]" in written
    at = written.index("*.down.weight (of 2)  [16, 64]")
    assert written[at - 2 : at + 3] == [
        *("ranks 0, 2", "ranks 1, 3", "*.down.weight (of 2)  [16, 64]"),
        *("tp: Shard(1)", "512 of 1,024 elements on a rank"),
    ]
    assert any(one.startswith("zero 3: between uses each of the 2 ranks of dp") for one in written)
    assert picture.save(tmp_path / "plan.svg").read_text(encoding="utf-8") == picture._repr_svg_()


def test_of_a_pipeline_the_ranks_of_a_stage_are_drawn() -> None:
    cut = vescale.Pipeline(cuts=("1",), microbatches=2)
    written = texts(vescale.Plan(mesh={"dp": 2, "pp": 2, "tp": 2}, parameters=PARAMETERS, pipeline=cut).draw(net()).svg)
    assert {"ranks 0, 4", "ranks 1, 5"} <= set(written) and "ranks 2, 3" not in written
    assert any("ranks are those of stage 0" in one and "cut at 1" in one for one in written)


def test_a_plan_that_does_not_fit_is_not_drawn() -> None:
    with pytest.raises(vescale.PlanError, match="matches no"):
        vescale.Plan(mesh={"tp": 2}, parameters={"*.sideways.*": ROWS, "*": {}}).draw(net())


def explained() -> dict[str, str]:
    whole = {"tp": vescale.Replicate()}
    boundaries = {"*.down": vescale.Boundary(output={"tp": vescale.Shard(0)}), "*.norm": vescale.Boundary(output=whole)}
    plan = vescale.Plan(mesh={"tp": 2}, parameters=PARAMETERS, boundaries=boundaries)
    model, _ = vescale.parallelize(plan, net())
    found = {}
    for grad in (True, False):
        with torch.set_grad_enabled(grad), vescale.explaining(model):
            found[f"graph {grad}"] = str(vescale.explain(model[0].down(torch.relu(model[0].up(torch.ones(8, 16))))))
            found[f"norm {grad}"] = str(vescale.explain(model[0](torch.ones(8, 16))))
    return found


def test_what_a_boundary_converts_is_told_with_what_it_sent_and_why() -> None:
    """With a gradient to come, and without one, where no graph knows of it."""
    for said in run_ranks(2, explained):
        for grad in (True, False):
            down = said[f"graph {grad}"].splitlines()
            assert down[0].startswith("[8, 16] S(0) on (tp=2), by 0.down (output boundary)")
            assert re.search(
                r"tp: P -> S\(0\), which 0.down \(output boundary\) asks for; reduce_scatter, \d+ b", down[1]
            )
            assert any("partial: linear sums over what is sharded there" in line for line in down)
            norm = said[f"norm {grad}"].splitlines()
            assert re.search(
                r"tp: S\(0\) -> [RI], which 0.norm \(output boundary\) asks for; all_gather, \d+ b", norm[1]
            )

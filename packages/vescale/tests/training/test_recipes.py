"""Recipes say what may be said, are planned without devices, and their README's figures are the command's."""

from pathlib import Path

import pytest
import torch

import vescale
from vescale._training.config import Config, read_config
from vescale._training.model import build
from vescale._training.planning import foretold, plan_of
from vescale_testkit import in_turns

TOP = Path(__file__).absolute().parents[4]
ROWS = [
    [cell.strip(" `") for cell in line.strip("|").split("|")]
    for line in (TOP / "recipes" / "README.md").read_text().splitlines()
    if line.startswith("| ") and len(line.split("|")) == 8 and "device hours" not in line
]


def test_every_recipe_is_a_configuration_and_has_its_row():
    found = sorted(path.stem for path in (TOP / "recipes").glob("*.toml"))
    for name in found:
        read_config(TOP / "recipes" / f"{name}.toml")
    assert sorted([*(row[0] for row in ROWS), "shakespeare"]) == found


@in_turns(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_figures_are_the_commands(row):
    name, ranks, plan, seconds, gib, hours = row
    told = foretold(read_config(TOP / "recipes" / f"{name}.toml"), int(ranks))
    assert [told.plan, f"{told.seconds:.3g}", f"{told.gib:.1f}", f"{told.device_hours:,.0f}"] == [
        plan,
        seconds,
        gib,
        hours,
    ]
    assert told.summary(2.0).endswith(f"device hours, {told.device_hours * 2:,.0f} at 2 an hour")


@pytest.mark.parametrize(("name", "ranks"), [("shakespeare", 4), ("llama-3.1-8b", 64)])
def test_a_dry_run_of_its_steps_takes_the_memory_that_the_formula_says(name, ranks):
    config = read_config(TOP / "recipes" / f"{name}.toml", ["plan.hardware=h100"])
    told, model = foretold(config, ranks), build(config.model, runs=False)
    plan = plan_of(config, model, ranks)
    tokens = torch.zeros(config.training.batch, config.data.length, dtype=torch.int64, device="meta")
    taken = vescale.dry_run(plan, model, {"input_ids": tokens, "labels": tokens})
    assert plan.world_size == ranks and taken.memory["parameters"] > 0 and taken.flops > 0
    assert taken.peak / 2**30 == pytest.approx(told.gib, rel=0.06)
    kinds = {row.kind for row in taken.collectives}
    assert kinds >= {"all_gather", "reduce_scatter"}


def test_every_entry_is_on_the_page():
    page = (TOP / "docs" / "training.md").read_text()
    for name, field in Config.model_fields.items():
        section = page.partition(f"**`[{name}]`**")[2].partition("\n\n**`[")[0]
        for key, one in field.annotation.model_fields.items():
            assert f"| `{key}` |" in section and f"| {one.description} |" in section, (name, key)

"""Recipes say what may be said, are planned without devices, and their README's figures are the command's."""

from pathlib import Path

import pytest

from vescale._training.config import Config, read_config
from vescale._training.planning import foretold
from vescale_dtensor.testing import in_turns

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


def test_every_entry_is_on_the_page():
    page = (TOP / "docs" / "training.md").read_text()
    for name, field in Config.model_fields.items():
        section = page.partition(f"**`[{name}]`**")[2].partition("\n\n**`[")[0]
        for key, one in field.annotation.model_fields.items():
            assert f"| `{key}` |" in section and f"| {one.description} |" in section, (name, key)

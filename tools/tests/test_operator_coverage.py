"""docs/coverage.md adds up, and says what issue 3 asks of it. (Whether it is up to date: --check.)"""

import re

from sweeps.operator_coverage import HOWS, PAGE, Row, collect, page


def rows_under(text, heading):
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]


def test_the_totals_are_those_of_the_rows():
    text = PAGE.read_text()
    summary = dict(re.findall(r"^\| ([a-z ]+) \| \d+ \| (\d+) \|", text, re.M))
    rows = rows_under(text, "Every entry")
    raising = re.findall(r"^\| `", text.split("## Entries that raise")[1].split("\n## ")[0], re.M)
    for how in HOWS:
        counted = len(raising) if how == "raises" else sum(row[1] == how for row in rows)
        assert int(summary[how]) == counted, how
    assert int(summary["all"]) == len(rows) + len(raising)


def test_as_many_are_native_and_free_as_promised():
    swept = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", PAGE.read_text(), re.M))
    assert int(swept["native"]) >= 450
    assert int(swept["no collective"]) >= 400


def test_a_row_says_what_the_cheapest_and_the_costliest_sample_moved():
    free = Row("add", "native", least=(), most=("all_gather", "all_gather"))
    assert free.free
    assert free.cells() == ("`add`", "native", "none", "2 all_gather", "")
    gathered = Row("svd", "gather", least=("all_gather",), most=("all_gather",), functions=("svd",))
    assert not gathered.free
    assert gathered.cells() == ("`svd`", "gather", "all_gather", "", "svd")


def test_an_error_is_listed_with_its_reason():
    text = page([Row("lu", "raises", why="OperatorError: no")], [])
    assert "| `lu` | OperatorError: no |" in text


def test_entries_are_answered_as_the_page_has_them():
    found = {row.name: (row.how, row.functions) for row in collect(["add", "histogram", "histc"])}
    assert found == {"add": ("native", ()), "histogram": ("gather", ("histogram",)), "histc": ("partly", ("histc",))}

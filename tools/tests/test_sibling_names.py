"""What a package that is a minor version older imports of its siblings is still there; a name that is gone is told."""

import json

import pytest

from checks.sibling_names import NOTED, TOP, gone, is_there, used
from package_tree import read_packages

RELEASES = json.loads(NOTED.read_text())


def test_nothing_that_older_siblings_import_is_gone():
    """Until 0.1 is released: `python tools/checks/sibling_names.py --note 0.1`, with a line in the CHANGELOG."""
    assert list(gone(RELEASES)) == []


def test_each_package_of_each_release_is_noted():
    distributions = {package.distribution for package in read_packages(TOP)}
    for release, by_package in RELEASES.items():
        assert set(by_package) == distributions, release
        assert "vescale_dtensor.engine.layout_of" in by_package["vescale-plans"]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("vescale_dtensor", True),
        ("vescale_dtensor.engine", True),
        ("vescale_dtensor.engine.layout_of", True),
        ("vescale_dtensor.engine.nothing", False),
        ("vescale_dtensor.nothing", False),
        ("nothing", False),
    ],
)
def test_a_name_that_is_gone_is_told(name, there):
    assert is_there(name) is there
    told = [] if there else [f"{name}: vescale-plans of 0.1 imports it"]
    assert list(gone({"0.1": {"vescale-plans": [name]}})) == told


def test_names_are_those_of_siblings_alone():
    packages = read_packages(TOP)
    by_name = {package.name: used(package, packages) for package in packages}
    assert by_name["trace"] == []
    assert all(name.startswith("vescale_trace.") for name in by_name["dtensor"] + by_name["pipeline"])
    assert all(name.startswith(("vescale_dtensor.", "vescale_trace.")) for name in by_name["rng"])

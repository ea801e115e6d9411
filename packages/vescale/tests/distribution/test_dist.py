"""What goes to an index is whole, and enough for somebody who has nothing else."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

import newcomer
from make_dist import DistError, check_wheel, make_dist
from package_tree import read_packages
from vescale_testkit import in_turns

TOP = Path(__file__).absolute().parents[4]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages, copied: a build leaves nothing in this tree, and reads files rather than Bazel's links."""
    top = tmp_path_factory.mktemp("source")
    shutil.copytree(TOP / "packages", top / "packages", ignore=shutil.ignore_patterns("__pycache__", ".*", "tests"))
    return read_packages(top)


def test_every_package_has_the_licence_of_the_repository():
    for package in read_packages(TOP):
        assert (package.folder / "LICENSE").read_bytes() == (TOP / "LICENSE").read_bytes()


def test_a_wheel_without_its_licence_is_told(packages, tmp_path):
    shutil.copytree(packages[0].folder.parent, tmp_path / "packages")
    (package,) = (found for found in read_packages(tmp_path) if found.name == "rng")
    project = package.folder / "pyproject.toml"
    project.write_text(project.read_text().replace('license-files = ["LICENSE"]', "license-files = []"))
    with pytest.raises(DistError, match=r"lacks .*licenses/LICENSE"):
        make_dist(tmp_path / "dist", [package], wheels_only=True)


def test_from_the_source_archives_come_whole_wheels(packages, tmp_path):
    chosen = [package for package in packages if package.name in ("rng", "vescale")]
    wheels = make_dist(tmp_path, chosen)
    for package, wheel in zip(chosen, wheels, strict=True):
        check_wheel(package, wheel)
    assert len(list(tmp_path.glob("*.tar.gz"))) == len(chosen)


def test_extras_that_pages_and_errors_name_exist():
    pages = [*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md"), *(TOP / "packages/vescale/src").rglob("*.py")]
    named = {name for page in pages for name in re.findall(r"vescale\[(\w+)\]", page.read_text())}
    project = tomllib.loads((TOP / "packages/vescale/pyproject.toml").read_text())["project"]
    assert {"hf", "train", "notebook"} <= named <= set(project["optional-dependencies"])


@in_turns(3)
def test_a_newcomer_gets_from_wheels_to_generated_text(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    assert newcomer.walk(tmp_path)["wheels"] == len(read_packages(TOP)) - 1  # without the test kit

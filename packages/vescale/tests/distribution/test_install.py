"""Each package installs with the siblings it names into an empty environment, offline, and works there."""

import shutil
from pathlib import Path

import pytest

from checks.check_layers import next_minor
from fresh_install import InstallError, fresh_install, siblings
from package_tree import read_packages
from vescale_testkit import in_turns

TOP = Path(__file__).absolute().parents[4]
NAMES = [package.name for package in read_packages(TOP)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages, copied: a build leaves nothing in this tree, and reads files rather than Bazel's links."""
    top = tmp_path_factory.mktemp("source")
    caches = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(TOP / "packages", top / "packages", ignore=caches)
    return read_packages(top)


@in_turns(3)
@pytest.mark.parametrize("name", NAMES)
def test_it_installs_and_works(packages, name, tmp_path):
    (package,) = (found for found in packages if found.name == name)
    fresh_install(package, packages, folder=tmp_path, offline=True)


@in_turns(3)
def test_an_import_that_is_not_required_is_caught(packages, tmp_path):
    """The check itself is checked: a package that uses a sibling it does not name does not pass."""
    sources = tmp_path / "source" / "packages"
    shutil.copytree(packages[0].folder.parent, sources)
    changed = read_packages(tmp_path / "source")
    (pipeline,) = (found for found in changed if found.name == "pipeline")
    with (pipeline.source / "__init__.py").open("a") as module:
        module.write("import vescale_rng\n")
    with pytest.raises(InstallError, match="No module named 'vescale_rng'"):
        fresh_install(pipeline, changed, folder=tmp_path / "environment", offline=True)


def released(packages, versions, folder):
    """The packages once more, under other versions."""
    shutil.copytree(packages[0].folder.parent, folder / "packages")
    for package in read_packages(folder):
        if package.name in versions:
            (package.source / "_version.py").write_text(f'__version__ = "{versions[package.name]}"\n')
    return {package.name: package for package in read_packages(folder)}


@in_turns(3)
@pytest.mark.parametrize(
    ("installed", "older"), [("plans", "plans"), ("plans", "rng"), ("checkpoint", "dtensor"), ("vescale", "pipeline")]
)
def test_one_package_a_minor_version_older_works_beside_newer_ones(packages, installed, older, tmp_path):
    """That what it imports of them is still there, `sibling_names.py` sees to."""
    versions = {package.name: next_minor(package.version) for package in packages if package.name != older}
    found = released(packages, versions, tmp_path / "source")
    assert found[older].version != found["vescale"].version
    fresh_install(found[installed], list(found.values()), folder=tmp_path / "environment", offline=True)


@pytest.mark.parametrize("version", ["0.0.9", "0.3.0"])
def test_a_sibling_that_is_too_old_or_too_new_is_refused_by_name(packages, tmp_path, version):
    found = released(packages, {"dtensor": version}, tmp_path / "source")
    with pytest.raises(InstallError, match=f"Cannot install vescale-dtensor {version}.* and vescale-plans"):
        fresh_install(found["plans"], list(found.values()), folder=tmp_path / "environment", offline=True)


def test_the_siblings_are_those_named_and_theirs(packages):
    named = {package.name: {found.name for found in siblings(package, packages)} for package in packages}
    assert named["trace"] == set()
    assert named["dtensor"] == named["pipeline"] == {"trace"}
    assert named["plans"] >= {"dtensor"}
    assert named["vescale"] == set(NAMES) - {"vescale", "testkit"}

"""The documentation builds from this tree without a warning, and a link that leads nowhere is one."""

import shutil
from pathlib import Path

import pytest

from draw_pages import FOLDER, PICTURES, nodes
from make_docs import TOP, build, public_names
from package_tree import read_packages


def test_the_site(tmp_path):
    assert build(tmp_path) == 0
    for package in read_packages(TOP):
        assert (tmp_path / "api" / f"{package.module}.html").is_file()
    page = (tmp_path / "api/vescale.html").read_text()
    documented = [name for name, value in public_names("vescale").items() if callable(value)]
    assert documented
    assert [name for name in documented if name not in page] == []


@pytest.mark.parametrize(
    ("text", "status"),
    [("[it](design.md)", 0), ("[it](nowhere.md)", 1), ("[it](design.md#nothing-of-this-name)", 1)],
)
def test_links(tmp_path, text, status):
    site = tmp_path / "tree/docs/site"
    site.mkdir(parents=True)
    for name in ("conf.py", "pages.css"):
        shutil.copy(TOP / "docs/site" / name, site)
    Path(site, "index.md").write_text("# It\n\n```{toctree}\n:glob:\n\ndocs/*\nCONTRIBUTING\n```\n")
    (tmp_path / "tree/docs/README.md").write_text(f"# Read\n\n{text}\n")
    (tmp_path / "tree/CONTRIBUTING.md").write_text("# Add\n")
    (tmp_path / "tree/docs/design.md").write_text("# Design\n")
    assert build(tmp_path / "out", top=tmp_path / "tree") == status


def test_pictures_are_those_that_the_tool_draws(tmp_path):
    """What the others show is measured, or of the machine."""
    assert sorted(path.stem for path in FOLDER.glob("*")) == sorted(PICTURES)
    assert (FOLDER / "nodes.svg").read_text() == nodes(tmp_path)

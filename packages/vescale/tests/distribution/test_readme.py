"""Every Python block of every README and guide runs, in one process and without torchrun; pictures are up to date."""

import os
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from readme_blocks import readme_program
from vescale_testkit import run_ranks, warm_up
from vescale_testkit.worker_pool import pool

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

TOP = Path(__file__).absolute().parents[4]
PAGES = ("choosing", "cluster", "coming-from", "debugging", "ecosystem", "elastic")
GUIDES_AT_TOP = [TOP / name for name in ("CONTRIBUTING.md", *(f"docs/{page}.md" for page in PAGES))]
HOME = TOP / "docs/site/index.md"  # make_docs.py lays it at the top
GUIDES = [HOME, *GUIDES_AT_TOP, *sorted(TOP.glob("docs/concepts/*.md"))]
READMES = [TOP / "README.md", *sorted(TOP.glob("packages/*/README.md")), *GUIDES]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.core
@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.relative_to(TOP).as_posix())
def test_its_blocks_run(readme, tmp_path):
    program = tmp_path / "readme.py"
    program.write_text(readme_program(readme))
    if "run_ranks(" not in program.read_text():
        try:
            run_ranks(1, shown, str(program), timeout=300)
        finally:
            pool.end(1, "cpu")  # the next page has a process of its own
        return
    run = subprocess.run(  # a rank of the pool starts none
        [sys.executable, "-W", "error::DeprecationWarning:__main__", program],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"{readme.relative_to(TOP)}:\n{run.stdout}{run.stderr}"


def shown(program):
    """Runs a program as a script that nobody has started under torchrun, in a process that has imported libraries."""
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    os.chdir(os.path.dirname(program))
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = program
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
        exec(compile(Path(program).read_text(), program, "exec"), vars(main))


def test_a_skipped_block_says_why_and_lines_keep_their_numbers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("Title\n```python\na = 1\n```\n<!-- not run: no reason -->\n```python\nb = 2\n```\n```\nc\n```\n")
    assert readme_program(readme).splitlines() == ["", "", "a = 1", *[""] * 8]


LINKING = [*READMES, *(TOP / "docs" / name for name in ("README.md", "evidence.md", "limits.md"))]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(TOP).as_posix())
def test_its_links_lead_somewhere(page):
    links = LINK.findall(page.read_text())
    folder = TOP if page == HOME else page.parent
    missing = [link for link in links if not (folder / link).exists()]
    assert not missing


def test_what_shows_each_claim_is_there():
    """The last column of the table of evidence: commands, of files and targets that exist."""
    table = (TOP / "docs/evidence.md").read_text().partition("| | measured | shown by |")[2].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    targets = set(re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE))
    assert len(rows) > 20
    for claim, _, shown in rows:
        commands = re.findall(r"`((?:pytest|python|make) [^`]+)`", shown)
        assert commands, claim
        for program, *words in map(str.split, commands):
            if program == "make":
                assert words[0] in targets, claim
            else:
                files = [word for word in words if "/" in word]
                assert files and all((TOP / file).exists() for file in files), claim


def test_pictures_of_conversions_are_what_the_design_says():
    said = subprocess.run(
        [sys.executable, TOP / "tools/draw_conversions.py", "--check"], capture_output=True, text=True, timeout=300
    )
    assert said.returncode == 0, said.stdout

"""The tutorial is run from its own text: its program, what it says that a person types, and what that shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

from readme_blocks import readme_program
from vescale_testkit import in_turns

PAGE = Path(__file__).absolute().parents[4] / "docs/find-the-bug.md"
TYPED = re.compile(r"^(\(rank 0 of 8\) )(.*)\n", re.MULTILINE)


@in_turns(3)
def test_the_bug_is_found_as_the_page_tells(tmp_path: Path) -> None:
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    program = tmp_path / "find_the_bug.py"
    program.write_text(readme_program(PAGE))  # with the page's own line numbers
    run = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        input="".join(f"{line}\n" for _, line in TYPED.findall(shown)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.replace(f"{tmp_path}/", "") == TYPED.sub(r"\1", shown)  # a pipe does not show what is typed

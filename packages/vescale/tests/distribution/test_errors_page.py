"""docs/errors.md has a section for every error and warning that `vescale` names, and quotes what is raised."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vescale
from vescale_testkit import in_turns

PAGE = Path(__file__).absolute().parents[4] / "docs" / "errors.md"
HEADING = re.compile(r"^## (\w+)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)\n```$(?:\n\n^```text\n(.*?)\n```$)?", re.MULTILINE | re.DOTALL)
PROGRAM = """
{prelude}
try:
{body}
except Exception as error:
    print(type(error).__name__)
    print(error)
"""


def sections():
    """Name -> text, of what stands above the core."""
    parts = HEADING.split(PAGE.read_text().partition("\n# Above the core\n")[2])
    return parts[0], dict(zip(parts[1::2], parts[2::2]))


def test_every_error_and_warning_has_its_section():
    named = {name for name, one in vars(vescale).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert named == set(HEADING.findall(PAGE.read_text()))


_, ABOVE = sections()
EXAMPLES = [(name, at) for name, text in ABOVE.items() for at in range(len(BLOCK.findall(text)))]


@in_turns(3)
@pytest.mark.parametrize(("name", "at"), EXAMPLES)
def test_an_example_raises_what_is_quoted(name, at, tmp_path):
    """Each in a process of its own, as its reader runs it."""
    introduction, texts = sections()
    ((prelude, _),) = BLOCK.findall(introduction)
    body, quoted = BLOCK.findall(texts[name])[at]
    program = PROGRAM.format(prelude=prelude, body="".join(f"    {line}\n" for line in body.splitlines()))
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    kind, _, message = run.stdout.strip().partition("\n")
    assert issubclass(getattr(vescale, kind), getattr(vescale, name)), run.stdout
    assert not quoted or message.replace(str(tmp_path), "/runs") == quoted

"""The Python that READMEs show, so that it can be run: a README is a test.

A block is skipped where the line before it says why: `<!-- not run: needs a GPU -->`. The blocks of one README are one
program, run in their order in one process.
"""

import re
from pathlib import Path

_BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]+ -->\n)?^```python\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)


def readme_program(readme: Path) -> str:
    """The blocks to run, as one program whose line numbers are those of the README."""
    text = readme.read_text()
    lines = [""] * len(text.splitlines())
    for block in _BLOCK.finditer(text):
        if block["skip"] is None:
            start = text.count("\n", 0, block.start("source"))
            source = block["source"].splitlines()
            lines[start : start + len(source)] = source
    return "\n".join(lines) + "\n"

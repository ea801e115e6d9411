"""Figures of a script beside asv.conf.json, whose last line is JSON: ASV only reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).absolute().parents[2]


def said(script: str, *options: str, timeout: float = 400) -> Any:
    """Runs it. Its exit status, which tells of budgets, does not count: budgets are the gate's."""
    command = [sys.executable, str(SCRIPTS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError(f"{script} printed no figures:\n{done.stderr[-2000:]}") from None

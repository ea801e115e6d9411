"""`benchmarks/peers.py` runs beside torch's own parallelism, and all contenders train one model. How fast is its own
business: nothing here looks at times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vescale_testkit import in_turns

SCRIPT = Path(__file__).absolute().parents[4] / "benchmarks/peers.py"


@in_turns(3)
@pytest.mark.parametrize("case", ["replicated", "sharded", "tensor", "1f1b", "interleaved", "checkpoint", "context"])
def test_the_short_form_runs(case):
    done = subprocess.run([sys.executable, SCRIPT, case, "--short"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures
    for rows in figures.values():  # the peer is the first, and beside it stands ours as it comes by default
        assert len(rows) > 1 and rows["ours"]["ms"] > 0

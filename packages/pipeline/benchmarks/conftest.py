"""Makes the suite's modules (`benchmarks/benchmarks/`) importable."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture
def quiet():
    """What a race does for itself: one thread, no garbage collection."""
    from benchmarks.cases._pairwise import quiet

    with quiet():
        yield

"""Makes the suite's modules (`benchmarks/benchmarks/`) importable, and joins a fake group of 8."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


@pytest.fixture(scope="session")
def mesh():
    from benchmarks.cases._fake_group import fake_mesh

    with fake_mesh() as mesh:
        yield mesh


@pytest.fixture
def quiet():
    """What a race does for itself: one thread, no garbage collection."""
    from benchmarks.cases._pairwise import quiet

    with quiet():
        yield

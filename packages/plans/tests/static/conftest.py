"""How many regions ran: what tests of static mode count."""

import types

import pytest

from vescale_plans._static.static_region import Region


@pytest.fixture
def regions(monkeypatch):
    counted = types.SimpleNamespace(count=0)
    run = Region.run

    def counting(self, *args):
        counted.count += 1
        return run(self, *args)

    monkeypatch.setattr(Region, "run", counting)
    return counted

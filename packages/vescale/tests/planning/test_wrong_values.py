"""Wrong values, of the environment and of calls: each ends, at once, in an error of ours that names what is wrong."""

import itertools
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import vescale
from vescale_pipeline import generate

HUGE = 10**30
WRONG = [-1, 0, HUGE, 2**31, 1.5, float("nan"), float("inf"), "8", "", None, True, [], {}, torch.ones(2), object()]


def counts():
    """(call, value) for each argument that is a number of something."""
    model, sample = nn.Linear(4, 4), torch.ones(2, 4)
    planned = {"world_size": 2, "batch": 4, "sample": sample}
    for name, value in itertools.product(("world_size", "batch", "seq"), WRONG):
        if name == "seq" and value is None:
            continue
        yield f"generate_plan {name}", value, lambda n=name, v=value: vescale.generate_plan(model, **{**planned, n: v})
    for value in WRONG:
        if value is not None and not isinstance(value, dict):
            yield "generate_plan constraints", value, lambda v=value: vescale.generate_plan(model, v, **planned)
    for name, value in itertools.product(("ranks", "microbatches", "virtual"), WRONG):
        given = {"ranks": 2, "microbatches": 4, "virtual": 2}
        yield f"generate {name}", value, lambda g=given, n=name, v=value: generate("interleaved", **{**g, n: v})
    for value in WRONG:
        yield "generate kind", value, lambda v=value: generate(v, 2, 4)


@pytest.mark.parametrize(
    ("call", "value", "act"),
    list(counts()),
    ids=lambda one: ascii(one).partition(" at 0x")[0][:24] if not callable(one) else "",
)
def test_a_wrong_value_is_a_typed_error(call, value, act):
    began = time.monotonic()
    with pytest.raises(vescale.VescaleError) as caught:
        act()
    assert time.monotonic() - began < 30
    assert call.rpartition(" ")[2] in str(caught.value) or call == "generate kind"


def test_a_wrong_variable_is_named(monkeypatch):
    from vescale.doctor import examine

    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(vescale.VescaleError, match=r"^WORLD_SIZE: 'abc', in the environment"):
        examine()


def test_a_wrong_variable_does_not_keep_the_package_from_being_imported(monkeypatch):
    monkeypatch.setenv("VESCALE_CHECKPOINT_PATIENCE_S", "5m")
    code = (
        "import torch, vescale, torch.distributed as dist\n"
        "from vescale_checkpoint.sync._presence import Presence\n"
        "try: Presence(None, 0, 1)\n"
        "except vescale.VescaleError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.startswith("VESCALE_CHECKPOINT_PATIENCE_S: '5m', in the environment"), ran.stderr[-2000:]

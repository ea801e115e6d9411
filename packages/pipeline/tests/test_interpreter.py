"""What the interpreter does where tensors do not lie on the CPU; the rest of it is tested by running pipelines."""

import pytest
import torch

from vescale_pipeline._runtime import interpreter
from vescale_pipeline._runtime.interpreter import _like, _Random
from vescale_pipeline._transport.p2p import Part


def test_what_stands_for_a_gradient_lies_on_the_pipelines_device():
    told, device = Part((2, 3), (3, 1), torch.float32, False), torch.device("meta")
    (nothing,) = _like((told,), (None,), [None], "B", 0, device)
    (turned,) = _like((told,), (told._replace(stride=(1, 2)),), [torch.ones(3, 2).t()], "F", 1, device)
    assert nothing.device == turned.device == device and turned.stride() == (3, 1)


def test_random_numbers_off_the_cpu_are_told_to_be_others(monkeypatch):
    monkeypatch.setattr(interpreter, "states", lambda device: ())  # meta has no generator
    with pytest.warns(UserWarning, match="on meta may not be those of one device"):
        _Random(torch.device("meta"))

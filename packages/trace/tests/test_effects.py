"""What a run draws on the host is taken back, and told by module."""

import random

import numpy
import pytest
import torch

from vescale_trace.effects import host_generators_kept, python_states


def drawn():
    return torch.rand(2).tolist(), random.random(), numpy.random.rand(2).tolist(), numpy.random.randn()


@pytest.mark.parametrize("raises", [False, True])
def test_generators_of_the_host_are_as_they_were(raises):
    numpy.random.seed(0)
    random.gauss(0, 1)  # Python keeps its second number
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    first = drawn()
    for set_state, state in zip((torch.set_rng_state, random.setstate, numpy.random.set_state), states):
        set_state(state)
    with pytest.raises(KeyError) if raises else host_generators_kept(), host_generators_kept():
        drawn()
        if raises:
            raise KeyError
    assert drawn() == first


@pytest.mark.parametrize("name", ["random", "numpy.random"])
def test_a_draw_is_told_by_module(name):
    before = python_states()
    assert python_states() == before
    random.random() if name == "random" else numpy.random.rand()
    after = python_states()
    assert [one for one in after if after[one] != before[one]] == [name]

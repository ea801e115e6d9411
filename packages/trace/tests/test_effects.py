"""Effects of a run are told and taken back: what it leaves in a model, and what it draws on the host."""

import random
from collections import defaultdict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from vescale_trace.effects import Kept, Slot, host_generators_kept, python_states


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


class Totals:
    def __init__(self):
        self.parts, self.inner, self.weight = [], {"deep": [torch.zeros(2)]}, nn.Parameter(torch.ones(1))


class Inner(nn.Module):
    def __init__(self, totals):
        super().__init__()
        self.totals, self.tokens, self.calls, self.names = totals, {1}, 0, defaultdict(list, a=[1])
        self.plain, self.queue, self.pair = torch.arange(3.0), deque([1], maxlen=2), (1, [2])
        self.register_buffer("average", torch.ones(2))
        self.loop = [0]
        self.loop.append(self.loop)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Inner(Totals())
        self.second = Inner(SimpleNamespace(of=[self.first.totals]))


CHANGES = {
    "a number": lambda m: setattr(m.first, "calls", 1),
    "a new attribute": lambda m: setattr(m.first, "fresh", 1),
    "an attribute less": lambda m: delattr(m.first, "calls"),
    "a list": lambda m: setattr(m.first, "pair", [3]),
    "a list in a tuple": lambda m: m.first.pair[1].append(3),
    "a set": lambda m: m.first.tokens.add(2),
    "a deque": lambda m: m.first.queue.extend([2, 3]),
    "a dict of lists": lambda m: m.first.names["a"].append(2),
    "an entry": lambda m: m.first.names["b"],
    "an object": lambda m: m.first.totals.parts.append(1),
    "what an object holds": lambda m: m.first.totals.inner["deep"].append(2),
    "a buffer in its place": lambda m: setattr(m.first, "average", torch.zeros(2)),
    "a buffer of another size": lambda m: setattr(m.first, "average", torch.zeros(3)),
    "a buffer less": lambda m: delattr(m.first, "average"),
    "a list that holds itself": lambda m: m.first.loop.append(1),
}
NAMES = {
    "a number": "calls", "an attribute less": "calls", "a new attribute": "fresh", "a list": "pair",
    "a list in a tuple": "pair", "a set": "tokens", "a deque": "queue", "a dict of lists": "names",
    "an entry": "names", "an object": "totals.parts", "what an object holds": "totals.inner",
    "a buffer in its place": "average", "a buffer of another size": "average", "a buffer less": "average",
    "a list that holds itself": "loop",
}  # fmt: skip


def state(value, seen=()):
    """Everything that a model leads to, as it can be compared, with the objects that hold it."""
    if isinstance(value, torch.Tensor):
        return id(value), value.shape, value.tolist()
    if id(value) in seen or value is None or isinstance(value, (int, str)):
        return id(value)
    seen = (*seen, id(value))
    if isinstance(value, (list, tuple, deque, set)):
        return id(value), [state(one, seen) for one in value]
    if isinstance(value, dict):
        return id(value), [(key, state(one, seen)) for key, one in value.items()]
    return id(value), sorted((key, state(one, seen)) for key, one in vars(value).items())


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_run_leaves_is_told_and_taken_back(name):
    model = Outer()
    before, kept = state(model), Kept(model)
    assert kept.changed() == [] == kept.refilled()
    CHANGES[name](model)
    names = [slot.name for slot in kept.changed()]
    assert names == [f"first.{NAMES[name]}"]
    assert {slot.name for slot in kept.refilled()} <= set(names)
    assert kept.changed(model.second) == ([slot for slot in kept.changed() if "totals" in slot.name])
    kept.restore()
    assert kept.changed() == [] and state(model) == before


@pytest.mark.parametrize("write", ["add_", "data", "resize"])
def test_tensors_of_all_kinds_of_places_have_their_values_again(write):
    model = Outer()
    tensors = [model.first.average, model.second.plain, model.first.totals.inner["deep"][0]]
    weight, kept, before = model.first.totals.weight, Kept(model), [one.clone() for one in tensors]
    for one in (*tensors, weight):
        with torch.no_grad():
            if write == "add_":
                one += 1
            else:
                one.data = torch.full((2 if write == "data" else 5,), 7.0)
    names = ["first.average", "first.totals.inner", "second.plain"]
    assert sorted(slot.name for slot in kept.written()) == names and kept.changed() == []
    kept.restore()
    assert all(map(torch.equal, tensors, before)) and not torch.equal(weight, torch.ones(1))


def test_versions_tell_writes_without_copies():
    model = Outer()
    model.first.meta = torch.zeros(2, device="meta")
    kept = Kept(model, copies=False)
    assert kept.written() == []
    model.first.meta += 1
    model.first.average += torch.nan
    model.first.calls = 1
    assert [slot.name for slot in kept.written()] == ["first.calls", "first.meta", "first.average"]


def test_arrays_and_all_but_buffers_are_taken_back():
    model = Outer()
    model.first.array, model.first.average[0] = numpy.arange(3.0), torch.nan
    kept = Kept(model)
    assert kept.written() == []
    model.first.array[1] = 7
    model.first.average[1] = 2
    assert {slot.name for slot in kept.written()} == {"first.array", "first.average"}
    kept.restore(buffers=False)
    assert model.first.array.tolist() == [0, 1, 2] and model.first.average[1] == 2
    kept.restore()
    assert model.first.average[1] == 1


def test_hooks_that_a_run_registers_go_with_its_note_of_it():
    model = Outer()
    own = [model.first.register_forward_hook(lambda *_: None), model.register_forward_pre_hook(print)]
    kept = Kept(model)
    for module in model.modules():
        module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
        module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    model.first.are_hooked = True
    own[1].remove()
    kept.restore()
    assert list(model.first._forward_hooks) == [own[0].id] and not hasattr(model.first, "are_hooked")
    tables = [value for one in model.modules() for name, value in vars(one).items() if "_hooks" in name]
    assert sum(map(len, tables)) == 1


def test_attributes_that_are_not_looked_at():
    model = Outer()
    kept = Kept(model, ["calls"])
    model.first.calls = 3
    kept.restore()
    assert model.first.calls == 3


def test_a_slot_fills_the_container_that_is_there():
    model = Outer()
    parts, slot = model.first.totals.parts, Slot(model.first.totals, "parts", "parts")
    slot.put([1, 2])
    assert model.first.totals.parts is parts and parts == [1, 2]
    nothing = Slot(model, "none", "none").get()
    slot.put(nothing)
    assert not hasattr(model.first.totals, "parts") and slot.get() is nothing

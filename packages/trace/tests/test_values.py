"""The walker of containers: every kind is walked, mapped and copied, and stays of its class."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vescale_trace.values import copied, fill, leaves, map_first, map_tensors, named, parts, refill, same, tensors_in

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Mutable:
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    first: Any
    second: Any


@dataclass
class Derived:
    first: Any
    second: Any
    both: Any = field(init=False)

    def __post_init__(self) -> None:
        self.both = [self.first, self.second]
        self.beside = self.first


class Listed(list):
    """A list whose constructor takes something else."""

    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)
        self.name = name


class Output(OrderedDict):
    """Attributes and keys are one, as in HuggingFace's ModelOutput."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__.update(self)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Batch(UserDict):
    """As HuggingFace's BatchEncoding."""


def extreme() -> Any:
    return torch.return_types.max((ONE, TWO))


KINDS = {
    "tuple": lambda: (ONE, TWO),
    "list": lambda: [ONE, TWO],
    "dict": lambda: {"first": ONE, "second": TWO},
    "keys of any kind": lambda: {3: ONE, (4, 5): TWO},
    "OrderedDict": lambda: OrderedDict(first=ONE, second=TWO),
    "defaultdict": lambda: defaultdict(list, first=ONE, second=TWO),
    "output of a model": lambda: Output(first=ONE, second=TWO),
    "UserDict": lambda: Batch(first=ONE, second=TWO),
    "namedtuple": lambda: Pair(ONE, TWO),
    "torch's named results": extreme,
    "deque": lambda: deque([ONE, TWO], maxlen=2),
    "list with another constructor": lambda: Listed("x", [ONE, TWO]),
    "slice": lambda: slice(ONE, TWO, None),
    "dataclass": lambda: Mutable(ONE, TWO),
    "frozen dataclass": lambda: Frozen(ONE, TWO),
    "dataclass with slots": lambda: Slotted(ONE, TWO),
    "nested": lambda: [(), {"a": (ONE,)}, Mutable(Pair("text", TWO), None)],
}


def shown(value: Any) -> Any:
    """The value in plain containers, with classes."""
    if isinstance(value, Tensor) or parts(value) is None:
        return float(value) if isinstance(value, Tensor) else value
    return type(value), {key: shown(item) for key, item in parts(value).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_walked_and_mapped_alike(kind):
    value = KINDS[kind]()
    before = shown(value)
    assert [id(tensor) for tensor in tensors_in(value)] == [id(ONE), id(TWO)]
    assert [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)] == [ONE, TWO]
    assert map_tensors(value, lambda tensor: tensor) is value
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert type(doubled) is type(value) and [float(tensor) for tensor in tensors_in(doubled)] == [2.0, 4.0]
    assert [float(tensor) for tensor in tensors_in(map_first(value, lambda tensor: tensor + 8))] == [9.0, 2.0]
    assert shown(fill(doubled, [ONE, TWO])) == before == shown(value)
    again = copied(value)
    assert again is not value and shown(again) == before and tensors_in(again)[0] is ONE


@pytest.mark.parametrize(
    "leaf",
    [None, 3, "text", nn.Linear(1, 1), {1}, Mutable, range(2), object()],
    ids=lambda one: str(one).partition(" at 0x")[0],
)
def test_leaves_are_the_same_objects(leaf):
    assert list(leaves(leaf)) == [leaf] and tensors_in(leaf) == [] and copied(leaf) is leaf
    assert map_tensors([leaf, ONE], lambda tensor: TWO)[0] is leaf


def test_what_a_container_keeps_beside_its_parts_stays():
    listed = map_tensors(Listed("x", [ONE]), lambda tensor: TWO)
    assert listed.name == "x"
    assert map_tensors(defaultdict(list, a=ONE), lambda tensor: TWO).default_factory is list
    assert map_tensors(deque([ONE], maxlen=5), lambda tensor: TWO).maxlen == 5
    output = map_tensors(Output(first=ONE), lambda tensor: TWO)
    assert output.first is TWO and output["first"] is TWO


def test_what_a_dataclass_derives_is_mapped_with_its_fields():
    derived = map_tensors(Derived(ONE, TWO), lambda tensor: tensor * 2)
    assert [float(one) for one in (derived.first, derived.second, *derived.both, derived.beside)] == [2, 4, 2, 4, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_the_same_are_the_same(kind):
    value = KINDS[kind]()
    assert same(value, KINDS[kind]()) and same(value, copied(value))
    assert not same(value, map_tensors(value, lambda tensor: tensor.clone())) and not same(value, None)


def test_numbers_and_texts_are_the_same_by_value():
    assert same({"a": [1, "x", {2}]}, {"a": [1, "x", {2}]})
    for one, other in (([1], [True]), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ({1}, {2}), (object(), object())):
        assert not same(one, other)


def test_a_class_of_containers_may_be_a_leaf():
    pair = Pair(ONE, TWO)
    assert list(leaves([pair, 3], atoms=Pair)) == [pair, 3]


def test_places_have_names():
    found = [(name, leaf) for name, leaf in named({"a": [ONE, Pair(TWO, 3)]}, "x")]
    assert [name for name, _ in found] == ["x.a.0", "x.a.1.0", "x.a.1.1"] and found[2][1] == 3


def test_only_what_changes_is_made_anew():
    kept, changed = [ONE], [TWO]
    new = map_tensors((kept, changed), lambda tensor: tensor if tensor is ONE else tensor + 1)
    assert new[0] is kept and new[1] is not changed and changed == [TWO]


MUTABLE = ("list", "dict", "keys of any kind", "OrderedDict", "defaultdict", "output of a model", "UserDict", "deque")


@pytest.mark.parametrize("kind", (*MUTABLE, "list with another constructor", "dataclass"))
def test_containers_are_filled_in_place(kind):
    value, wanted = KINDS[kind](), KINDS[kind]()
    refill(value, dict.fromkeys(parts(value), TWO))
    assert tensors_in(value) == [TWO, TWO] and type(value) is type(wanted)
    refill(value, parts(wanted))
    assert shown(value) == shown(wanted)


def test_a_filled_container_has_no_other_entries_and_their_order():
    value = {"a": 1, "b": 2, "c": 3}
    refill(value, {"c": 3, "a": 4})
    assert list(value.items()) == [("c", 3), ("a", 4)]
    value = [1, 2, 3]
    refill(value, {0: 5})
    assert value == [5]


def test_copies_are_the_callers_to_change():
    inner = {"a": [ONE]}
    copied([inner])[0]["a"].append(TWO)
    assert inner == {"a": [ONE]}


def test_what_holds_itself_is_visited_once():
    value = [ONE, {}]
    value[1]["around"] = value
    assert list(leaves(value)) == [ONE]
    with pytest.raises(RecursionError):
        map_tensors(value, lambda tensor: TWO)


def test_torchs_compiler_sees_through():
    @torch.compile(backend="eager", fullgraph=True)
    def run(x, y):
        out = map_tensors({"a": x, "b": y, "c": None}, lambda tensor: tensor * 2)
        return out["a"] + out["b"]

    assert float(run(ONE, TWO)) == 6.0

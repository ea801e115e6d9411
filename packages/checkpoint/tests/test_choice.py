"""Fault groups 8 and 9, and what the user may choose: names, shapes, dtypes, subsets."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from vescale_checkpoint import MismatchError, UnsafeError, load, save
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import mesh_of, raises_on_all, run_ranks


class Net(nn.Module):
    def __init__(self, first="up", width=4, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.add_module(first, nn.Linear(3, width, dtype=dtype))
        self.down = nn.Linear(width, 2, dtype=dtype)


def trained(seed=0, **kwargs):
    model = Net(seed=seed, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path):
    model, optimizer = trained()
    save(tmp_path, {"model": model, "optimizer": optimizer, "step": 1})
    return tmp_path, model, optimizer


def untouched(model):
    fresh = Net(seed=9, first=next(iter(model._modules)))
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))


def test_a_renamed_parameter_is_refused_with_both_lists(saved):
    other = Net(first="rise", seed=9)
    with pytest.raises(MismatchError) as caught:
        load(saved[0], {"model": other})
    assert str(caught.value) == (
        "load: the checkpoint does not fit the state: 2 missing, 2 extra, 0 of another shape, dtype or kind\n"
        "  missing in the checkpoint  model.rise.weight (nearest: model.up.weight)\n"
        "  missing in the checkpoint  model.rise.bias (nearest: model.up.bias)\n"
        "  not in the state  model.up.weight (nearest: model.rise.weight)\n"
        "  not in the state  model.up.bias (nearest: model.rise.bias)\n"
        "fix one of: rename={'up.weight': 'rise.weight'}  # name in the checkpoint: name in the state\n"
        '            missing="keep"                       # they keep the values they have\n'
        '            extra="ignore"'
    )
    assert untouched(other)


@pytest.mark.parametrize("rename", [{"up.*": "rise.*"}, {"up.weight": "rise.weight", "up.bias": "rise.bias"}])
def test_optimizer_states_follow_a_rename(saved, rename):
    path, model, optimizer = saved
    other = Net(first="rise", seed=9)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    report = load(path, {"model": other, "optimizer": other_optimizer}, rename=rename)
    assert not report.missing and not report.extra
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine, theirs)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[mine][key], other_optimizer.state[theirs][key])
    assert other_optimizer.param_groups[0]["lr"] == 0.1


def test_missing_and_extra_by_permission(saved):
    other = Net(first="rise", seed=9)
    kept = other.rise.weight.clone()
    report = load(saved[0], {"model": other}, missing="keep", extra="ignore")
    assert report.missing == ("model.rise.weight", "model.rise.bias")
    assert set(report.extra) == {"model.up.weight", "model.up.bias"}
    assert set(report.matched) == {"model.down.weight", "model.down.bias"}
    assert torch.equal(other.rise.weight, kept) and torch.equal(other.down.weight, saved[1].down.weight)


def test_only_some(saved):
    other = Net(seed=9)
    kept = other.up.weight.clone()
    report = load(saved[0], {"model": other, "step": 0}, only="model.down.*")
    assert set(report.matched) == {"model.down.weight", "model.down.bias"} and "step" in report.skipped
    assert torch.equal(other.up.weight, kept) and torch.equal(other.down.weight, saved[1].down.weight)


def test_keys_that_the_state_lacks_are_not_loaded(saved):
    report = load(saved[0], {"step": 0})
    assert report.matched == ("step",) and {"model", "optimizer"} <= set(report.skipped)


def test_shapes_and_dtypes_are_refused_on_all_ranks_alike(tmp_path):
    save(tmp_path, {"x": torch.ones(4, 6), "y": torch.ones(3)})

    def run():
        mesh = mesh_of(2)
        x = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])
        y = distribute_tensor(torch.zeros(3, dtype=torch.int32), mesh, [Shard(0)])
        try:
            load(tmp_path, {"x": x, "y": y})
        finally:
            assert not x.to_local().any() and not y.to_local().any()

    assert raises_on_all(2, MismatchError, run).splitlines()[1:3] == [
        "  x  has shape [6, 4], saved [4, 6]",
        "  y  is int32, saved as float32: cast='float32->int32' permits it",
    ]


def test_lossless_conversion_on_request(tmp_path):
    value = torch.randn(64).bfloat16()
    save(tmp_path, {"x": value})

    def run():
        x = distribute_tensor(torch.zeros(64), mesh_of(2), [Shard(0)])
        report = load(tmp_path, {"x": x}, cast="lossless")
        assert report.converted == {"x": "bfloat16->float32"}
        return x.full_tensor()

    assert all(torch.equal(found, value.float()) for found in run_ranks(2, run))


def test_lossy_conversion_by_name_only(tmp_path):
    save(tmp_path, {"x": torch.randn(8)})
    target = {"x": torch.zeros(8, dtype=torch.bfloat16)}
    for cast in ((), "lossless", ("float64->bfloat16",)):
        with pytest.raises(MismatchError, match="float32->bfloat16"):
            load(tmp_path, target, cast=cast)
    load(tmp_path, target, cast=["float32->bfloat16", "lossless"])
    wanted = {"x": torch.zeros(8)}
    load(tmp_path, wanted)
    assert torch.equal(target["x"], wanted["x"].bfloat16())


def test_nan_payloads_are_kept(tmp_path):
    bits = torch.tensor([0x7F800001, 0x7FC12345, -1, 0x7F800000, 1], dtype=torch.int64).to(torch.int32)
    save(tmp_path, {"x": bits.view(torch.float32)})
    state = {"x": torch.zeros(5)}
    load(tmp_path, state)
    assert torch.equal(state["x"].view(torch.int32), bits)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"cast": "float32"}, "neither 'lossless' nor of the form"),
        ({"cast": ["float32->float31"]}, "neither 'lossless' nor of the form"),
        ({"missing": "ignore"}, "neither 'error' nor 'keep'"),
        ({"extra": "keep"}, "neither 'error' nor 'ignore'"),
        ({"rename": {"a.*.*": "b.*.*"}}, "more than one"),
        ({"rename": {"a": "b.*"}}, "more than one"),
    ],
)
def test_options_that_mean_nothing(saved, options, rule):
    with pytest.raises(MismatchError, match=rule):
        load(saved[0], {"step": 0}, **options)


def test_a_tied_parameter_from_an_untied_one(tmp_path):
    class Tied(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            if tied:
                self.b.weight = self.a.weight

    untied, tied = Tied(False), Tied(True)
    save(tmp_path / "untied", {"model": untied})
    with pytest.raises(MismatchError, match=r"not in the state  model\.b\.weight"):
        load(tmp_path / "untied", {"model": Tied(True)})
    save(tmp_path / "tied", {"model": tied})
    load(tmp_path / "tied", {"model": untied})
    assert torch.equal(untied.a.weight, untied.b.weight) and untied.a.weight is not untied.b.weight


def test_optimizer_groups_that_do_not_fit(saved):
    path, _, _ = saved
    model = Net()
    optimizer = torch.optim.AdamW(
        [{"params": [model.up.weight]}, {"params": [model.up.bias, *model.down.parameters()]}], lr=1.0
    )
    load(path, {"model": model, "optimizer": optimizer})  # each group was in one saved group
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    save(path / "two", {"model": model, "optimizer": optimizer})
    with pytest.raises(MismatchError, match=r"group 0 has parameters of the saved groups \[0, 1\]"):
        load(path / "two", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


KINDS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adafactor]


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_another_kind_of_optimizer(saved, kind):
    """SGD would take over AdamW's betas, keep its own momentum, and say nothing."""
    path, model, _ = saved
    optimizer = kind(model.parameters(), lr=0.7)
    with pytest.raises(MismatchError, match=r"group 0 has .*, saved with .*amsgrad.*only='model\.\*'"):
        load(path, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.7 and not any("exp_avg" in state for state in optimizer.state.values())
    load(path, {"model": model, "optimizer": optimizer}, only="model.*")
    load(path, {"model": model, "optimizer": optimizer}, missing="keep", extra="ignore")
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("scheduled", ["saved", "loaded"])
def test_what_a_scheduler_or_another_torch_adds_to_a_group_is_no_other_kind(tmp_path, scheduled):
    def made(lr, has_scheduler):
        optimizer = torch.optim.AdamW(Net().parameters(), lr=lr)
        if has_scheduler:
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9, base_momentum=0.8)
        return optimizer

    optimizer = made(0.3, scheduled == "saved")
    optimizer.param_groups[0].pop("foreach")  # a release without it
    save(tmp_path, {"optimizer": optimizer})
    other = made(0.6, scheduled == "loaded")
    load(tmp_path, {"optimizer": other})
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"only": "modle.*"}, "only='modle.*'"),
        ({"only": ["model.*", "model.left.*"]}, "only='model.left.*'"),
        ({"rename": {"model.up.*": "model.rise.*"}, "extra": "ignore", "missing": "keep"}, "rename='model.up.*'"),
        ({"rename": {"up.*": "up.*", "upper.weight": "down.weight"}}, "rename='upper.weight'"),
    ],
)
def test_a_choice_that_matches_nothing_is_refused(saved, choice, told):
    model = Net(seed=9)
    with pytest.raises(MismatchError) as caught:
        load(saved[0], {"model": model}, **choice)
    assert str(caught.value).startswith(f"load: {told} matches nothing\n") and untouched(model)


def on_two_ranks(path):
    """Each has another part of the names: a glob has to match on one of them."""
    from torch import distributed as dist

    name = ("up", "down")[dist.get_rank()]
    model = Net(seed=9)
    part = nn.ModuleDict({name: getattr(model, name)})
    report = load(path, {"model": part}, only=["model.up.*", "model.down.*"])
    return report.matched


def test_a_glob_matches_if_it_does_on_any_rank(saved):
    assert run_ranks(2, on_two_ranks, str(saved[0])) == [
        ("model.up.weight", "model.up.bias"),
        ("model.down.weight", "model.down.bias"),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: {"x": [a, (b, [a * 2], 3)]},
        lambda a, b: {"x": (a, (b, "text"))},
        lambda a, b: {"x": {(1, 2): a, 3: [b]}},
        lambda a, b: {"x": {"$tensor": a, "$tuple": (b,)}},
        lambda a, b: {"x": {"y": {1: {"z": (a, {None: b})}}}},
    ],
)
def test_tensors_in_any_container_are_filled_in_place(tmp_path, make):
    def flat(value):
        if isinstance(value, dict):
            return [one for item in value.values() for one in flat(item)]
        return [one for item in value for one in flat(item)] if isinstance(value, (list, tuple)) else [value]

    saved = make(torch.arange(3.0), torch.tensor([5]))
    save(tmp_path, saved)
    state = make(torch.zeros(3), torch.tensor([0]))
    tensors = [one for one in flat(state) if isinstance(one, torch.Tensor)]
    load(tmp_path, state)
    assert all(a is b for a, b in zip(tensors, [one for one in flat(state) if isinstance(one, torch.Tensor)]))
    for one, other in zip(flat(state), flat(saved), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert type(state["x"]) is type(saved["x"])


def test_a_state_that_is_no_dict_is_told(saved):
    for call in (lambda: save(saved[0], Net()), lambda: load(saved[0], Net()), lambda: load(saved[0], [1])):
        with pytest.raises(MismatchError, match=r"state is (a Net|\[1\]), not (Mutable)?Mapping"):
            call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nothing_is_saved_of_or_loaded_into_what_has_no_bytes(saved, tmp_path):
    for tensor, told in (
        (torch.empty(2, device="meta"), "on the meta device, without values"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    ):
        with pytest.raises(UnsafeError, match=f"'x' is {told}: there are no bytes to store"):
            save(tmp_path / "other", {"x": tensor})
    with torch.device("meta"):
        model = Net()
    with pytest.raises(MismatchError, match=r"model.up.weight  is on the meta device, where nothing can be loaded"):
        load(saved[0], {"model": model})


KINDS_OF_DICT = [
    lambda: OrderedDict(b=1, a=2),
    lambda: defaultdict(list, {"x": [1], "y": []}),
    lambda: defaultdict(int, {1: 2, None: 3}),
    lambda: OrderedDict({(1, 2): OrderedDict(c=[OrderedDict(d=1)]), "e": (defaultdict(int, f=1),)}),
    lambda: {"plain": {"deep": OrderedDict(a={})}, "counter": Counter("aab")},
]


def kinds_in(value):
    if isinstance(value, dict):
        return type(value), getattr(value, "default_factory", None), [(k, kinds_in(item)) for k, item in value.items()]
    return type(value), [kinds_in(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("make", KINDS_OF_DICT)
def test_a_dict_is_loaded_as_the_kind_of_dict_that_the_state_has(tmp_path, make):
    """Ordered ones and those with defaults are stored as dicts, in their order."""
    save(tmp_path, {"x": make(), "within": [make(), 0]})
    state = {"x": make(), "within": [make(), 0]}
    load(tmp_path, state)
    assert kinds_in(state["x"]) == kinds_in(make()) and kinds_in(state["within"][0]) == kinds_in(make())
    state = {"x": None}
    load(tmp_path, state)
    assert state["x"] == make() and list(state["x"]) == list(make()) and type(state["x"]) is dict


@pytest.mark.parametrize(
    "wrong",
    [
        {"cast": True}, {"cast": None}, {"cast": [torch.float32]}, {"only": 5}, {"only": [1]}, {"rename": ["a"]},
        {"rename": {"a": 1}},
    ],
)  # fmt: skip
def test_options_that_are_none_are_refused_with_what_is_one(tmp_path, wrong):
    save(tmp_path, {"x": torch.ones(2), "step": 1})
    (name,) = wrong
    with pytest.raises(MismatchError, match=rf"load: {name} is .*, not .*str"):
        load(tmp_path, {"x": torch.zeros(2)}, **wrong)

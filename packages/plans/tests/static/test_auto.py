"""Mode "auto": static where it is proven, eager where it is not or where somebody looks, without a word."""

import copy
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor import DTensor, Replicate, Shard, reproducible
from vescale_dtensor.testing import fake_world, run_ranks, warm_up
from vescale_plans import Boundary, Plan, PlanError, explain_static, parallelize
from vescale_plans._static import mode as modes

warm_up("torch._dynamo", "vescale_plans")

WIDTH = 8
PLAN = Plan(
    mesh={"tp": 2},
    parameters={"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "*": {}},
    boundaries={"up": Boundary(input={"tp": Replicate()}), "down": Boundary(output={"tp": Replicate()})},
)


class Middle(nn.Module):
    def forward(self, x):
        return F.gelu(x) * 2


class Prints(nn.Module):
    def forward(self, x):
        print(tuple(x.shape))
        return F.gelu(x) * 2


class Net(nn.Module):
    def __init__(self, middle=None):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = middle or Middle()
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(self.middle(self.up(x))))


def built(mode, middle=None):
    torch.manual_seed(0)
    return parallelize(PLAN, Net(middle), lambda p: torch.optim.SGD(p, lr=0.1), mode=mode)


def watched_once(mode):
    """After its first step, whose traffic `parallelize` watches by hooks of its own: recorded is the next one."""
    model, optimizer = built(mode)
    step(model, optimizer)
    return model, optimizer


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(model, optimizer, rows=4):
    """The output, all gradients and all parameters of a step, as this rank's shards."""
    generator = torch.Generator().manual_seed(rows)
    out = model(torch.randn(rows, 3, WIDTH, generator=generator))
    out.square().mean().backward()
    seen = [local(out), *(local(p.grad) for p in model.parameters())]
    optimizer.step()
    optimizer.zero_grad()
    return seen + [local(p) for p in model.parameters()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Looker:
    """A trace function, as a debugger sets one: what tensors the middle's forward has."""

    def __init__(self):
        self.kinds = []

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code is Middle.forward.__code__:
            self.kinds.append(type(frame.f_locals["x"]))
        return None


class Sees(TorchDispatchMode):
    """Names every operator that runs below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Ways:
    """How a call may be looked at: `with` opens the look."""

    class trace:
        def __enter__(self):
            self.before = sys.gettrace()
            sys.settrace(lambda *_: None)

        def __exit__(self, *_):
            sys.settrace(self.before)

    class compiler:
        def __enter__(self):
            torch.compiler._is_compiling_flag = True

        def __exit__(self, *_):
            torch.compiler._is_compiling_flag = False

    class dispatch:
        def __enter__(self):
            self.mode = Sees()
            self.mode.__enter__()

        def __exit__(self, *_):
            self.mode.__exit__(None, None, None)

    class ordered:
        def __enter__(self):
            self.mode = reproducible({"batch": 2})
            self.mode.__enter__()

        def __exit__(self, *_):
            self.mode.__exit__(None, None, None)

    class _tool:
        """A tool of `sys.monitoring`; before Python 3.12, where there is none, its absence is what is asked."""

        number = 0

        def __enter__(self):
            if sys.version_info >= (3, 12):
                sys.monitoring.use_tool_id(self.number, "test")
            else:
                self.before, modes._tool_of = modes._tool_of, {self.number: "test"}.get

        def __exit__(self, *_):
            if sys.version_info >= (3, 12):
                sys.monitoring.free_tool_id(self.number)
            else:
                modes._tool_of = self.before

    class debugger(_tool):
        number = 0

    class somebodys(_tool):
        number = 4

    class coverage(_tool):
        number = 1

    class profiler(_tool):
        number = 2


def regions_of_a_step(regions, model, optimizer, rows=4):
    regions.count = 0
    step(model, optimizer, rows)
    return regions.count


LOOKING = ["trace", "compiler", "dispatch", "ordered", "debugger", "somebodys"]
NOT_LOOKING = ["coverage", "profiler"]


@pytest.mark.parametrize("way", LOOKING + NOT_LOOKING)
def test_a_call_that_somebody_looks_at_is_eager_and_the_next_is_static_again(way, regions):
    with fake_world(2):
        model, optimizer = watched_once("auto")
        assert [regions_of_a_step(regions, model, optimizer) for _ in range(2)] == [0, 1]
        with getattr(Ways, way)():
            assert [regions_of_a_step(regions, model, optimizer) for _ in range(2)] == [way in NOT_LOOKING] * 2
        assert regions_of_a_step(regions, model, optimizer) == 1
        assert model._vescale.static.root.recordings == 1  # nothing was recorded for those who looked


def test_a_dispatch_mode_sees_no_trial():
    seen = {}
    for mode in ("eager", "auto"):
        with fake_world(2):
            model, optimizer = watched_once(mode)
            with Sees() as sees:
                for _ in range(3):
                    step(model, optimizer)
            seen[mode] = sees.names
    assert seen["auto"] == seen["eager"] and len(seen["eager"]) > 30


@pytest.mark.parametrize("way", LOOKING)
def test_a_look_at_the_first_call_records_nothing(way, regions):
    with fake_world(2):
        model, optimizer = watched_once("auto")
        with getattr(Ways, way)():
            step(model, optimizer)
            assert model._vescale.static.root.recordings == 0
        assert [regions_of_a_step(regions, model, optimizer) for _ in range(2)] == [0, 1]


def test_a_debugger_sees_global_tensors_in_every_call():
    with fake_world(2):
        model, optimizer = built("auto")
        looker = Looker()
        for traced in (False, True, False, True):
            before = sys.gettrace()
            sys.settrace(looker if traced else before)
            try:
                step(model, optimizer)
            finally:
                sys.settrace(before)
        assert looker.kinds == [DTensor] * 2


def looked_at_on(ranks, mode):
    """Six steps, of which the third and fourth are traced on some ranks alone."""
    model, optimizer = built(mode)
    seen = []
    for i in range(6):
        before = sys.gettrace()
        if i in (2, 3) and torch.distributed.get_rank() in ranks:
            sys.settrace(lambda *_: None)
        try:
            seen += step(model, optimizer)
        finally:
            sys.settrace(before)
    return seen


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1), ()], ids=str)
def test_ranks_that_are_looked_at_and_ranks_that_are_not_compute_together(ranks):
    """Static calls send what eager calls send, in the same order."""

    def compared():
        return same(looked_at_on((), "eager"), looked_at_on(ranks, "auto"))

    assert run_ranks(2, compared) == [True, True]


class Normed(nn.Module):
    """Replicated, with parameters of several sizes, whose gradients are partial sums."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def halved(parameter):
    parameter.grad.mul_(0.5 + 0 * parameter.grad.norm().item())


def put_hooks(model, accumulated):
    for parameter in model.parameters():
        if accumulated:
            parameter.register_post_accumulate_grad_hook(halved)
        else:
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01) + 0 * grad.norm())


@pytest.mark.parametrize("accumulated", [False, True], ids=["gradients", "accumulated"])
@pytest.mark.parametrize("late", [False, True], ids=["before the first step", "amid the training"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(mesh={"tp": 2}, parameters={"*": {}}),
        Plan(mesh={"tp": 2}, parameters={"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}}),
        Plan(mesh={"dp": 2}, parameters={"*": {}}),
        Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    ],
    ids=["replicated", "tp", "dp", "zero 3"],
)
def test_hooks_on_gradients_communicate_in_one_order_whatever_ranks_are_static(plan, late, accumulated):
    def trained(mode):
        torch.manual_seed(0)
        model, optimizer = parallelize(plan, nn.Sequential(Normed(), Normed()), lambda p: torch.optim.SGD(p, lr=0.1),
                                       mode=mode)  # fmt: skip
        norms = []
        for step in range(4):
            if step == 2 * late:
                put_hooks(model, accumulated)
            model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            norms.append([p.grad.norm().item() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        return norms

    def compared():
        alone = torch.distributed.get_rank()
        return trained("eager") == trained("static" if alone else "eager") == trained("static")

    assert run_ranks(2, compared) == [True, True]


class Rotates(nn.Module):
    """As in TorchTitan's Llama: a generator, or what `map` gives, that is unpacked at once."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        if self.way == "generator":
            one, other = (F.gelu(each) for each in (x, x * 2))
        elif self.way == "map":
            one, *(other,) = map(F.gelu, (x, x * 2))
        else:
            kept = one, other = (F.gelu(each) for each in (x, x * 2))
            list(kept)
        return one + other


@pytest.mark.parametrize(("way", "count"), [("generator", 1), ("map", 1), ("kept", 2)])
def test_what_is_unpacked_at_once_keeps_nothing(way, count, regions):
    with fake_world(2):
        torch.manual_seed(0)
        model, optimizer = parallelize(PLAN, Net(Rotates(way)), lambda p: torch.optim.SGD(p, lr=0.1), mode="auto")
        for _ in range(3):
            step(model, optimizer)
        assert regions_of_a_step(regions, model, optimizer) == count


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("zero", [None, 0, 3])
def test_a_module_is_eager_while_it_has_hooks_on_gradients(way, zero, regions):
    """`zero` None: nothing is reduced, and autograd itself calls them."""
    plan = PLAN if zero is None else Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
    with fake_world(2):
        torch.manual_seed(0)
        model, optimizer = parallelize(plan, Net(), lambda p: torch.optim.SGD(p, lr=0.1), mode="auto")
        step(model, optimizer)
        step(model, optimizer)
        assert regions_of_a_step(regions, model, optimizer) == 1
        handle = getattr(model.up.weight, way)(lambda _: None)
        step(model, optimizer)
        assert regions_of_a_step(regions, model, optimizer) == 2  # the activation, and the other projection
        handle.remove()
        step(model, optimizer)
        assert regions_of_a_step(regions, model, optimizer) == 1


def test_what_stays_eager_is_told_by_explain_static_alone(capsys):
    """Static mode warns of a module that is recorded too often; auto does not."""

    def warned(mode):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = built(mode)
            for rows in range(1, 13):
                step(model, optimizer, rows)
        return [str(one.message) for one in caught], explain_static(model).calls[""]

    with fake_world(2):
        (told,), (verdict, reason) = warned("static")
        assert "stays eager" in told and verdict == "eager"
        silent, (verdict, also) = warned("auto")
        assert silent == [] and verdict == "eager" and also.what == reason.what
    capsys.readouterr()


def test_auto_prints_what_eager_prints(capsys):
    printed = {}
    for mode in ("eager", "auto"):
        with fake_world(2):
            model, optimizer = built(mode, Prints())
            for _ in range(4):
                step(model, optimizer)
        printed[mode] = capsys.readouterr().out
    assert printed["auto"] == printed["eager"] == "(4, 3, 32)\n" * 4


def test_a_copy_is_auto_as_well(regions):
    with fake_world(2):
        model, _ = built("auto")
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        assert [regions_of_a_step(regions, copied, optimizer) for _ in range(2)] == [0, 1]
        with Ways.trace():
            assert regions_of_a_step(regions, copied, optimizer) == 0


# --- which mode ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, given, found",
    [
        (None, None, "auto"),
        ("", None, "auto"),
        ("auto", None, "auto"),
        ("static", None, "static"),
        ("eager", None, "eager"),
        ("auto", "eager", "eager"),
        ("eager", "auto", "auto"),
        ("fast", "static", "static"),
    ],
)
def test_the_environment_says_the_mode_where_the_caller_does_not(environment, given, found, monkeypatch):
    monkeypatch.delenv("VESCALE_MODE", raising=False)
    if environment is not None:
        monkeypatch.setenv("VESCALE_MODE", environment)
    with fake_world(2):
        model, _ = parallelize(PLAN, Net(), mode=given)
        static = model._vescale.static
        assert (static is not None, static is not None and static.is_auto) == (found != "eager", found == "auto")


def test_a_mode_that_is_none_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("VESCALE_MODE", "fast")
    with fake_world(2), pytest.raises(PlanError, match=r"VESCALE_MODE is 'fast', in the environment") as raised:
        parallelize(PLAN, Net())
    assert all(f'mode="{name}"' in str(raised.value) or f"mode='{name}'" in str(raised.value) for name in modes.MODES)


def test_the_reproducible_mode_takes_auto_and_stays_eager(regions):
    with fake_world(2):
        torch.manual_seed(0)
        with reproducible({"batch": 2}):
            model, optimizer = parallelize(PLAN, Net(), lambda p: torch.optim.SGD(p, lr=0.1), mode="auto")
            assert regions_of_a_step(regions, model, optimizer) == 0 == regions_of_a_step(regions, model, optimizer)


# --- forwards that are put over forwards -------------------------------------------------


def wrap(module, factor):
    """As libraries do: keeps what the forward was, and calls it."""
    before = module.forward

    def around(*args, **kwargs):
        return before(*args, **kwargs) * factor

    module.forward = around
    return before


def wrapped(mode, name):
    """Wrapped at the third step, again at the fifth, and put back at the seventh; sizes change, so that all is recorded
    anew in between."""
    model, optimizer = built(mode)
    module = model.get_submodule(name)
    seen = []
    for i in range(9):
        if i == 2:
            first = wrap(module, 0.5)
        elif i == 4:
            second = wrap(module, 3.0)
        elif i == 6:
            module.forward = second
        elif i == 7:
            module.forward = first
        seen += step(model, optimizer, 4 + i % 2)
    return seen


@pytest.mark.parametrize("mode", ["static", "auto"])
@pytest.mark.parametrize("name", ["", "middle", "up", "drop"])
def test_forwards_put_over_forwards_call_what_was_there(name, mode):
    def compared():
        return same(wrapped("eager", name), wrapped(mode, name))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(2, compared) == [True, True]


@pytest.mark.parametrize("mode", ["static", "auto"])
def test_a_forward_that_was_put_on_stays_when_a_module_is_retired(mode):
    """What static mode takes away when it gives a module up is its own."""

    def outputs(mode):
        model, optimizer = built(mode)
        seen = step(model, optimizer)
        for rows in range(1, 13):
            model.middle.forward = lambda x, factor=rows: x * factor
            seen += step(model, optimizer, rows)
        return seen, "forward" in vars(model.middle)

    def compared():
        (wanted, there), (found, still) = outputs("eager"), outputs(mode)
        return same(wanted, found), there, still

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(2, compared) == [(True, True, True)] * 2


def test_a_forward_says_of_itself_what_it_said():
    with fake_world(2):
        model, optimizer = built("auto")
        for _ in range(2):
            step(model, optimizer)
        assert model.forward.__func__ is Net.forward and model.forward.__self__ is model
        assert model.forward.__name__ == "forward" and model.forward.__code__ is Net.forward.__code__
        assert not hasattr(model.forward, "__wrapped__")

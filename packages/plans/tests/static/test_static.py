"""Static mode: what is awkward for it gives eager's results bit by bit, or is reported as eager."""

import copy
import re
import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, Replicate, Shard, comm_trace, distribute_tensor, strict
from vescale_dtensor.testing import in_turns, raises_on_all, run_ranks, warm_up
from vescale_plans import Boundary, Plan, PlanError, StaticWarning, explain_static, no_sync, parallelize, static

warm_up("torch._dynamo", "vescale_plans")

WIDTH, STEPS = 8, 6


class Net(nn.Module):
    """Columns, something awkward in the middle whose last dim is sharded, rows."""

    def __init__(self, middle):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = middle
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.middle(self.up(self.norm(x))))


PLAN = Plan(
    mesh={"dp": 2, "tp": 2},
    parameters={"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "*": {}},
    boundaries={"up": Boundary(input={"tp": Replicate()}), "down": Boundary(output={"tp": Replicate()})},
)


def build(middle, mode="eager", verify_every=0):
    torch.manual_seed(0)
    model, optimizer = parallelize(PLAN, Net(middle), lambda p: torch.optim.SGD(p, lr=0.1))
    return (static(model, verify_every=verify_every) if mode == "static" else model), optimizer


def train(model, optimizer, batches):
    """Of each step the output, and every gradient, as this rank's shards."""
    seen = []
    for batch in batches:
        out = model(batch)
        out.square().mean().backward()
        seen.append(out.detach().to_local().clone())
        seen += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def batches_of(steps=STEPS, sizes=(4,)):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(sizes[i % len(sizes)], 3, WIDTH, generator=generator) for i in range(steps)]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def verdict(model, name="middle"):
    found, reason = explain_static(model).calls[name]
    return found, reason.what if reason else ""


# --- modules that are awkward ----------------------------------------------------------


class Pointwise(nn.Module):
    def forward(self, x):
        return F.gelu(x) * 2


class DataDependent(nn.Module):
    """The branch changes with the data."""

    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


class Caches(nn.Module):
    """Keeps the first tensor that it computes."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = x.detach().abs() + 1
        return x / self.kept


class CachesInAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept.append(x.detach())
        return x + self.kept[0]


class ReadsASize(nn.Module):
    """The last dim is sharded: its local size is another."""

    def forward(self, x):
        return x / x.shape[-1] ** 0.5


class BranchesOnASize(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[-1] > 3 * WIDTH else x - 1


class WritesItsInput(nn.Module):
    def forward(self, x):
        return x.mul_(2).add_(1)


class WritesWhatItMade(nn.Module):
    """In place, on a tensor of its own: nothing is wrong with that."""

    def forward(self, x):
        return (x * 2).add_(1)


class Counts(nn.Module):
    """Every other call does something else."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2 if self.calls % 2 else x.sum(-1, keepdim=True) + x


class ViewsByAGlobalSize(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], x.shape[1], 4, WIDTH).transpose(1, 2).transpose(1, 2).flatten(2)


class ViewsByMinusOne(nn.Module):
    def forward(self, x):
        return x.view(*x.shape[:2], -1, WIDTH).transpose(1, 2).transpose(1, 2).flatten(2).tanh()


class Means(nn.Module):
    """A mean over the sharded dim, which is a sum over ranks."""

    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


class Drops(nn.Module):
    """A leaf that draws."""

    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class DropsBetween(nn.Module):
    """Draws by itself between modules that it calls."""

    def __init__(self):
        super().__init__()
        self.inner = Pointwise()

    def forward(self, x):
        return self.inner(F.dropout(self.inner(x), 0.5, self.training))


class HoldsALeafThatDrops(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x * 2) + 1


class Checkpoints(nn.Module):
    """What runs again in backward runs outside of its forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = Pointwise()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) + 1


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class OwnFunction(nn.Module):
    """A Function of its own keeps a parameter for its backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4 * WIDTH))

    def forward(self, x):
        return Scale.apply(x, self.weight)


CASES = {
    # module -> (how it is made, whether it runs static, what the reason says)
    "pointwise": (Pointwise, True, ""),
    "a data-dependent branch": (DataDependent, False, "reads the value of a tensor|converts"),
    "a cached tensor": (Caches, False, "sets `self.kept`|neither an input nor a parameter"),
    "a cached tensor in a list": (CachesInAList, False, "calls `append` of a list that outlives the call"),
    "a size of a sharded dim": (ReadsASize, False, "has other arguments in `return x / x.shape"),
    "a branch on a size": (BranchesOnASize, False, "in place of sub"),
    "its input written in place": (WritesItsInput, False, "writes in place"),
    "its own tensor written in place": (WritesWhatItMade, True, ""),
    "a count": (Counts, False, "sets `self.calls`"),
    "a view by global sizes": (ViewsByAGlobalSize, False, "reads a global size in `return x.view"),
    "a view by -1": (ViewsByMinusOne, True, ""),
    "a mean over shards": (Means, False, ""),
    "a leaf that draws": (Drops, True, ""),
    "dropout between modules": (DropsBetween, False, "draws random numbers"),
    "a leaf that drops": (HoldsALeafThatDrops, True, ""),
    "a checkpoint": (lambda: Checkpoints(False), False, "checkpoint"),
    "a reentrant checkpoint": (lambda: Checkpoints(True), False, "checkpoint"),
    "a Function of its own": (OwnFunction, False, ""),
}


@in_turns(3)
@pytest.mark.parametrize("case", list(CASES))
def test_an_awkward_module_gives_what_eager_gives(case):
    make, is_static, why = CASES[case]

    def run():
        batches = batches_of()
        wanted = train(*build(make()), batches)
        model, optimizer = build(make(), "static", verify_every=4)
        return same(wanted, train(model, optimizer, batches)), verdict(model), verdict(model, "norm")[0]

    for equal, (found, reason), norm in run_ranks(4, run):
        assert equal
        assert found.startswith("static") == is_static, reason
        assert re.search(why, reason), reason
        assert norm == "static"


class OnePlus(nn.Module):
    """Gemma's way: what is converted (the weight's gradient counts once) is no parameter, but 1 + a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        return x * (1.0 + self.weight.float())


class OnePlusAndItself(OnePlus):
    def forward(self, x):
        return x * (1.0 + self.weight) + self.weight


class ItselfAndOnePlus(OnePlus):
    def forward(self, x):
        return (x + self.weight) * (1.0 + self.weight)


class OnePlusBesideAnother(OnePlus):
    """The weight goes two ways, of which one is not converted before it leaves."""

    def forward(self, x):
        return x * (1.0 + self.weight) + (2.0 * self.weight).tanh()


@pytest.mark.parametrize(
    "kind, is_static",
    [(OnePlus, True), (OnePlusAndItself, False), (ItselfAndOnePlus, False), (OnePlusBesideAnother, False)],
)
def test_a_conversion_of_what_a_parameter_became(kind, is_static):
    def run():
        def trained(mode):
            torch.manual_seed(0)
            net = Net(Pointwise())
            net.norm = kind()
            model, optimizer = parallelize(PLAN, net, lambda p: torch.optim.SGD(p, lr=0.1))
            return train(static(model) if mode == "static" else model, optimizer, batches_of()), model

        (wanted, _), (found, model) = trained("eager"), trained("static")
        return same(wanted, found), verdict(model, "norm")

    for equal, (found, reason) in run_ranks(4, run):
        assert equal
        assert (found == "static") == is_static, (found, reason)


class Gates(nn.Module):
    """Parted, of sizes that no other test has: how parts lie is asked of torch in the very pass that is recorded."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * 47)

    def forward(self, x):
        a, b = self.both(x).chunk(2, dim=-1)
        first, second, third = a.split((20, 20, 7), dim=-1)
        gate = (first * second).sum(-1, keepdim=True) + third.sum(-1, keepdim=True) * b.sum(-1, keepdim=True)
        return gate.tanh() + x


def test_what_a_rule_asks_torch_about_shapes_is_not_the_modules_doing():
    def run():
        def trained(mode):
            torch.manual_seed(0)
            plan = Plan(mesh={"dp": 2}, parameters={"*": {}})
            model, optimizer = parallelize(plan, nn.Sequential(Gates()), lambda p: torch.optim.SGD(p, lr=0.1))
            return train(static(model) if mode == "static" else model, optimizer, batches_of()), model

        (found, model), (wanted, _) = trained("static"), trained("eager")  # in an eager run before, all were decided
        return same(wanted, found), verdict(model, "0")

    for equal, (found, reason) in run_ranks(2, run):
        assert equal
        assert found == "static", reason


def test_a_shape_that_changes_at_every_step_goes_back_to_eager_with_a_warning():
    def run():
        batches = batches_of(24, sizes=tuple(range(2, 26)))
        wanted = train(*build(Pointwise()), batches)
        model, optimizer = build(Pointwise(), "static")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train(model, optimizer, batches)
        told = [str(w.message) for w in caught if issubclass(w.category, StaticWarning)]
        return same(wanted, found), told, verdict(model)

    for equal, told, (found, reason) in run_ranks(4, run):
        assert equal and found == "eager" and "differ at every call" in reason
        assert len(told) == 1 and "Net stays eager" in told[0], told


def test_shapes_that_come_again_are_recorded_once_each():
    def run():
        batches = batches_of(12, sizes=(4, 6, 2))
        wanted = train(*build(Pointwise()), batches)
        model, optimizer = build(Pointwise(), "static")
        found = train(model, optimizer, batches)
        return same(wanted, found), model._vescale.static.root.recordings, verdict(model)[0]

    assert run_ranks(4, run) == [(True, 3, "static")] * 4


def test_a_hook_added_at_run_time_is_called_with_what_eager_gives_it():
    class AddsAHook(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Pointwise()
            self.seen = []
            self.count = 0

        def forward(self, x):
            return self.inner(x) + 1

    def run():
        def hooked(mode):
            middle = AddsAHook()
            model, optimizer = build(middle, mode)
            seen = []
            batches = batches_of()
            first = train(model, optimizer, batches[:3])
            middle.inner.register_forward_hook(lambda module, args, out: seen.append(out.shape))
            return first + train(model, optimizer, batches[3:]), seen, model

        wanted, shapes, _ = hooked("eager")
        found, other_shapes, model = hooked("static")
        return same(wanted, found), shapes == other_shapes and len(shapes) == 3, verdict(model)

    for equal, shapes, (found, reason) in run_ranks(4, run):
        assert equal and shapes and found == "eager" and "which has hooks of yours" in reason


def test_a_module_that_appends_hooks_in_its_forward_is_reported():
    class Appends(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Pointwise()

        def forward(self, x):
            self.inner.register_forward_hook(lambda module, args, out: out + 1)
            return self.inner(x)

    def run():
        batches = batches_of()
        wanted = train(*build(Appends()), batches)
        model, optimizer = build(Appends(), "static")
        return same(wanted, train(model, optimizer, batches)), verdict(model)

    for equal, (found, reason) in run_ranks(4, run):
        assert equal and found == "eager" and "hooks" in reason, (equal, found, reason)


def test_a_branch_that_starts_later_is_found_within_verify_every_steps():
    class Switches(nn.Module):
        """A switch outside of the module, which no guard sees."""

        switch: ClassVar = {"on": False}

        def forward(self, x):
            return x / x.shape[-1] if self.switch["on"] else x * 2

    def run():
        def switched(mode):
            Switches.switch["on"] = False
            model, optimizer = build(Switches(), mode, verify_every=3)
            batches = batches_of(9)
            outs = []
            for step, batch in enumerate(batches, start=1):
                Switches.switch["on"] = step >= 3  # the verified steps are 3, 6, 9
                outs += train(model, optimizer, [batch])
            return outs, model

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wanted, _ = switched("eager")
            found, model = switched("static")
        told = [str(w.message) for w in caught if issubclass(w.category, StaticWarning)]
        return same(wanted, found), told, verdict(model)

    for equal, told, (found, _) in run_ranks(4, run):
        assert equal and found == "eager"
        assert any("was static, and is not any more" in line for line in told), told


def test_training_and_evaluation_take_turns():
    def run():
        def turns(mode):
            model, optimizer = build(HoldsALeafThatDrops(), mode)
            seen = []
            for step, batch in enumerate(batches_of(8)):
                model.train(step % 2 == 0)
                with torch.no_grad() if step % 4 == 3 else torch.enable_grad():
                    out = model(batch)
                    seen.append(out.detach().to_local().clone())
                if out.requires_grad:
                    out.mean().backward()
                    seen += [p.grad.to_local().clone() for p in model.parameters()]
                    optimizer.step()
                    optimizer.zero_grad()
            return seen, model

        wanted, _ = turns("eager")
        found, model = turns("static")
        return same(wanted, found), model._vescale.static.root.recordings

    assert run_ranks(4, run) == [(True, 3)] * 4  # training; evaluation with and without gradients


def test_a_parameter_that_is_replaced_or_frozen():
    def run():
        def replaced(mode):
            model, optimizer = build(Pointwise(), mode)
            batches = batches_of()
            seen = train(model, optimizer, batches[:2])
            state = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            for batch in batches[2:]:
                out = model(batch)
                out.mean().backward()
                seen.append(out.detach().to_local().clone())
                seen += [p.grad.to_local().clone() for p in model.parameters()]
            return seen

        return same(replaced("eager"), replaced("static"))

    assert run_ranks(4, run) == [True] * 4


def test_paused_backwards_clipping_and_traces_are_as_in_eager_mode():
    def run():
        def several(mode):
            model, _ = build(Pointwise(), mode)
            batches = batches_of(5)
            model(batches[0]).mean().backward()  # recorded
            with comm_trace(model) as trace:
                with no_sync(model):
                    model(batches[1]).mean().backward()
                model(batches[2]).mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            seen = [p.grad.to_local().clone() for p in model.parameters()]
            events = [(e.kind, e.axes, e.received, e.cause.direction, e.cause.function) for e in trace.events]
            return seen, float(norm), events

        (wanted, norm, events), (found, other_norm, other_events) = several("eager"), several("static")
        return same(wanted, found), norm == other_norm, events == other_events, len(events) > 0

    assert run_ranks(4, run) == [(True, True, True, True)] * 4


def test_under_strict_a_model_runs_eagerly():
    def run():
        model, optimizer = build(Pointwise(), "static")
        batches = batches_of(3)
        train(model, optimizer, batches[:2])
        with strict():
            out = model(batches[2])
        return type(out) is DTensor

    assert run_ranks(4, run) == [True] * 4


def test_parameters_stay_sharded_for_everybody_else():
    def run():
        model, optimizer = build(Pointwise(), "static")
        train(model, optimizer, batches_of(3))
        mesh = model._vescale.device_mesh
        twin, x = copy.deepcopy(model.norm), distribute_tensor(batches_of(1)[0], mesh, (Shard(0), Replicate()))
        return (
            all(type(p) is DTensor for p in model.parameters()),
            list(model.state_dict()) == list(Net(Pointwise()).state_dict()),
            repr(model) == repr(Net(Pointwise())),
            torch.equal(twin(x).to_local(), model.norm(x).to_local()),
        )

    assert run_ranks(4, run) == [(True, True, True, True)] * 4


def test_an_exception_in_a_region_leaves_everything_as_it_was():
    class Raises(nn.Module):
        wanted: ClassVar = [False]

        def forward(self, x):
            y = x * 2
            if self.wanted[0]:
                raise ValueError("on purpose")
            return y

    def run():
        model, optimizer = build(Raises(), "static")
        batches = batches_of(4)
        train(model, optimizer, batches[:2])
        Raises.wanted[0] = True
        with pytest.raises(ValueError, match="on purpose"):
            model(batches[2])
        Raises.wanted[0] = False
        kinds = {type(p) for p in model.parameters()}
        train(model, optimizer, batches[3:])
        return kinds == {DTensor}

    assert run_ranks(4, run) == [True] * 4


def test_errors():
    def not_parallelized():
        static(Net(Pointwise()))

    assert "not parallelized" in raises_on_all(1, PlanError, not_parallelized)

    def no_mode():
        parallelize(PLAN, Net(Pointwise()), mode="fast")

    assert "mode" in raises_on_all(4, PlanError, no_mode)

"""Static mode where something changes after the recording, or outlives a call: eager's results, or a report."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor
from vescale_dtensor.testing import in_turns, run_ranks, warm_up
from vescale_plans import Boundary, Plan, StaticWarning, explain_static, parallelize, static

warm_up("torch._dynamo", "vescale_plans")

WIDTH, STEPS, AT = 8, 6, 3
PLAN = Plan(
    mesh={"dp": 2, "tp": 2},
    parameters={"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "*": {}},
    boundaries={"up": Boundary(input={"tp": Replicate()}), "down": Boundary(output={"tp": Replicate()})},
)


class Net(nn.Module):
    """Columns, something in the middle whose last dim is sharded, rows."""

    def __init__(self, middle):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = middle
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.last(x + self.down(self.middle(self.up(self.norm(x)))))


def train(middle, mode, change=None, verify_every=0, prepare=None):
    """Of each step the output and every gradient as this rank's shards; the model; what was warned of.

    `change(model)` is called before step AT, `prepare(model)` before the first.
    """
    torch.manual_seed(0)
    model, _ = parallelize(PLAN, Net(middle))
    if mode == "static":
        static(model, verify_every=verify_every)
    if prepare is not None:
        prepare(model)
    generator, seen = torch.Generator().manual_seed(3), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if step == AT and change is not None:
                change(model)
            out = model(torch.randn(4, 3, WIDTH, generator=generator, dtype=torch.float32))
            out.square().mean().backward()
            seen.append(local(out).clone())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    seen.append(local(parameter.grad).clone())
                    with torch.no_grad():
                        local(parameter).sub_(local(parameter.grad), alpha=0.1)
                parameter.grad = None
    return seen, model, [str(w.message) for w in caught if issubclass(w.category, StaticWarning)]


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def same(one, other):
    return len(one) == len(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other))


def verdict(model, name="middle"):
    found, reason = explain_static(model).calls[name]
    return found, reason.what if reason else ""


# --- modules that keep, answer and ask in unusual ways ---------------------------------


class GivesADict(nn.Module):
    class Inner(nn.Module):
        def forward(self, *, x, factor):
            return {"twice": x * factor, "more": [x.tanh(), None]}

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        found = self.inner(x=x, factor=2)
        return found["twice"] + found["more"][0]


class GradModesInside(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            z = torch.sigmoid(x)
        return x + y * z


class KeepsABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x / self.calls


class HooksATensor(nn.Module):
    """The hook sees a gradient: its sum is the whole's."""

    def __init__(self, seen):
        super().__init__()
        self.seen = [seen]

    def forward(self, x):
        y = x * 2
        y.register_hook(lambda grad: self.seen[0].append(float(grad.sum())))
        return y.tanh()


KEPT = []


def appends_outside():
    KEPT.clear()

    class Appends(nn.Module):
        def forward(self, x):
            y = x * 2
            KEPT.append(y.detach())
            return y

    return Appends()


def appends_to_a_closure():
    kept = []

    class Appends(nn.Module):
        def forward(self, x):
            y = x * 2
            kept.append(y.detach())
            return y

    return Appends()


class FillsWhatItIsGiven(nn.Module):
    class Inner(nn.Module):
        def forward(self, x, found):
            found.append(x * 2)
            return x + 1

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        found = []
        return self.inner(x, found) + found[0]


class Far:
    """Something that no fingerprint of a module looks into."""

    def __init__(self):
        self.kept = None


FAR = Far()


class KeepsFarAway(nn.Module):
    def forward(self, x):
        FAR.kept = x * 2
        return FAR.kept + 1


def of_numpy():
    import numpy

    numpy.random.seed(0)

    class Draws(nn.Module):
        def forward(self, x):
            return x * float(numpy.random.rand())

    return Draws()


class TwiceTheSame(nn.Module):
    """One tensor as both arguments, then two: what is converted is another."""

    class Inner(nn.Module):
        def forward(self, x, y):
            return x * 2 + y.sum(-1, keepdim=True).tanh()

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()
        self.apart = False

    def forward(self, x):
        return self.inner(x, x + 1 if self.apart else x)


KEEPING = {  # how it is made, whether it runs static, what the reason says
    "a dict, and arguments by name": (GivesADict, True, ""),
    "grad modes inside": (GradModesInside, True, ""),
    "a buffer written": (KeepsABuffer, False, "writes in place to a tensor that it did not make"),
    "a global list": (appends_outside, False, "calls `append` of a list that outlives the call"),
    "a list around the forward": (appends_to_a_closure, False, "calls `append` of a list that outlives the call"),
    "a list that it is given": (FillsWhatItIsGiven, False, "calls middle.inner, which is eager"),
    "an object elsewhere": (KeepsFarAway, False, "sets `FAR.kept`"),
    "numpy's random numbers": (of_numpy, False, "calls RandomState.rand, which cannot be seen into"),
}


@pytest.mark.parametrize("case", list(KEEPING))
def test_what_outlives_a_call_is_as_in_eager_mode(case):
    make, is_static, why = KEEPING[case]

    def run():
        wanted, *_ = train(make(), "eager")
        count = len(KEPT)
        found, model, _ = train(make(), "static")
        kept = type(FAR.kept) if FAR.kept is not None else DTensor
        return same(wanted, found), len(KEPT) == count, kept, verdict(model)

    for equal, as_often, kept, (found, reason) in run_ranks(4, run):
        assert equal and as_often and kept is DTensor
        assert (found == "static") == is_static and why in reason, (found, reason)


class Slope(nn.PReLU):
    pass


class ChangesItsChild(nn.Module):
    """In the first forward another module takes a grandchild's place and its parameter, as where BigBird finds its
    input too short for sparse attention."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.PReLU())

    def forward(self, x):
        if not isinstance(self.inner[0], Slope):
            now = Slope()
            now.weight, self.inner[0] = self.inner[0].weight, now
        return self.inner(x)


def test_a_module_that_a_forward_puts_in_place_is_met_there():
    def run():
        wanted, *_ = train(ChangesItsChild(), "eager")
        found, *_ = train(ChangesItsChild(), "static")
        return same(wanted, found)

    assert all(run_ranks(4, run))


def test_a_hook_on_a_tensor_sees_the_whole_gradient():
    def run():
        sums = [], []
        outs = [train(HooksATensor(seen), mode)[0] for seen, mode in zip(sums, ("eager", "static"))]
        return same(*outs), sums[0] == sums[1], len(sums[0]) == STEPS

    assert run_ranks(4, run) == [(True, True, True)] * 4


# --- what is done to a model between calls ---------------------------------------------


class Flagged(nn.Module):
    """Another branch, which sums over shards, once a flag of it is set."""

    def __init__(self):
        super().__init__()
        self.whole, self.extra, self.factor = False, None, 2.0
        self.drop = nn.Dropout(0.5)
        self.register_buffer("offset", torch.ones(()))

    def forward(self, x):
        x = self.drop(x * self.factor) + self.offset
        if self.whole:
            x = x - x.mean(-1, keepdim=True)
        return x if self.extra is None else x + self.extra


class Means(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


def means(self, x):
    return x - x.mean(-1, keepdim=True)


def set_attribute(name, value):
    return lambda model: setattr(model.middle, name, value)


def give_a_tensor(model):
    mesh = model._vescale.device_mesh
    model.middle.extra = distribute_tensor(torch.arange(4.0 * WIDTH), mesh, (Replicate(), Shard(0)))


def replace_a_weight(model):
    model.norm.weight = nn.Parameter(torch.linspace(1, 2, WIDTH))


def replace_a_sharded_weight(model):
    model.up.weight = nn.Parameter(model.up.weight.detach().clone() * 2)


def tie(model):
    model.last.weight = model.norm.weight


def freeze(model):
    model.up.weight.requires_grad_(False)


def replace_a_module(model):
    model.middle = Means()


def add_a_module(model):
    model.middle.drop.another = nn.Identity()  # in the table of a leaf that had none


def replace_a_buffer(model):
    model.middle.offset = torch.full((), 3.0)


def write_a_buffer(model):
    model.middle.offset.mul_(4)


def patch_a_forward(model):
    model.middle.forward = means.__get__(model.middle)


def hook_backward(model):
    model.middle.register_full_backward_hook(lambda module, into, out: tuple(g * 2 for g in into))


def hook_a_parameter(model):
    model.up.weight.register_hook(lambda grad: grad * 2)


CHANGES = {
    "a flag": set_attribute("whole", True),
    "a number": set_attribute("factor", 3.0),
    "a tensor where none was": give_a_tensor,
    "a weight replaced": replace_a_weight,
    "a sharded weight replaced": replace_a_sharded_weight,
    "weights tied": tie,
    "a weight frozen": freeze,
    "a module replaced": replace_a_module,
    "a module added": add_a_module,
    "a buffer replaced": replace_a_buffer,
    "a buffer written": write_a_buffer,
    "a forward replaced": patch_a_forward,
    "a leaf in evaluation": lambda model: model.middle.drop.eval(),
    "a leaf's probability": lambda model: setattr(model.middle.drop, "p", 0.25),
    "a backward hook": hook_backward,
    "a parameter's hook": hook_a_parameter,
    "the default dtype": lambda model: torch.set_default_dtype(torch.float64),
}


@in_turns(3)
@pytest.mark.parametrize("case", list(CHANGES))
def test_a_change_between_calls_shows_at_once(case):
    def run():
        seen = []
        for mode in ("eager", "static"):
            try:
                seen.append(train(Flagged(), mode, CHANGES[case]))
            finally:
                torch.set_default_dtype(torch.float32)
        (wanted, *_), (found, model, told) = seen
        plain, *_ = train(Flagged(), "eager")
        return same(wanted, found), same(wanted, plain), told, verdict(model, "up")[0]

    # Hooks on gradients run in one order on all ranks, which no region keeps.
    wanted = "eager" if case == "a parameter's hook" else "static"
    for equal, nothing_changed, told, up in run_ranks(4, run):
        assert equal and told == [] and up == wanted
        assert nothing_changed == (case in ("the default dtype", "a module added"))


def test_a_forward_replaced_on_the_class_is_found_at_once():
    class Patched(nn.Module):
        def forward(self, x):
            return x * 2

    plain = Patched.forward

    def patch(model):
        Patched.forward = means

    def run():
        seen = []
        for mode in ("eager", "static"):
            try:
                seen.append(train(Patched(), mode, patch))
            finally:
                Patched.forward = plain
        (wanted, *_), (found, model, told) = seen
        return same(wanted, found), told, verdict(model)[0]

    for equal, told, found in run_ranks(4, run):
        assert equal and found == "eager" and told == []


def test_one_tensor_as_two_arguments_is_told_from_two():
    def run():
        change = set_attribute("apart", True)
        wanted, *_ = train(TwiceTheSame(), "eager", change)
        return same(wanted, train(TwiceTheSame(), "static", change)[0])

    assert run_ranks(4, run) == [True] * 4


def test_verified_calls_are_no_misses():
    def run():
        torch.manual_seed(0)
        model, _ = parallelize(PLAN, Net(nn.GELU()))
        static(model, verify_every=2)
        for step in range(24):
            model(torch.full((4, 3, WIDTH), float(step)))
        return verdict(model)[0], model._vescale.static.root.recordings

    assert run_ranks(4, run) == [("static", 1)] * 4


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast_and_inference_take_turns(where):
    class Casts(nn.Module):
        inside = False

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
                return F.gelu(F.linear(x * 2, torch.ones(4, x.shape[-1], dtype=x.dtype)).sum() + x)

    def run():
        def turns(mode):
            torch.manual_seed(0)
            model, _ = parallelize(PLAN, Net(Casts()))
            if mode == "static":
                static(model)
            seen = []
            for step, batch in enumerate(torch.randn(9, 4, 3, WIDTH, generator=torch.Generator().manual_seed(1))):
                model.middle.inside = where == "inside" and step % 3 == 1
                with (
                    torch.autocast("cpu", torch.bfloat16, enabled=where == "around" and step % 3 == 1),
                    torch.inference_mode(step % 3 == 2),
                ):
                    seen.append(local(model(batch)).clone())
            return seen

        return same(turns("eager"), turns("static"))

    assert run_ranks(4, run) == [True] * 4


@in_turns(3)
@pytest.mark.parametrize("frozen", ["norm", "up", "down", "last"])
def test_what_was_frozen_when_it_was_recorded_trains_when_it_is_not(frozen):
    """A norm before columns had lost the other ranks' part of its gradient."""

    def work():
        def freeze(model):
            model.get_submodule(frozen).requires_grad_(False)

        def thaw(model):
            model.requires_grad_(True)

        for prepare, change in ((freeze, thaw), (None, freeze)):
            wanted, _, _ = train(nn.GELU(), "eager", change, prepare=prepare)
            found, _, _ = train(nn.GELU(), "static", change, prepare=prepare)
            assert same(found, wanted)

    run_ranks(4, work)

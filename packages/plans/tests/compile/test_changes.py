"""Compile mode where something outlives a call, or changes between calls: eager's results, and nothing twice."""

import sys
import threading
import types
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor
from vescale_plans import Plan, parallelize
from vescale_plans._capture.explain import compiled
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, STEPS, AT = 8, 6, 3
PLAN = Plan(mesh={"dp": 1}, parameters={"*": {}})


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.middle = middle
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.last(x + self.down(self.middle(self.up(self.norm(x)))))


def named():
    """A compiler imports the module of a forward's globals; a rank has these by value, and the module perhaps not."""
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).__dict__.update(globals())


def train(middle, mode, change=None, prepare=None):
    """Of each step the output and every gradient; the model.

    `change(model)` is called before step AT, `prepare(model)` before the first.
    """
    named()
    torch.compiler.reset()
    torch.manual_seed(0)
    model, _ = parallelize(PLAN, Net(middle))
    if mode == "compile":
        compiled(model, "aot_eager")
    if prepare is not None:
        prepare(model)
    generator, seen = torch.Generator().manual_seed(3), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
    return seen, model


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def same(one, other):
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(one, other)
    )


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


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Halved(Squared):
    """The compiler ends in an error of its own: a backward calls that of the class that it extends."""

    @staticmethod
    def backward(ctx, grad):
        return Squared.backward(ctx, grad) / 2


class Halves(nn.Module):
    def forward(self, x):
        return Halved.apply(x)


class Reenters(nn.Module):
    """A reentrant checkpoint gives its weights no gradient unless what it is given has one."""

    def __init__(self, is_given_one):
        super().__init__()
        self.inner, self.is_given_one = nn.Linear(4 * WIDTH, 4 * WIDTH), is_given_one
        nn.init.constant_(self.inner.weight, 0.1)

    def forward(self, x):
        return x + checkpoint(self.inner, x if self.is_given_one else x.detach(), use_reentrant=True)


KEEPING = {  # how it is made, and whether calls are compiled
    "a dict, and arguments by name": (GivesADict, True),
    "grad modes inside": (GradModesInside, True),
    "a buffer written": (KeepsABuffer, False),
    "a global list": (appends_outside, False),
    "a list around the forward": (appends_to_a_closure, False),
    "a list that it is given": (FillsWhatItIsGiven, True),
    "an object elsewhere": (KeepsFarAway, False),
    "numpy's random numbers": (of_numpy, False),
    "a child put in place": (ChangesItsChild, False),
    "one tensor as two arguments": (TwiceTheSame, True),
    "a backward that calls another": (Halves, False),
    "a reentrant checkpoint": (partial(Reenters, True), True),
    "one that is given no gradient": (partial(Reenters, False), False),
}


def kept(names):
    found = {}
    for name in names:
        make, _ = KEEPING[name]
        change = set_attribute("apart", True) if make is TwiceTheSame else None
        wanted, _ = train(make(), "eager", change)
        count = len(KEPT)
        got, model = train(make(), "compile", change)
        kinds = {type(one) for one in (*KEPT, FAR.kept) if one is not None}
        captured = model._vescale.captured
        found[name] = same(wanted, got) and len(KEPT) == count and kinds <= {DTensor}, captured.last == ""
    return found


def test_what_outlives_a_call_is_as_in_eager_mode():
    (found,) = run_ranks(1, kept, list(KEEPING), timeout=300)
    assert found == {name: (True, is_compiled) for name, (_, is_compiled) in KEEPING.items()}


def hooked():
    sums = [], []
    outs = [train(HooksATensor(seen), mode)[0] for seen, mode in zip(sums, ("eager", "compile"))]
    return same(*outs), torch.allclose(*map(torch.tensor, sums), 1e-5, 1e-6), len(sums[0]) == STEPS


def test_a_hook_on_a_tensor_sees_the_whole_gradient():
    assert run_ranks(1, hooked) == [(True, True, True)]


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
    model.middle.extra = torch.arange(4.0 * WIDTH)


def replace_a_weight(model):
    model.norm.weight = nn.Parameter(torch.linspace(1, 2, WIDTH))


def double_a_weight(model):
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
    "a weight replaced by its double": double_a_weight,
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


def changed(names):
    found = {}
    for name in names:
        seen = []
        for mode in ("eager", "compile"):
            try:
                seen.append(train(Flagged(), mode, CHANGES[name]))
            finally:
                torch.set_default_dtype(torch.float32)
        (wanted, _), (got, model) = seen
        plain, _ = train(Flagged(), "eager")
        found[name] = same(wanted, got), same(wanted, plain), model._vescale.captured.graphs > 0
    return found


def test_a_change_between_calls_shows_at_once():
    (found,) = run_ranks(1, changed, list(CHANGES), timeout=300)
    unseen = ("the default dtype", "a module added")
    assert found == {name: (True, name in unseen, True) for name in CHANGES}


class Casts(nn.Module):
    inside = False

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            return F.gelu(F.linear(x * 2, torch.ones(4, x.shape[-1], dtype=x.dtype)).sum() + x)


def turns(where, mode):
    torch.manual_seed(0)
    model, _ = parallelize(PLAN, Net(Casts()))
    if mode == "compile":
        compiled(model, "aot_eager")
    seen = []
    for step, batch in enumerate(torch.randn(9, 4, 3, WIDTH, generator=torch.Generator().manual_seed(1))):
        model.middle.inside = where == "inside" and step % 3 == 1
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=where == "around" and step % 3 == 1),
            torch.inference_mode(step % 3 == 2),
        ):
            seen.append(local(model(batch)).clone())
    return seen


def takes_turns(where):
    named()
    torch.compiler.reset()
    return same(turns(where, "eager"), turns(where, "compile"))


@pytest.mark.parametrize("where", ["inside", "around"])
def test_autocast_and_inference_take_turns(where):
    assert run_ranks(1, takes_turns, where) == [True]


def thawed(frozen):
    def freeze(model):
        model.get_submodule(frozen).requires_grad_(False)

    def thaw(model):
        model.requires_grad_(True)

    found = []
    for prepare, change in ((freeze, thaw), (None, freeze)):
        wanted, _ = train(nn.GELU(), "eager", change, prepare=prepare)
        found.append(same(train(nn.GELU(), "compile", change, prepare=prepare)[0], wanted))
    return found


@pytest.mark.parametrize("frozen", ["norm", "up"])
def test_what_was_frozen_trains_when_it_is_not(frozen):
    assert run_ranks(1, thawed, frozen) == [[True, True]]


# --- the model itself --------------------------------------------------------------------


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.held = Far()
        self.held.kept = torch.arange(3.0)

    def forward(self, x):
        return {"out": self.down(self.up(x).tanh()), "held": self.held, "up": self.up.weight}


def rooted():
    named()
    torch.compiler.reset()
    torch.manual_seed(0)
    model, _ = parallelize(PLAN, Root())
    compiled(model, "aot_eager")
    return model


def returned():
    model = rooted()
    found = [model(torch.ones(2, WIDTH)) for _ in range(2)][1]
    return type(found["held"].kept), found["up"] is model.up.weight, type(found["out"]), model._vescale.captured.graphs


def test_what_is_returned_beside_results_is_the_programs_own():
    assert run_ranks(1, returned) == [(torch.Tensor, True, DTensor, 1)]


def replaced():
    model, found, before = rooted(), [], Root.forward
    try:
        for step in range(4):
            if step == 2:
                Root.forward = lambda self, x: {"out": self.up(x).sum() * 3}
            found.append(local(model(torch.ones(2, WIDTH))["out"]).sum())
        wanted = local(model.up(torch.ones(2, WIDTH))).sum() * 3
    finally:
        Root.forward = before
    return torch.allclose(found[2], wanted), torch.allclose(found[3], wanted), model._vescale.captured.graphs


def test_a_forward_replaced_on_the_roots_class_is_taken():
    assert run_ranks(1, replaced) == [(True, True, 2)]


def threaded():
    model = rooted()
    batches = torch.randn(8, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = [local(Root.forward(model, one)["out"]) for one in batches]
    found = [None] * len(batches)

    def call(at):
        for _ in range(3):
            found[at] = local(model(batches[at])["out"])

    threads = [threading.Thread(target=call, args=(at,)) for at in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return all(torch.allclose(*pair, 1e-5, 1e-6) for pair in zip(found, wanted))


def test_threads_that_call_one_model_wait_for_one_another():
    assert run_ranks(1, threaded) == [True]


class Recomputes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(lambda x: F.dropout(self.down(self.up(x).tanh()), 0.5), x, use_reentrant=False)


def recomputed():
    seen = []
    for mode in ("eager", "compile"):
        named()
        torch.compiler.reset()
        torch.manual_seed(0)
        model, optimizer = parallelize(PLAN, Recomputes(), lambda p: torch.optim.SGD(p, lr=0.1))
        if mode == "compile":
            compiled(model, "aot_eager")
        found = []
        for step in range(4):
            out = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)))
            out.square().mean().backward()
            found += [local(out).clone(), *(local(p.grad).clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        seen.append(found)
    return same(*seen), model._vescale.captured.graphs


def test_a_checkpoint_inside_draws_its_numbers_again():
    assert run_ranks(1, recomputed) == [(True, 1)]


class Scale(nn.Parameter):
    pass


class AsksForTheClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale(torch.full((4 * WIDTH,), 2.0))

    def forward(self, x):
        return x * self.scale if isinstance(self.scale, Scale) else x.tanh()


def of_a_class():
    named()
    (wanted, _), (found, model) = (train(AsksForTheClass(), mode) for mode in ("eager", "compile"))
    return same(wanted, found), model._vescale.captured.last


def test_parameters_of_a_class_of_the_users_keep_it():
    assert run_ranks(1, of_a_class) == [(True, "a parameter is of the class Scale")]

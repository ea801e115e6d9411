"""Optimizers of users: which are elementwise, that all come out as on one device, and what they send."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import FallbackWarning, comm_trace
from vescale_plans import Plan, PlanError, parallelize, register_elementwise
from vescale_plans._zero.optim_kinds import elementwise_methods
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")


class Own(torch.optim.Optimizer):
    """As most packages write theirs: a loop over groups and parameters, states made at the first step."""

    def __init__(self, params, **options):
        super().__init__(params, {"lr": 1e-2} | options)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss


class Lion(Own):
    def update(self, p, grad, state, group):
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * 0.1)
        update = state["exp_avg"].clone().mul_(0.9).add_(grad, alpha=0.1).sign_()
        p.add_(update, alpha=-group["lr"])
        state["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


class Adan(Own):
    """States of three moments, and the last gradient."""

    def update(self, p, grad, state, group):
        if not state:
            state["step"] = 0
            state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq")}
            state["previous"] = grad.clone()
        state["step"] += 1
        diff = grad - state["previous"]
        state["exp_avg"].lerp_(grad, 0.02)
        state["exp_avg_diff"].lerp_(diff, 0.08)
        look = grad + 0.92 * diff
        state["exp_avg_sq"].mul_(0.99).addcmul_(look, look, value=0.01)
        root = (state["exp_avg_sq"].sqrt() / (1 - 0.99 ** state["step"]) ** 0.5).add_(1e-8)
        p.mul_(1 - group["lr"] * 0.02)
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - 0.98 ** state["step"]))
        p.addcdiv_(state["exp_avg_diff"], root, value=-group["lr"] * 0.92 / (1 - 0.92 ** state["step"]))
        state["previous"].copy_(grad)


class AdEMAMix(Own):
    """Two averages of different length, the step counted by tensor."""

    def update(self, p, grad, state, group):
        if not state:
            state |= {name: torch.zeros_like(p) for name in ("fast", "slow", "nu")} | {"t": torch.tensor(0.0)}
        state["t"] += 1
        t = state["t"].item()
        state["fast"].lerp_(grad, 0.1)
        state["slow"].lerp_(grad, 1e-3)
        state["nu"].mul_(0.999).addcmul_(grad, grad, value=1e-3)
        denominator = (state["nu"].sqrt() / (1 - 0.999**t) ** 0.5) + 1e-8
        p.add_((state["fast"] / (1 - 0.9**t) + 5.0 * state["slow"]) / denominator, alpha=-group["lr"])


class Sophia(Own):
    """A second method, which looks at gradients between steps."""

    @torch.no_grad()
    def update_hessian(self, scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self._of(p)
                    state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01 * scale)

    def _of(self, p):
        state = self.state[p]
        if not state:
            state |= {"exp_avg": torch.zeros_like(p), "hessian": torch.zeros_like(p)}
        return state

    def update(self, p, grad, state, group):
        state = self._of(p)
        state["exp_avg"].lerp_(grad, 0.04)
        ratio = (state["exp_avg"].abs() / (0.04 * state["hessian"] + 1e-15)).clamp_(max=1.0)
        p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Byte(Own):
    """Moments kept in eight bits of a fixed scale: elementwise, of another dtype than the parameter."""

    def update(self, p, grad, state, group):
        if not state:
            state["codes"] = torch.zeros_like(p, dtype=torch.int8)
        moment = state["codes"].to(p.dtype).mul_(1 / 64).mul_(0.9).add_(grad)
        state["codes"].copy_(moment.mul(64).round().clamp_(-127, 127))
        p.add_(moment, alpha=-group["lr"])


class AbsMax(Own):
    """Eight bits scaled by the largest of the tensor: not elementwise, and right where nobody says that it is."""

    def update(self, p, grad, state, group):
        if not state:
            state["codes"], state["top"] = torch.zeros_like(p, dtype=torch.int8), torch.ones(())
        moment = state["codes"].to(p.dtype).mul_(state["top"] / 127).mul_(0.9).add_(grad)
        state["top"] = moment.abs().max().clamp(min=1e-12)
        state["codes"] = (moment / state["top"] * 127).round().to(torch.int8)
        p.add_(moment, alpha=-group["lr"])


class MyAdamW(torch.optim.AdamW):
    pass


class Scheduled(torch.optim.AdamW):
    """Its own constructor, groups and names; the step is AdamW's."""

    def __init__(self, params, lr=1e-2, warmup=3):
        super().__init__(params, lr=lr, betas=(0.8, 0.95))
        self.warmup = warmup

    def add_param_group(self, group):
        super().add_param_group({"weight_decay": 0.05} | group)

    def __setstate__(self, state):
        super().__setstate__(state)

    def rate(self):
        return self.param_groups[0]["lr"]


class Normed(torch.optim.AdamW):
    """Looks at whole gradients in a piece of the step that is not `step`."""

    def _init_group(self, group, *lists):
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad / (p.grad.norm() + 1e-6)
        return super()._init_group(group, *lists)


class Clipped(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / (p.grad.norm() + 1e-6)
        return super().step(closure)


class Mixed(Normed, MyAdamW):
    pass


KNOWN = {Lion: (), Adan: (), AdEMAMix: (), Sophia: ("update_hessian",), Byte: ()}
ELEMENTWISE = [torch.optim.AdamW, MyAdamW, Scheduled, *KNOWN]
OTHERS = [Normed, Clipped, Mixed, AbsMax]
STEPS = 5


def register():
    for kind, methods in KNOWN.items():
        register_elementwise(kind, methods=methods)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x)) * self.gain
        return x.square().mean()


def train(kind, zero, known=True):
    """Losses, parameters, and how many collectives a step takes."""
    if known:
        register()
    torch.manual_seed(0)
    model, counts = Net(), []
    if zero is None:
        optimizer = kind(model.parameters(), lr=1e-2)
    else:
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
        model, optimizer = parallelize(plan, model, lambda params: kind(params, lr=1e-2))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error" if known else "ignore", FallbackWarning)
        for step in range(STEPS):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = model(x)
            loss.backward()
            if kind is Sophia and step % 2 == 0:
                optimizer.update_hessian(scale=2.0)
            with comm_trace() as trace:
                optimizer.step()
            counts.append(len(trace))
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    full = [p.full_tensor() if zero is not None else p for p in model.parameters()]
    return losses, [p.detach().clone() for p in full], counts[-1]


def assert_as_alone(kind, zero, found):
    losses, parameters, _ = train(kind, None)
    torch.testing.assert_close(found[0], losses, rtol=1e-5, atol=0)
    for mine, wanted in zip(found[1], parameters, strict=True):
        assert torch.norm(mine - wanted) <= 1e-4 * torch.norm(wanted)


@in_turns(3)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_elementwise_ones_step_on_flat_parts_and_send_what_adamw_does(kind, zero):
    found = run_ranks(2, train, kind, zero)[0]
    assert_as_alone(kind, zero, found)
    assert found[2] == run_ranks(2, train, torch.optim.AdamW, zero)[0][2]


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("kind", [*OTHERS, Lion, Sophia], ids=lambda kind: kind.__name__)
def test_what_nobody_calls_elementwise_comes_out_as_on_one_device(kind, zero):
    assert_as_alone(kind, zero, run_ranks(2, train, kind, zero, known=False)[0])


def made(kind, **options):
    return kind([nn.Parameter(torch.ones(2))], lr=0.1, **options)


def test_a_subclass_is_as_its_base_unless_it_touches_what_the_step_runs_through():
    register()
    for kind in ELEMENTWISE:
        assert elementwise_methods(made(kind)) is not None, kind
    for kind in OTHERS:
        assert elementwise_methods(made(kind)) is None, kind
    assert elementwise_methods(made(type("Deeper", (Scheduled, MyAdamW), {}))) == ()
    assert elementwise_methods(made(type("Bolder", (Sophia,), {}))) == ("update_hessian",)
    for name in ("step", "_init_group", "__getattribute__", "_cuda_graph_capture_health_check", "profile_hook_step"):
        if hasattr(torch.optim.AdamW, name):
            kind = type("Odd", (torch.optim.AdamW,), {name: lambda self, *args: None})
            assert elementwise_methods(object.__new__(kind)) is None, name
    for name in ("update", "step", "_of", "update_hessian"):
        assert elementwise_methods(made(type("Odd", (Sophia,), {name: lambda self, *args, **named: None}))) is None
    late = made(MyAdamW)
    late._init_group = lambda *args: None
    assert elementwise_methods(late) is None


def test_torch_wraps_the_step_of_a_class_that_it_meets():
    """For its profiler; a wrapper of the user's is a step of its own."""
    first = type("First", (torch.optim.RMSprop,), {})
    made(first), made(first)
    assert elementwise_methods(made(first)) == ()

    class Wrapped(torch.optim.RMSprop):
        step = torch.no_grad()(torch.optim.RMSprop.step)

    assert elementwise_methods(made(Wrapped)) is None


@pytest.mark.parametrize(
    "wrong, methods", [(nn.Linear, ()), (3, ()), (Lion, ("hessian",)), (getattr(torch.optim, "Muon", 0), ())]
)
def test_what_cannot_be_registered(wrong, methods):
    with pytest.raises(PlanError, match="register_elementwise"):
        register_elementwise(wrong, methods=methods)


def test_as_a_decorator():
    @register_elementwise(methods=("update",))
    class Decorated(Lion):
        pass

    assert elementwise_methods(made(Decorated)) == ("update",)


def states(kind, materialize, hook=None):
    register()
    torch.manual_seed(0)
    _, optimizer = parallelize(
        Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2), Net(), lambda params: kind(params, lr=1e-2)
    )
    if hook is not None:
        optimizer.register_step_pre_hook(hook)
    found = optimizer.sharded_state_dict(materialize=materialize)["state"]
    return {key: value for key, value in found["layers.0.weight"].items() if key in ("step", "t")}


def test_counters_of_any_name_begin_at_zero_when_states_are_made_early():
    for kind, key in ((Adan, "step"), (AdEMAMix, "t"), (torch.optim.AdamW, "step")):
        assert float(run_ranks(2, states, kind, True)[0][key]) == 0, kind


def test_states_are_made_early_without_the_users_hooks():
    """What is stepped on there are zeros of nobody's."""

    def refuse(*args):
        raise AssertionError("a hook of the user's saw a step that is none")

    for kind in (Adan, torch.optim.AdamW):
        assert float(run_ranks(2, states, kind, True, refuse)[0]["step"]) == 0, kind


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_all_that_an_optimizer_holds_is_replaced_after_parallelize(zero, kind):
    """A head that was exchanged, and is all that is trained from then on."""

    def trained(parallel):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
        if parallel:
            model, optimizer = parallelize(Plan({"dp": 2}, {"*": {}}, zero=zero), model, lambda p: kind(p, lr=0.1))
        else:
            optimizer = kind(model.parameters(), lr=0.1)
        head = nn.Linear(3, 2)
        optimizer.param_groups[0]["params"] = list(head.parameters())
        optimizer.state.clear()
        for seed in range(3):
            torch.manual_seed(seed)
            head(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        if parallel:
            with pytest.raises(PlanError, match="did not have when it was parallelized"):
                optimizer.sharded_state_dict()
        return head.weight.detach(), optimizer.state_dict()["state"]

    weight, state = trained(False)
    for found, held in run_ranks(2, trained, True):
        assert torch.equal(found, weight) and held.keys() == state.keys()
        for own, other in zip(held.values(), state.values()):
            torch.testing.assert_close(own, other)

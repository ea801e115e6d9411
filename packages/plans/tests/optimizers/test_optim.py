"""Optimizers over buffers: what they are given, that they come out as on one device, and their state."""

import copy
import sys
import unittest.mock
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor import DTensor, OperatorError, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_plans import Plan, PlanError, Precision, dry_run, no_sync, parallelize
from vescale_testkit import in_turns, raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x)) * self.gain
        return x.square().mean()


TP = {"layers.*.weight": {"tp": Shard(0)}, "layers.*.bias": {"tp": Shard(0)}, "*": {}}


def plan_of(zero, **more):
    return Plan(mesh={"dp": 2, "tp": 2}, parameters=TP, zero=zero, **more)


def batch(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(plan, optimizer_fn, steps=4, closure=False):
    torch.manual_seed(0)
    model = Net()
    if plan is None:
        optimizer = optimizer_fn(model.parameters())
    else:
        model, optimizer = parallelize(plan, model, optimizer_fn)
    losses = []
    for step in range(steps):

        def once(step=step):
            optimizer.zero_grad()
            loss = model(batch(step))
            loss.backward()
            return loss

        if closure:
            losses.append(float(optimizer.step(once)))
        else:
            losses.append(once().item())
            optimizer.step()
    whole = {n: p.detach() if plan is None else p.detach().full_tensor() for n, p in model.named_parameters()}
    return losses, whole, model, optimizer


def assert_close(found, wanted, loss=1e-5, parameter=1e-4):
    assert max(abs(a - b) / abs(b) for a, b in zip(found[0], wanted[0])) <= loss
    errors = {n: ((found[1][n] - p).norm() / p.norm()).item() for n, p in wanted[1].items()}
    assert max(errors.values()) <= parameter, errors


ELEMENTWISE = {
    "ASGD": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 0.02, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "foreach": True},
    "AdamW ": {"lr": 0.01, "fused": True},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.003, "momentum": 0.9},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}


@in_turns(3)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_elementwise_optimizer(zero):
    def run():
        for name, options in ELEMENTWISE.items():
            make = partial(getattr(torch.optim, name.strip()), **options)
            found, wanted = train(plan_of(zero), make, closure=name == "SGD"), train(None, make)
            assert_close(found, wanted)
            assert isinstance(found[3], getattr(torch.optim, name.strip()))

    run_ranks(4, run, timeout=120)


def test_rprop_by_the_gradients_signs():
    """Its step is the sign of a gradient: near zero a rounding decides it, so that only the first is compared."""

    def run():
        make = partial(torch.optim.Rprop, lr=0.01)
        assert_close(train(plan_of(3), make, steps=1), train(None, make, steps=1))

    run_ranks(4, run)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("option", "name"), [("foreach", "_foreach_addcdiv_"), ("fused", "_fused_adamw_")])
def test_the_foreach_and_fused_paths_run(option, name):
    def run():
        for zero in (0, 3):
            *_, model, optimizer = train(plan_of(zero), partial(torch.optim.AdamW, **{option: True}), steps=1)
            model(batch(7)).backward()
            with Names() as names:
                optimizer.step()
            assert name in names.seen, names.seen

    run_ranks(4, run)


def test_inside_a_step_parameters_are_plain_and_outside_the_models_own():
    def run():
        *_, model, optimizer = train(plan_of(3), partial(torch.optim.SGD, lr=0.1), steps=1)
        seen = []
        module = sys.modules[torch.optim.SGD.__module__]  # which torch.optim does not show
        compute = module.sgd

        def watched(parameters, *args, **kwargs):
            seen.extend(map(type, parameters))
            return compute(parameters, *args, **kwargs)

        model(batch(7)).backward()
        with unittest.mock.patch.object(module, "sgd", watched):
            optimizer.step()
        assert seen == [nn.Parameter] * 7  # which is what torch picks its fast paths by
        shown = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(shown, model.parameters(), strict=True))
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    run_ranks(4, run)


def grouped(parameters):
    parameters = list(parameters)
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.02}], lr=0.01)


def test_groups_and_schedulers_stay_as_users_made_them():
    def run():
        def scheduled(plan):
            torch.manual_seed(0)
            model = Net()
            if plan is None:
                optimizer = grouped(model.parameters())
            else:
                model, optimizer = parallelize(plan, model, grouped)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            losses = []
            for step in range(4):
                loss = model(batch(step))
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            whole = {n: p.detach() if plan is None else p.detach().full_tensor() for n, p in model.named_parameters()}
            return losses, whole

        for zero in (0, 3):
            assert_close(scheduled(plan_of(zero)), scheduled(None))

    run_ranks(4, run)


def test_a_gradient_scaler_skips_on_all_ranks_alike():
    def run():
        for zero in (0, 2, 3):
            torch.manual_seed(0)
            model, optimizer = parallelize(plan_of(zero), Net(), partial(torch.optim.SGD, lr=0.1))
            one = Net()
            one.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
            plain = torch.optim.SGD(one.parameters(), lr=0.1)
            for net, opt in ((one, plain), (model, optimizer)):
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
                for step in range(4):
                    x = batch(step)
                    if step == 2:
                        x[3, 5] = float("inf")  # one sample, of one rank
                    scaler.scale(net(x)).backward()
                    scaler.unscale_(opt)
                    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()
                assert scaler.get_scale() == 1024.0
            for p, q in zip(one.parameters(), model.parameters()):
                torch.testing.assert_close(q.detach().full_tensor(), p.detach(), rtol=1e-5, atol=1e-6)

    run_ranks(4, run)


def test_the_norm_of_the_same_gradients_is_the_same_number_under_every_layout():
    def run():
        found = set()
        for mesh, tp in (({"dp": 4}, {"*": {}}), ({"dp": 2, "tp": 2}, TP), ({"tp": 4}, TP)):
            for zero in (0, 2, 3) if "dp" in mesh else (0,):
                torch.manual_seed(0)
                plan = Plan(mesh=mesh, parameters=tp, zero=zero)
                model, _ = parallelize(plan, Net(), partial(torch.optim.SGD, lr=0.1))
                generator = torch.Generator().manual_seed(3)
                model(batch(0)).backward()
                for p in model.parameters():
                    whole = torch.randn(p.shape, generator=generator)
                    p.grad.copy_(whole)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                found.add(float(norm))
                after = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                assert abs(float(after) - 0.1) < 1e-6
        assert len(found) == 1, found

    run_ranks(4, run)


@pytest.mark.parametrize("zero", [0, 3])
def test_optimizers_of_whole_tensors_run_on_the_models_parameters(zero):
    def run():
        make = partial(torch.optim.Adafactor, lr=0.01)
        assert_close(train(plan_of(zero), make), train(None, make))
        make = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
        assert_close(train(plan_of(zero), make, closure=True), train(None, make, closure=True))

    run_ranks(4, run, timeout=120)


def test_sparse_adam_is_refused():
    def run():
        parallelize(plan_of(3), Net(), torch.optim.SparseAdam)

    assert "SparseAdam takes sparse gradients" in raises_on_all(4, PlanError, run)


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon():
    def run():
        wanted = train(None, muon)
        stages = []
        for mesh, tp in (({"dp": 4}, {"*": {}}), ({"dp": 2, "tp": 2}, TP), ({"tp": 4}, TP)):
            for zero in range(4) if "dp" in mesh else (0,):
                found = train(Plan(mesh=mesh, parameters=tp, zero=zero), muon)
                # Its iteration runs in bfloat16: the last bit of a gradient moves an update by 2^-8 of itself.
                assert_close(found, wanted, parameter=1e-3)
                if tp is TP and "dp" in mesh:
                    stages.append(found)
                if "dp" in mesh:
                    owners = found[3]._owners
                    assert max(owners.work) <= 2 * 216 and sum(owners.work) == 3 * 216
                    state = found[3].sharded_state_dict()["state"]["layers.0.weight"]["momentum_buffer"]
                    assert state.shape == (6, 6) and sum(state.placements[0].local_units) == 36
        for numbers, whole, *_ in stages[1:]:
            assert numbers == stages[0][0] and all(torch.equal(p, stages[0][1][n]) for n, p in whole.items())

    run_ranks(4, run, timeout=120)


def test_the_sharded_state_is_the_real_one_and_survives_another_stage():
    def run():
        make = partial(torch.optim.AdamW, lr=0.01)
        *_, model, optimizer = train(plan_of(3), make, steps=2)
        state = optimizer.sharded_state_dict()
        assert state["param_groups"][0]["params"] == [n for n, _ in model.named_parameters()]
        moment = state["state"]["layers.1.weight"]["exp_avg"]
        assert moment.shape == (6, 6) and moment.placements == model.layers[1].weight.placements
        assert isinstance(moment.placements[0], RaggedShard) and float(state["state"]["gain"]["step"]) == 2

        *_, other, fresh = train(plan_of(0), make, steps=0)
        target = fresh.sharded_state_dict(materialize=True)
        assert fresh.param_groups[0]["lr"] == 0.01 and not any(p.grad is not None for p in other.parameters())
        with torch.no_grad():
            for name, values in target["state"].items():
                for key, value in values.items():
                    source = state["state"][name][key]
                    if type(value) is DTensor:
                        assert not value.full_tensor().any()
                        value.copy_(source.full_tensor())
                    else:
                        assert float(value) == 0
                        values[key] = source.clone()
            for p, q in zip(other.parameters(), model.parameters()):
                p.copy_(q.full_tensor())
        fresh.load_sharded_state_dict(target | {"param_groups": state["param_groups"]})
        optimizer.zero_grad()
        for net, opt in ((model, optimizer), (other, fresh)):
            for step in range(2):
                net(batch(20 + step)).backward()
                opt.step()
                opt.zero_grad()
        for p, q in zip(other.parameters(), model.parameters()):
            assert torch.equal(p.detach().full_tensor(), q.detach().full_tensor())

    run_ranks(4, run)


def test_the_plain_state_dict_has_one_entry_per_parameter():
    def run():
        *_, optimizer = train(plan_of(2), torch.optim.AdamW, steps=1)
        saved = copy.deepcopy(optimizer.state_dict())
        assert sorted(saved["state"]) == list(range(7))
        optimizer.load_state_dict(saved)

    run_ranks(4, run)


class Scaled(torch.nn.Module):
    """One of its parameters is a number, which one rank alone holds a part of."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return (self.linear(x) * self.scale).square().mean()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_state_of_a_number_goes_into_the_plain_state_dict_and_back(zero):
    def steps(model, optimizer):
        for step in range(4):
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def run():
        torch.manual_seed(0)
        alone, model = Scaled(), Scaled()
        model.load_state_dict(alone.state_dict())
        made = partial(torch.optim.Adam, lr=0.05, amsgrad=True)
        steps(alone, made(alone.parameters()))
        model, optimizer = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero), model, made)
        steps(model, optimizer)
        for one, other in zip(alone.parameters(), model.parameters()):
            torch.testing.assert_close(other.detach().full_tensor(), one.detach(), rtol=1e-5, atol=1e-6)

    run_ranks(2, run)


# --- precision and offloading -----------------------------------------------------------


def in_bfloat16(steps):
    """One device: float32 masters, bfloat16 copies that compute, gradients summed in float32."""
    torch.manual_seed(0)
    shard = Net()
    optimizer = torch.optim.AdamW(shard.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        model = copy.deepcopy(shard).bfloat16()
        loss = model(batch(step).bfloat16())
        loss.backward()
        for p, q in zip(shard.parameters(), model.parameters()):
            p.grad = q.grad.float()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in shard.named_parameters()}


def test_precision_keeps_masters_and_computes_in_another_dtype():
    def run():
        wanted = in_bfloat16(4)
        stages = []
        for zero in range(4):
            plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero, precision=Precision(torch.bfloat16))
            found = train(plan, partial(torch.optim.AdamW, lr=0.01))
            model = found[2]
            assert all(p.dtype is torch.float32 for p in model.parameters())
            seen = []

            def look(module, args, seen=seen):
                seen.append((module.weight.dtype, args[0].dtype))

            model.layers[0].register_forward_pre_hook(look)
            model(batch(9)).backward()
            assert seen == [(torch.bfloat16, torch.bfloat16)]
            assert all(p.grad.dtype is torch.float32 for p in model.parameters())
            # bfloat16 has 8 bits: what two ranks round apart differs by 2^-8 of a gradient.
            assert_close(found, wanted, loss=2e-2, parameter=2e-2)
            stages.append(found)
        for numbers, whole, *_ in stages[1:]:
            assert numbers == stages[0][0] and all(torch.equal(p, stages[0][1][n]) for n, p in whole.items())

    run_ranks(2, run, timeout=120)


def test_offloaded_states_give_the_same():
    def run():
        make = partial(torch.optim.AdamW, lr=0.01)
        for zero in (1, 3):
            plain, offloaded = train(plan_of(zero), make), train(plan_of(zero, offload=True), make)
            assert plain[0] == offloaded[0]
            assert all(torch.equal(p, offloaded[1][n]) for n, p in plain[1].items())

    run_ranks(4, run)


def on_the_host_beside(monkeypatched):
    """Takes the CPU for a device that has the host's memory beside its own."""
    from vescale_plans._zero import parameters

    before, parameters._is_beside_host = parameters._is_beside_host, lambda device: True
    try:
        return monkeypatched()
    finally:
        parameters._is_beside_host = before


def test_masters_on_the_host_give_the_same():
    def run():
        make = partial(torch.optim.AdamW, lr=0.01)
        for zero in range(4):
            for precision in (None, Precision(torch.bfloat16)):
                plain = train(plan_of(zero, precision=precision), make)
                plan = plan_of(zero, precision=precision, offload=True)
                offloaded = on_the_host_beside(partial(train, plan, make))
                assert plain[0] == offloaded[0]
                assert all(torch.equal(p, offloaded[1][n]) for n, p in plain[1].items())
                params = [offloaded[2]._vescale.sync.param_of(p) for p in offloaded[2].parameters()]
                buffers = [buffer for unit in offloaded[2]._vescale.sync.units for buffer in unit.buckets]
                for param in params:
                    # A shard of its own is the only one, and the optimizer's; one within `full` has a copy.
                    hosted = zero == 3 or precision is not None
                    assert param.is_copied is not hosted and all(b.hosted is hosted for b in buffers)
                    assert (param.optimized.untyped_storage()._cdata == param.shard.untyped_storage()._cdata) is hosted

    run_ranks(4, run, timeout=120)


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.LBFGS])
def test_offloading_is_refused_for_optimizers_that_step_on_the_device(kind):
    def run():
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1, offload=True)
        on_the_host_beside(lambda: parallelize(plan, nn.Linear(4, 4, bias=False), kind))

    assert "keeps optimizer states on the host" in raises_on_all(2, PlanError, run)


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=0.01), torch.optim.Adagrad])
def test_a_dry_run_counts_no_memory_of_the_host(make):
    for zero in (0, 3):
        for precision in (None, Precision(torch.bfloat16)):
            plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero, precision=precision)
            near = dry_run(plan, Net(), torch.zeros(4, 6), make)
            far = dry_run(plan.override(offload=True), Net(), torch.zeros(4, 6), make)
            hosted = zero == 3 or precision is not None  # masters are memory of their own
            assert sum(far.resting.values()) < sum(near.resting.values()) and "optimizer" not in far.resting
            assert ("parameters" in far.resting) is not hosted


def test_no_sync_under_precision():
    def run():
        plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, precision=Precision(torch.bfloat16))
        torch.manual_seed(0)
        model, _ = parallelize(plan, Net(), torch.optim.SGD)
        with no_sync(model):
            model(batch(0)).backward()
        model(batch(1)).backward()
        apart = [p.grad.full_tensor().clone() for p in model.parameters()]
        model.zero_grad()
        model(batch(0)).backward()
        model(batch(1)).backward()
        for p, g in zip(model.parameters(), apart):
            torch.testing.assert_close(p.grad.full_tensor(), g, rtol=1e-5, atol=1e-6)

    run_ranks(2, run)


def test_gradients_of_another_layout_are_taken():
    def run():
        torch.manual_seed(0)
        model, optimizer = parallelize(plan_of(2), Net(), partial(torch.optim.SGD, lr=1.0))
        before = model.layers[0].weight.detach().full_tensor().clone()
        weight = model.layers[0].weight
        weight.grad = distribute_tensor(torch.ones(6, 6), model._vescale.device_mesh, (Replicate(), Replicate()))
        optimizer.step()
        torch.testing.assert_close(weight.detach().full_tensor(), before - 1)

    run_ranks(4, run)


def changing_groups(zero):
    """Between steps a parameter leaves its group, comes back in another place, and goes to a group of its own."""
    torch.manual_seed(0)
    model, make = Net(), partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    optimizer = make(model.parameters())
    if zero is not None:
        model, optimizer = parallelize(plan_of(zero), model, make)
    losses = []
    for step in range(7):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        given = optimizer.param_groups[0]["params"]
        if step == 0:
            left = given.pop(2)
        elif step == 1:
            given.insert(0, left)
        elif step == 2:
            given.reverse()
        elif step == 3:
            given[1], given[2] = given[2], given[1]
        elif step == 4:
            optimizer.add_param_group({"params": [given.pop()], "lr": 0.5})
        elif step == 5:
            optimizer.param_groups[1]["lr"] = 0.01
    values = {name: value.full_tensor() if zero is not None else value for name, value in model.named_parameters()}
    return losses, {name: value.detach().clone() for name, value in values.items()}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_groups_that_change_between_steps(zero):
    losses, values = changing_groups(None)
    for found, parameters in run_ranks(4, changing_groups, zero):
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parameters, values, rtol=1e-4, atol=1e-5)


class Wide(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(4) for _ in range(count))

    def forward(self, x):
        return sum((x * weight).sum() for weight in self.weights)


def calls_of_a_step(count):
    """How many Python functions of this library a step calls that is like the one before: all but `Tensor.grad`, which
    the optimizer itself asks for."""
    called = 0

    def note(frame, event, _):
        nonlocal called
        file = frame.f_code.co_filename
        called += event == "call" and "/vescale_" in file and not file.endswith("constructors.py")

    make = partial(torch.optim.SGD, lr=0.1, foreach=True)
    model, optimizer = parallelize(Plan(mesh={"tp": 2}, parameters={"*": {}}, data_axis=None), Wide(count), make)
    for step in range(3):
        model(torch.ones(4)).backward()
        sys.setprofile(note if step == 2 else None)
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    return called


def steps_of_no_closure():
    torch.manual_seed(0)
    model, optimizer = parallelize(Plan({"dp": 1}, {"*": {}}), nn.Linear(3, 2), torch.optim.SGD)
    before = [one.full_tensor().clone() for one in model.parameters()]
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    for given in (loss, 0.5, "x"):
        with pytest.raises(OperatorError, match=r"SGD.step: its argument is a .*, not a closure"):
            optimizer.step(given)
    assert all(torch.equal(one.full_tensor(), value) for one, value in zip(model.parameters(), before))
    return optimizer.step(lambda: 3.0)


def test_a_step_of_what_is_no_closure_is_refused_before_anything_is_done():
    assert run_ranks(1, steps_of_no_closure) == [3.0]


def test_what_a_step_costs_per_parameter():
    """Its gradient is handed over; who steps in whose place is known, and not asked for."""
    for few, many in zip(run_ranks(2, calls_of_a_step, 8), run_ranks(2, calls_of_a_step, 40)):
        assert (many - few) / 32 <= 4

"""Policies of a plan: stages of ZeRO, precision and prefetching by pattern, as FSDP2 has them by module."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from vescale_dtensor import Replicate, Shard
from vescale_dtensor.engine import watched
from vescale_plans import Plan, PlanError, Policy, Precision, no_sync, parallelize
from vescale_testkit import run_ranks

LOW, FULL = torch.bfloat16, torch.float32
STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 13), nn.Linear(13, 7)
        self.seen = []

    def forward(self, x):
        normed = self.norm(x)
        self.seen.append((normed.dtype, self.up.weight.dtype, self.norm.weight.dtype))
        return x + self.down(nn.functional.gelu(self.up(normed)))


class Net(nn.Module):
    """Uneven sizes; `scale` stays whole, and in float32."""

    def __init__(self):
        super().__init__()
        self.take, self.blocks, self.norm = nn.Linear(5, 7), nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(7)
        self.head, self.scale = nn.Linear(7, 3), nn.Parameter(torch.tensor([0.7, 0.8, 0.9]))

    def forward(self, x):
        x = self.take(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def build():
    torch.manual_seed(0)
    return Net()


def batch(step, rows=8):
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(step))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


HSDP = {"mesh": {"outer": 2, "dp": 2}, "parameters": {"*": {}}, "data_axis": ("outer", "dp")}
DEEP = Policy(prefetch=2)
NORMS = Policy(precision=Precision(FULL, output=LOW))
LIKE_FSDP = Plan(
    **HSDP,
    zero=3,
    precision=Precision(LOW, output=FULL),
    policies={
        "*norm": NORMS,
        "blocks.0": Policy(zero=2),
        "blocks.1": Policy(prefetch=2),
        "scale": Policy(zero=0, precision=Precision(FULL)),
    },
)


def trained(model, optimizer, whole, rows=8, between=None):
    for step in range(STEPS):
        if between is not None:
            with no_sync(model):
                between(model, batch(10 + step, rows))
        loss = model(whole(batch(step, rows)))
        assert loss.dtype == FULL
        loss.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach()
        for name, one in model.named_parameters()
    }


def with_policies(plan):
    model, optimizer = parallelize(plan, build(), sgd)
    found = trained(model, optimizer, lambda x: x)
    assert {seen for block in model.blocks for seen in block.seen} == {(LOW, LOW, FULL)}
    return found


def with_fsdp2():
    model = build()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    low = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=FULL)
    norm = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=FULL, reduce_dtype=FULL, output_dtype=LOW)}
    for i, block in enumerate(model.blocks):
        fully_shard(block.norm, **norm)
        fully_shard(block, mesh=mesh, mp_policy=low, reshard_after_forward=i != 0)
    fully_shard(model.norm, **norm)
    root = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=FULL, output_dtype=FULL)
    fully_shard(model, mesh=mesh, mp_policy=root, ignored_params={model.scale})
    model.scale.register_post_accumulate_grad_hook(lambda one: dist.all_reduce(one.grad, op=dist.ReduceOp.AVG))
    return trained(model, sgd(model.parameters()), lambda x: x.chunk(4)[dist.get_rank()])


def on_one_device():
    """The casts by hand."""
    model = build()
    optimizer = sgd(model.parameters())
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _, args, out: out.to(LOW))
    for step in range(STEPS):
        high = {name: one for name, one in model.named_parameters() if "norm" in name or name == "scale"}
        low = {name: one.to(LOW) for name, one in model.named_parameters() if name not in high}
        functional_call(model, low, batch(step).to(LOW)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach() for name, one in model.named_parameters()}


def close(found, wanted, within):
    before = {name: one.detach() for name, one in build().named_parameters()}
    for name, value in wanted.items():
        moved = (value - before[name]).norm()
        assert moved > 0 and (found[name] - value).norm() / moved < within, name


def test_policies_train_as_fsdp2_does_and_as_one_device():
    alone = on_one_device()
    for found, of_torch in zip(run_ranks(4, with_policies, LIKE_FSDP), run_ranks(4, with_fsdp2)):
        close(found, of_torch, 1e-3)
        close(found, alone, 4e-2)  # eight bits of mantissa


STAGES = {"blocks.0": Policy(zero=2), "*norm": Policy(zero=0), "head.bias": Policy(zero=0), "take": Policy(zero=1)}
CUT = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}}
MIXED = {
    "down from 3": Plan(mesh={"dp": 2, "tp": 2}, parameters=CUT, zero=3, policies=STAGES),
    "up from 0": Plan(mesh={"dp": 2, "tp": 2}, parameters=CUT, policies={"blocks.*": Policy(zero=3)}),
    "hsdp": Plan(**HSDP, zero=3, policies=STAGES),
}


def mixed(plan):
    """A backward that is not reduced before each that is; 5 rows over the ranks."""
    model, optimizer = parallelize(plan, build(), torch.optim.AdamW)

    def between(model, x):
        model(x).square().mean().backward()

    found = trained(model, optimizer, lambda x: x, rows=5, between=between)
    whole = {
        name: all(one == Replicate() or one.is_shard() for one in p.placements) for name, p in model.named_parameters()
    }
    states = {name: optimizer.state[p]["exp_avg"].to_local().numel() for name, p in model.named_parameters()}
    return found, whole, states


@pytest.mark.parametrize("name", MIXED)
def test_stages_of_parts_have_the_bits_of_one_stage(name):
    plan = MIXED[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        for x in (batch(10 + step, 5), batch(step, 5)):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    same = run_ranks(4, mixed, plan.override(zero=0, policies=dict.fromkeys(plan.policies)))
    taken = run_ranks(4, mixed, plan)
    least = {key: min(states[key] for _, _, states in taken) for key in taken[0][2]}
    for (found, whole, states), (plain, _, all_states) in zip(taken, same):
        for key, value in model.named_parameters():
            assert torch.equal(found[key], plain[key]), key
            torch.testing.assert_close(found[key], value.detach(), rtol=1e-4, atol=1e-5)
        if name != "up from 0":
            assert whole["blocks.0.up.weight"] and whole["head.bias"] and not whole["blocks.1.up.weight"]
            assert states["head.bias"] == all_states["head.bias"] and least["head.weight"] < all_states["head.weight"]
        else:
            assert whole["head.weight"] and not whole["blocks.1.norm.weight"]


def as_given(plan):
    """Inputs are left as they are: the module casts them itself."""
    seen = []

    class Own(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x.to(self.weight.dtype))

    torch.manual_seed(0)
    model, _ = parallelize(plan, nn.Sequential(Own(5, 7), Own(7, 3)))
    out = model(batch(0))
    return seen, out.dtype


def test_inputs_may_be_left_and_outputs_cast():
    low = Precision(LOW, cast_inputs=False)
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, precision=low)
    assert run_ranks(2, as_given, plan)[0] == ([FULL, LOW], LOW)
    of_one = plan.override(policies={"0": Policy(precision=Precision(LOW, output=torch.float64))})
    assert run_ranks(2, as_given, of_one)[0] == ([LOW, torch.float64], LOW)


def gathers(plan):
    """Gathers that have begun when each block's forward begins, in the second step."""
    model, _ = parallelize(plan, build())
    begun, seen = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(len(begun)))
    for step in range(2):
        begun.clear(), seen.clear()
        with watched(lambda event: begun.append(event.kind), lambda event: None):
            model(batch(step)).square().mean().backward()
    return seen


def test_a_block_gathers_as_many_ahead_as_its_policy_says():
    plan = Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, prefetch=0)
    one_by_one, ahead = (run_ranks(2, gathers, one)[0] for one in (plan, plan.override(policies={"blocks.0": DEEP})))
    assert [two - one for one, two in zip(one_by_one, ahead)] == [2, 1, 0]


def test_policies_are_values_of_a_plan():
    assert Plan.from_json(LIKE_FSDP.to_json()) == LIKE_FSDP
    assert "*norm precision computes in float32, reduces in float32, returns bfloat16" in str(LIKE_FSDP)
    assert LIKE_FSDP.override(policies={"scale": None}).policies.keys() == {"*norm", "blocks.0", "blocks.1"}


def tied():
    model = build()
    model.blocks[1].up.weight = model.blocks[2].up.weight
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Policy(zero=4), "zero=4, .* are no stage"),
        (lambda: Policy(prefetch=-1), "prefetch=-1 are"),
        (lambda: Plan(**HSDP, policies={"*": 3}), "not a Policy"),
        (lambda: Plan(**HSDP, sums="all_reduce", policies={"*": Policy(zero=1)}), "sums='all_reduce'"),
        (lambda: Plan({"tp": 2}, {"*": {}}, policies={"*": Policy(zero=1)}), "the plan has none"),
        (lambda: Plan(**HSDP, policies={"blocks.*.nrom": NORMS}).validate(build()), "nearest  blocks.0.norm"),
        (lambda: Plan(**HSDP, policies={"blocks.1": NORMS}).validate(tied()), "treats them differently"),
    ],
)
def test_mistakes_say_what_is_meant(make, text):
    with pytest.raises(PlanError, match=text):
        make()

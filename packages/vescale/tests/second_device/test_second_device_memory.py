"""What backward keeps on an accelerator, and what is under way beside it: by bytes, and by the order of events."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor, from_local
from vescale_testkit import mesh_of, run_ranks, warm_up
from vescale_testkit.memory.live_bytes import LiveBytes

warm_up("vescale", "vescale_testkit.second")


def kept_by_backward(function, x):
    """The result, the gradient of x, and the bytes that backward keeps besides x."""
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            kept[tensor.untyped_storage().data_ptr()] = tensor, tensor.nbytes  # alive, so that no address comes again
        return tensor

    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(x)
    (gradient,) = torch.autograd.grad(out, x, torch.full_like(out, 0.7))
    return out.detach(), gradient, sum(size for _, size in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_stands_for_cudas_own_dropout_keeps_a_byte_per_element(dtype):
    def on_rank():
        from vescale_rng._draws.dropout import _fused

        p, x = 0.3, torch.linspace(-3, 3, 120).to(dtype)
        layout = distribute_tensor(x, mesh_of(1), [Replicate()]).mesh_layout
        torch.manual_seed(4)
        out, gradient, kept = kept_by_backward(lambda x: _fused(x, layout, p), x)
        torch.manual_seed(4)
        mask = torch.native_dropout(torch.ones_like(x), p, True)[1]
        return x, out, gradient, kept, mask

    ((x, out, gradient, kept, mask),) = run_ranks(1, on_rank)
    assert kept == x.numel() and 0 < mask.sum() < mask.numel()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    noise = mask.to(wide) * torch.tensor(0.7, dtype=wide).to(torch.float64).reciprocal().to(wide)
    assert torch.equal(out, (x.to(wide) * noise).to(dtype))
    assert torch.equal(gradient, (torch.full_like(x, 0.7).to(wide) * noise).to(dtype))


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_an_accelerator_keeps_a_byte_per_element_and_is_a_cpus(inplace):
    def on_rank(device, dtype):
        local = torch.linspace(-3, 3, 60).view(6, 10).to(dtype).to(device)

        def drop(local):
            given = from_local(local * 1, mesh_of(2), [Shard(0)])
            return F.dropout(given, 0.3, True, inplace).to_local()

        torch.manual_seed(4)
        with vescale.use_rng_stream("philox"):
            out, gradient, kept = kept_by_backward(drop, local)
        return out.cpu(), gradient.cpu(), kept

    for dtype in (torch.float32, torch.bfloat16):
        wanted, found = (run_ranks(2, on_rank, device, dtype, device=device) for device in ("cpu", "second"))
        for (out, gradient, _), (other, its, kept) in zip(wanted, found):
            assert torch.equal(out, other) and torch.equal(gradient, its) and (out == 0).any()
            assert kept == out.numel()


WIDTH, BLOCKS = 32, 6  # so wide that what pads a buffer is little
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def gathered_ahead(fields):
    """Of the last of three steps: by block, how many gathers were begun when it began to compute, forward and backward;
    the most reductions that were under way at once; and the losses."""
    from vescale_dtensor._communication import flight_recorder as recorder

    torch.manual_seed(0)
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, **fields)
    model, optimizer = vescale.parallelize(plan, Stack(), partial(torch.optim.SGD, lr=0.1))
    seen = {"forward": [], "backward": [], "under way": 0}

    def begun(kind, *states):
        return sum(not states or event[recorder.STATE] in states for event in recorder.ring if event[1] == kind)

    def at(way, *_):
        seen[way].append(begun("all_gather"))
        seen["under way"] = max(seen["under way"], begun("reduce_scatter", recorder.STARTED))

    for block in model.blocks:
        block.register_forward_pre_hook(partial(at, "forward"))
        block.register_full_backward_pre_hook(partial(at, "backward"))
    losses = []
    for step in range(3):
        recorder.ring.clear()
        for found in (seen["forward"], seen["backward"]):
            found.clear()
        seen["under way"] = 0
        x = torch.linspace(-1, 1, 8 * WIDTH, device="second").view(8, WIDTH) * (step + 1)
        loss = model(x.requires_grad_())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return seen, losses


def test_blocks_are_gathered_as_far_ahead_as_the_plan_says_and_within_its_bytes():
    def on_rank():
        cases = [
            {"prefetch": 0}, {}, {"prefetch": 2}, {"prefetch": 4}, {"prefetch": 4, "ahead_bytes": 5 * BLOCK_BYTES // 2},
            {"ahead_bytes": 1},
        ]  # fmt: skip
        return [gathered_ahead(fields) for fields in cases]

    for found in run_ranks(2, on_rank, device="second"):
        seen, losses = zip(*found)
        assert len({tuple(one) for one in losses}) == 1  # how far ahead changes no bit
        for depth, one in zip((0, 1, 2, 4, 2, 0), seen):
            forward = [min(block + 1 + depth, BLOCKS) for block in range(BLOCKS)]
            assert one["forward"] == forward, (depth, one)
            # Backward begins with the last block, which forward leaves gathered, and these hooks run before ours.
            backward = [BLOCKS, *(BLOCKS + min(done + depth, BLOCKS - 1) for done in range(BLOCKS - 1))]
            assert one["backward"] == backward, (depth, one)
        assert [one["under way"] for one in seen] == [2, 2, 2, 2, 2, 1]


def summed(fields, mesh):
    """What three steps send, as (collective, asynchronous); their losses and what they make of the parameters."""
    from vescale_testkit.second._collectives import Collectives

    begun, original = [], Collectives._collective

    def seen(self, kind, *rest):
        begun.append((kind, rest[-1]))
        return original(self, kind, *rest)

    torch.manual_seed(0)
    plan = vescale.Plan(mesh=mesh, parameters={"*": {}}, data_axis=tuple(mesh), **fields)
    model, optimizer = vescale.parallelize(plan, Stack(), partial(torch.optim.SGD, lr=0.1))
    losses = []
    for step in range(3):
        loss = model(torch.linspace(-1, 1, 8 * WIDTH, device="second").view(8, WIDTH) * (step + 1))
        Collectives._collective = seen
        try:
            loss.backward()
        finally:
            Collectives._collective = original
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return begun, losses, [p.detach().full_tensor().cpu() for p in model.parameters()]


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 4}, {"pods": 2, "dp": 2}])
def test_gradients_are_summed_by_one_collective_where_the_plan_says_so(mesh):
    size = 4 if len(mesh) == 2 else mesh["dp"]
    ordered, at_once = (
        run_ranks(size, summed, fields, mesh, device="second") for fields in ({}, {"sums": "all_reduce"})
    )
    for (many, losses, wanted), (one, others, found) in zip(ordered, at_once):
        assert one == [("all_reduce", True)] * 3 and len(many) > 3
        assert others == pytest.approx(losses, rel=1e-6)
        for value, other in zip(found, wanted):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-7)
    assert all(map(torch.equal, at_once[0][2], at_once[-1][2]))  # on all ranks


@pytest.mark.parametrize(
    "fields, rule",
    [
        ({"prefetch": -1, "zero": 3}, "prefetch is -1, not a number of blocks"),
        ({"prefetch": 2, "zero": 2}, "prefetch=2 where no parameters are gathered"),
        ({"ahead_bytes": 0}, "ahead_bytes is 0, not a positive number"),
    ],
)
def test_what_cannot_be_gathered_ahead_is_an_error_of_the_plan(fields, rule):
    with pytest.raises(vescale.PlanError, match=rule):
        vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, **fields)


def test_a_plan_says_and_keeps_what_is_gathered_ahead():
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, prefetch=3, ahead_bytes=1 << 20)
    assert vescale.Plan.from_json(plan.to_json()) == plan
    assert "3 blocks, within 1048576 bytes" in str(plan)


def test_a_collective_whose_result_is_needed_at_once_stays_on_the_stream():
    """And those that other work hides do not."""

    def on_rank():
        from vescale_testkit.second._collectives import Collectives

        begun, original = [], Collectives._collective

        def seen(self, kind, *rest):
            begun.append((kind, rest[-1]))
            return original(self, kind, *rest)

        Collectives._collective = seen
        try:
            mesh = mesh_of(2)
            x = torch.ones(4, 6, device="second")
            for before, after in [(Shard(0), Replicate()), (Partial(), Replicate()), (Partial(), Shard(0)),
                                  (Shard(0), Shard(1))]:  # fmt: skip
                from_local(x, mesh, [before]).redistribute(placements=[after])
            from_local(torch.ones(100, 100, device="second"), mesh, [Partial()]).redistribute(placements=[Replicate()])
            converted, begun[:] = begun[:], []
            plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)
            torch.manual_seed(0)
            model, _ = vescale.parallelize(plan, Stack(), torch.optim.SGD)
            begun.clear()
            model(torch.ones(2, WIDTH, device="second")).backward()
            return converted, begun
        finally:
            Collectives._collective = original

    for converted, training in run_ranks(2, on_rank, device="second"):
        assert {kind for kind, _ in converted} >= {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
        assert not any(later for _, later in converted), converted
        assert {kind for kind, later in training if later} == {"all_gather", "reduce_scatter"}, training


class Peak(LiveBytes):
    """Also the most that was alive at once."""

    def __init__(self, given):
        super().__init__(given, "second")
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.most = max(self.most, self.total)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_float64_takes_no_copy_of_the_tensor_in_float64(dtype):
    """Of tensors larger than a part that is squared at a time; and it is the norm."""

    def on_rank():
        size = 3 * (1 << 22) + 5
        local = torch.linspace(-1, 1, size).to(dtype)
        wanted = local.double().square().sum().mul(2).sqrt()
        gradient = from_local(local.to("second"), mesh_of(2), [Shard(0)])
        with Peak([gradient]) as live:
            norm = nn.utils.get_total_norm([gradient])
        return live.most, float(norm.to_local()), float(wanted.to(dtype))

    for most, norm, wanted in run_ranks(2, on_rank, device="second"):
        assert most <= 8 * (1 << 22) + 1024
        assert norm == wanted

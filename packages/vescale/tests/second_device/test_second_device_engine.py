"""The engine's own doing on a device beside the host's memory: what waits, what is gathered, what is refused."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from sweeps.training_cases import CASES, batches, build, loss_of, optimizer_of, plan_of
from vescale_dtensor import ReproducibleError, Shard, comm_trace, distribute_tensor
from vescale_pipeline import PipelineError
from vescale_plans._apply.join import make_mesh
from vescale_testkit import raises_on_all, run_ranks, warm_up
from vescale_testkit.worker_pool import pool

warm_up("torch._dynamo", "vescale", "vescale_testkit.second")
on_second = partial(run_ranks, device="second", timeout=240)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.full((8,), 0.25))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return (self.norm(x) + self.shift).square().mean()


def batch(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def train(plan, kind=torch.optim.AdamW, steps=5, watch=None):
    """Losses and whole parameters; the model and its batches are made on the host, as a README's are."""
    torch.manual_seed(0)
    model = Net()
    if plan is not None:
        model, optimizer = vescale.parallelize(plan, model, partial(kind, lr=0.01))
    else:
        optimizer = kind(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        inputs = batch(step)
        with watch(step) if watch is not None else torch.enable_grad():
            loss = model(inputs)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    whole = {n: p.detach() if plan is None else p.detach().full_tensor().cpu() for n, p in model.named_parameters()}
    return [float(loss) for loss in losses], whole, model


def assert_close(found, wanted):
    assert max(abs(a - b) / abs(b) for a, b in zip(found[0], wanted[0])) <= 1e-6
    for name, value in wanted[1].items():
        assert (found[1][name] - value).norm() <= 1e-4 * value.norm(), name  # design 11


@pytest.mark.parametrize("zero", range(4))
def test_a_model_and_batches_of_the_host_train_on_the_device_without_waits(zero):
    wanted = train(None)

    def run():
        from vescale_testkit.second import host_waits

        found = []

        class Watched:
            def __init__(self, step):
                self._waits = host_waits()

            def __enter__(self):
                found.append(self._waits.__enter__())

            def __exit__(self, *error):
                return self._waits.__exit__(*error)

        plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
        losses, whole, model = train(plan, watch=Watched)
        assert all(tensor.device.type == "second" for tensor in (*model.parameters(), *model.buffers()))
        assert not found[-1].sites, found[-1].sites  # the first three steps compare batches between ranks
        return losses, whole

    for found in on_second(2, run):
        assert_close(found, wanted)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("precise", [True, False])
def test_offloaded_states_and_shards_lie_on_the_host(kind, zero, precise):
    def run():
        precision = None if precise else vescale.Precision(torch.bfloat16)
        plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero, precision=precision)
        near = train(plan, kind)
        far = train(plan.override(offload=True), kind)
        assert_close(far, near)
        for parameter in far[2].parameters():
            param = far[2]._vescale.sync.param_of(parameter)
            hosted = zero == 3 or not precise
            assert param.optimized.device.type == "cpu" and param.optimized.is_pinned()
            assert param.shard.device.type == ("cpu" if hosted else "second")

    on_second(2, run)


def test_reshard_moves_what_lies_on_either():
    def run():
        found = []
        for zero in (1, 3):
            torch.manual_seed(zero)
            plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
            model, optimizer = vescale.parallelize(plan, Net(), torch.optim.AdamW)
            model(batch(zero)).backward()
            optimizer.step()
            found.append({"model": model, "optimizer": optimizer})
        vescale.reshard(*found)
        one, other = ({n: p.detach().full_tensor() for n, p in s["model"].named_parameters()} for s in found)
        assert all(torch.equal(value, other[name]) for name, value in one.items())
        one, other = (s["optimizer"].sharded_state_dict()["state"] for s in found)
        for name, state in one.items():
            assert state["step"] == other[name]["step"]
            assert torch.equal(state["exp_avg"].full_tensor().view(-1), other[name]["exp_avg"].full_tensor().view(-1))

    on_second(2, run)


@pytest.mark.parametrize("dim", [0, 1])
def test_attention_dropout_gathers_nothing_and_is_one_devices(dim):
    def attended(query, key, value):
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, is_causal=True)
        out.square().sum().backward()
        return out.detach(), query.grad, key.grad, value.grad

    torch.manual_seed(0)
    given = [torch.randn(4, 2, 6, 8) for _ in range(3)]
    wanted = attended(*(one.clone().requires_grad_() for one in given))

    def run():
        mesh = make_mesh(vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}))
        inputs = [distribute_tensor(one, mesh, [Shard(dim)]).requires_grad_() for one in given]
        with comm_trace() as trace:
            found = attended(*inputs)
        assert not [event for event in trace.events if "gather" in event.kind]
        return [one.full_tensor().cpu() for one in found]

    for found in on_second(2, run):
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_generators_of_the_device_are_compared():
    def run():
        mesh = make_mesh(vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}))
        torch.manual_seed(0)
        vescale.check_rng_in_step(mesh)
        torch.randn(3 + torch.distributed.get_rank(), device="second")
        vescale.check_rng_in_step(mesh)

    from vescale_rng import RandomStateError

    assert "drifted" in raises_on_all(2, RandomStateError, run, device="second")


@pytest.mark.parametrize("holds", [True, False])
def test_the_reproducible_mode_asks_the_device_first(holds):
    def run():
        from vescale_dtensor._reproducible import premise

        asked = []
        before = premise.check_premise
        premise.check_premise = lambda device: asked.append(device) or ([] if holds else ["bmm: other bits again"])
        premise.require_premise.cache_clear()
        try:
            plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}})
            with vescale.reproducible(splits={"batch": 4, "hidden": 2}):
                train(plan, steps=1)
            return asked
        finally:
            premise.check_premise = before
            premise.require_premise.cache_clear()

    if holds:
        assert on_second(2, run) == [["second"]] * 2
    else:
        assert "bmm: other bits again" in raises_on_all(2, ReproducibleError, run, device="second")


@pytest.mark.parametrize("name", ["llama-zero3-clip", "llama-tp-sp", "mixtral-tp-sp"])
def test_the_reproducible_mode_has_on_the_device_the_bits_of_one_cpu(name):
    """Products go there by four entries at a time, and rows are sorted before they are added."""
    splits = {"batch": 4, "seq": 2, "hidden": 4}

    def run(alone):
        case = CASES[name]
        model, make = build(case), optimizer_of(case)
        if alone:
            optimizer = make(model.parameters())
        else:
            model, optimizer = vescale.parallelize(plan_of(case), model, make)
        losses = []
        with vescale.reproducible(splits=splits):
            for tokens in batches():
                loss = loss_of(case, model, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, [(p if alone else p.full_tensor()).detach().cpu() for p in model.parameters()]

    (wanted,) = run_ranks(1, run, True)
    for losses, parameters in on_second(2, run, False):
        assert losses == wanted[0] and all(map(torch.equal, parameters, wanted[1]))


def test_generators_are_taken_back():
    def run():
        from vescale_plans._apply.generators import random_states, same_states, set_random_states

        torch.randn(2, device="second")
        before = random_states()
        one = torch.randn(4, device="second"), torch.randn(4)
        assert not same_states(before, random_states())
        set_random_states(before)
        return torch.equal(one[0], torch.randn(4, device="second")) and torch.equal(one[1], torch.randn(4))

    assert on_second(2, run) == [True, True]


def test_a_failure_in_a_pipeline_wakes_who_waits_and_leaves_nothing_pending():
    """No connection closes there: the others find the cause in the store, and abort what they wait in."""

    def run():
        from vescale_testkit.second import _communicator, _work

        _work.HANG_SECONDS = 100  # nobody is to wait so long
        torch.manual_seed(0)
        pipeline = vescale.Pipeline(axis="pp", cuts=("layers.1",), schedule="1f1b", microbatches=2)
        plan = vescale.Plan(mesh={"pp": 2, "dp": 1}, parameters={"*": {}}, pipeline=pipeline)
        model, _ = vescale.parallelize(plan, Net(), torch.optim.SGD)
        model(batch(0)).backward()
        runtime = model._vescale.runtime
        if runtime.rank == 1:
            model.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(PipelineError, match="rank 1 raised in stage 1, F of microbatch 0: ZeroDivisionError"):
            model(batch(1))
        group = runtime.link._group
        left = [w.label for g in _communicator.groups for w in g.undelivered.values()]
        return group is None, left

    assert on_second(2, run) == [(True, []), (True, [])]
    pool.end(2, "second")

"""parallelize on real ranks: gradients, accumulation, inputs, errors; against one device."""

import contextlib
import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, MeshError, PlainTensorError, Replicate, ShapeError, Shard, comm_trace
from vescale_plans import Boundary, Plan, PlanError, no_sync, parallelize
from vescale_rng import deferred_init
from vescale_testkit import in_turns, raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")


class Net(nn.Module):
    """A residual MLP with norms and a tied output; `unused` takes no part."""

    def __init__(self, width=12, checkpointed=None):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointed = checkpointed

    def block(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, ids, targets):
        x = self.embed(ids)
        for _ in range(2):  # the block is used twice: its gradients have two parts
            if self.checkpointed is None:
                x = self.block(x)
            else:
                x = checkpoint(self.block, x, use_reentrant=self.checkpointed)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


PLAN = Plan(
    mesh={"dp": 2, "tp": 2},
    parameters={
        "embed.weight": {"tp": Shard(0)},
        "head.weight": {"tp": Shard(0)},
        "up.*": {"tp": Shard(0)},
        "down.weight": {"tp": Shard(1)},
        "*": {},
    },
    boundaries={
        "embed": Boundary(output={"tp": Shard(1)}),
        "up": Boundary(input={"tp": Replicate()}),
        "down": Boundary(output={"tp": Shard(1)}),
        "head": Boundary(input={"tp": Replicate()}),
    },
)


def data(batch=6, positions=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (2, batch, positions), generator=generator)


def pair(optimizer=None, checkpointed=None):
    torch.manual_seed(0)
    one = Net(checkpointed=checkpointed)
    many, optimizer = parallelize(PLAN, copy.deepcopy(one), optimizer)
    return one, many, optimizer


def assert_same_gradients(one, many, rtol=1e-5, atol=1e-6):
    for (name, p), (_, q) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            whole = q.grad.full_tensor()
            torch.testing.assert_close(whole, p.grad, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_gradients_equal_one_device(checkpointed):
    def run():
        one, many, _ = pair(checkpointed=checkpointed)
        ids, targets = data()
        for model in (one, many):
            model(ids, targets).backward()
        assert_same_gradients(one, many)
        # Reduced once, over dp for what tp shards, over both for the rest: what is left is not partial.
        assert not any(p.grad.mesh_layout.is_partial for p in many.parameters() if p.grad is not None)
        assert many.unused.weight.grad is None

    run_ranks(4, run)


def test_backwards_add_up():
    def run():
        one, many, _ = pair()
        for seed in range(3):
            ids, targets = data(seed=seed)
            for model in (one, many):
                model(ids, targets).backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


def test_no_sync_reduces_once():
    def run():
        one, many, _ = pair()
        with comm_trace() as trace:
            for seed in range(3):
                with no_sync(many) if seed < 2 else contextlib.nullcontext():
                    many(*data(seed=seed)).backward()
        for seed in range(3):
            one(*data(seed=seed)).backward()
        assert_same_gradients(one, many)
        assert trace.count(function="gradient sync") == 2  # two buckets, one backward

    run_ranks(4, run)


def test_gradients_read_between_are_whole_and_stay_right():
    def run():
        one, many, _ = pair()
        many(*data(seed=0)).backward()
        with no_sync(many):
            many(*data(seed=1)).backward()
        one(*data(seed=0)).backward()
        one(*data(seed=1)).backward()
        assert_same_gradients(one, many)  # settled and partial parts, folded by reading
        one(*data(seed=2)).backward()
        many(*data(seed=2)).backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("way", ["dropped", "replaced", "with a graph"])
def test_gradients_that_a_user_drops_or_replaces_between_paused_backwards_are_one_devices(way, zero):
    def run():
        torch.manual_seed(0)
        one = Net()
        many, _ = parallelize(PLAN.override(zero=zero), copy.deepcopy(one), None)
        for model in (one, many):
            for seed in range(4):
                with no_sync(many) if seed < 3 else contextlib.nullcontext():
                    model(*data(seed=seed)).backward(create_graph=way == "with a graph")
                if seed == 1 and way == "dropped":
                    model.zero_grad()
                for parameter in model.parameters() if seed == 1 and way == "replaced" else ():
                    if parameter.grad is not None:
                        parameter.grad = torch.full(parameter.shape, 0.5)
        assert_same_gradients(one, many)
        for model in (one, many):
            model.zero_grad()  # a graph of gradients is a cycle

    run_ranks(4, run)


def test_a_step_after_paused_backwards_only_reduces_first():
    def run():
        one, many, optimizer = pair(lambda p: torch.optim.SGD(p, lr=0.1))
        plain = torch.optim.SGD(one.parameters(), lr=0.1)
        with no_sync(many):
            many(*data()).backward()
        one(*data()).backward()
        optimizer.step()
        plain.step()
        for p, q in zip(one.parameters(), many.parameters()):
            torch.testing.assert_close(q.detach().full_tensor(), p.detach(), rtol=1e-5, atol=1e-6)

    run_ranks(4, run)


def test_clipping_as_called_by_users():
    def run():
        one, many, _ = pair()
        norms = []
        for model in (one, many):
            model(*data()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        torch.testing.assert_close(norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1], norms[0])
        assert_same_gradients(one, many)

    run_ranks(4, run)


def test_a_plain_loss_reduces_too():
    def run():
        one, many, _ = pair()
        many(*data()).full_tensor().mul(2).backward()
        one(*data()).mul(2).backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


def test_the_loss_is_a_number_on_one_rank_alone():
    def run():
        _, many, _ = pair()
        loss = many(*data())
        if torch.distributed.get_rank() == 2:
            return loss.item(), float(loss), f"{loss:.3f}"
        return None

    results = run_ranks(4, run)
    assert results[2][0] == results[2][1] and f"{results[2][0]:.3f}" == results[2][2]


def test_local_batches():
    def run():
        one, many, _ = pair()
        ids, targets = data(batch=5)  # 3 and 2
        part = slice(0, 3) if torch.distributed.get_rank() < 2 else slice(3, 5)
        batch = PLAN.local_batch({"ids": ids[part], "targets": targets[part]})
        assert batch["ids"].shape == (5, 4)
        many(**batch).backward()
        one(ids, targets).backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


def test_a_batch_sharded_over_two_axes():
    """9 samples over 2 x 2 ranks: 3, 2 and 2, 2."""
    plan = Plan(mesh={"dpr": 2, "dp": 2}, parameters={"*": {}}, data_axis=("dpr", "dp"))

    def run():
        torch.manual_seed(0)
        one = Net()
        many, _ = parallelize(plan, copy.deepcopy(one))
        ids, targets = data(batch=9)
        starts = [0, 3, 5, 7, 9]
        rank = torch.distributed.get_rank()
        part = slice(starts[rank], starts[rank + 1])
        many(ids, targets).backward()
        many(**plan.local_batch({"ids": ids[part], "targets": targets[part]})).backward()
        for _ in range(2):
            one(ids, targets).backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


def test_local_batches_that_do_not_fit():
    def run():
        PLAN.local_batch(torch.zeros(2 + torch.distributed.get_rank() % 2, 4))

    assert "ranks disagree on the size of dim 0" in raises_on_all(4, ShapeError, run)


def test_a_loss_outside_of_the_model():
    """The call gives the loss; the targets, which the forward does not take, go to the loss alone."""

    def mean_error(output, x, targets):
        return (output - targets).square().mean()

    def run():
        torch.manual_seed(0)
        one = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        plan = Plan({"dp": 2, "tp": 2}, {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}})
        many, _ = parallelize(plan, copy.deepcopy(one), loss_fn=mean_error)
        x, targets = torch.randn(2, 5, 6)
        wanted = mean_error(one(x), x, targets)
        wanted.backward()
        loss = many(x, targets=targets)
        torch.testing.assert_close(loss.item(), wanted.item(), rtol=1e-6, atol=0)
        loss.backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, nn.MSELoss()], ids=["function", "module"])
@pytest.mark.parametrize("given", ["by name", "by position"])
def test_a_loss_fn_is_told_what_it_is_called_with(given, loss_fn):
    def run():
        x, target = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
        many, _ = parallelize(Plan({"dp": 2}, {"*": {}}), nn.Linear(6, 6), loss_fn=loss_fn)
        many(x, target=target) if given == "by position" else many(input=x, target=target)

    message = raises_on_all(2, PlanError, run)
    call = "f(output, input, target=target)" if given == "by position" else "f(output, input=input, target=target)"
    assert call in message and "multiple values for argument" in message
    assert "loss_fn=lambda output, input, target: f(...)" in message


def test_a_type_error_from_inside_a_loss_stays_what_it_is():
    def run():
        many, _ = parallelize(Plan({"dp": 2}, {"*": {}}), nn.Linear(6, 6), loss_fn=lambda output, x: output + None)
        many(torch.ones(4, 6))

    assert "NoneType" in raises_on_all(2, TypeError, run)


def test_inputs_that_differ_between_ranks():
    def run():
        _, many, _ = pair()
        many(*data(seed=torch.distributed.get_rank()))

    message = raises_on_all(4, PlainTensorError, run)
    assert "plain input tensor 0 differs between ranks 0 and 1" in message
    assert "plan.local_batch(batch)" in message


def test_models_that_differ_between_ranks():
    def run():
        torch.manual_seed(torch.distributed.get_rank())
        parallelize(PLAN, Net())

    message = raises_on_all(4, PlainTensorError, run)
    assert "'embed.weight' has different values on rank 1 than on rank 0" in message and "manual_seed" in message


@pytest.mark.parametrize("is_deferred", [False, True], ids=["built", "deferred"])
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_differ_between_ranks(persistent, is_deferred):
    class Noisy(Net):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            torch.manual_seed(torch.distributed.get_rank() // 2)  # as a scale that is measured on a rank's own samples
            self.norm.register_buffer("scale", torch.rand(12), persistent=persistent)

    def run():
        with deferred_init() if is_deferred else contextlib.nullcontext():
            model = Noisy()
        parallelize(PLAN, model)

    message = raises_on_all(4, PlainTensorError, run)
    assert "the buffer 'norm.scale' has different values on rank 2 than on rank 0" in message


def test_a_buffer_that_one_rank_has():
    def run():
        torch.manual_seed(0)
        model = Net()
        if torch.distributed.get_rank() == 1:
            model.register_buffer("scale", torch.ones(3))
        parallelize(PLAN, model)

    message = raises_on_all(4, PlainTensorError, run)
    assert "different buffers on rank 1" in message and "0 buffers on rank 0, 1 on rank 1" in message


def test_names_and_structure_stay():
    def run():
        one, many, _ = pair()
        assert str(many) == str(one)
        assert list(many.state_dict()) == list(one.state_dict())
        assert [n for n, _ in many.named_parameters()] == [n for n, _ in one.named_parameters()]
        assert many.head.weight is many.embed.weight
        assert all(isinstance(p, nn.Parameter) and type(p) is DTensor for p in many.parameters())
        assert type(many).forward is many.forward.__func__ is Net.forward
        assert "forward" not in many.__dict__

    run_ranks(4, run)


def test_autograd_functions_of_users_are_right():
    """Design section 3, contract 3: unaware of layouts, this one doubled the gradient of its weight."""

    def run():
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return x * w

            @staticmethod
            def backward(ctx, grad):
                x, w = ctx.saved_tensors
                return grad * w, (grad * x).sum((0, 1))

        class Scaled(Net):
            def block(self, x):
                return super().block(Scale.apply(x, self.norm.weight + 1))

        torch.manual_seed(0)
        one = Scaled()
        many, _ = parallelize(PLAN, copy.deepcopy(one))
        for model in (one, many):
            model(*data()).backward()
        assert_same_gradients(one, many)

    run_ranks(4, run)


def test_twice_is_an_error():
    def run():
        _, many, _ = pair()
        parallelize(PLAN, many)

    assert "parallelized already" in raises_on_all(4, PlanError, run)


def test_tied_parameters_placed_differently():
    def run():
        parameters = {name: places for name, places in PLAN.parameters.items() if name != "head.weight"}
        parallelize(Plan(mesh=PLAN.mesh, parameters=parameters), Net())

    assert "'embed.weight' and 'head.weight' are one tied parameter" in raises_on_all(4, PlanError, run)


def test_a_mesh_of_another_size():
    def run():
        os.environ["RANK"] = str(torch.distributed.get_rank())  # as torchrun sets it
        try:
            parallelize(Plan(mesh={"dp": 3}, parameters={"*": {}}), Net())
        finally:
            del os.environ["RANK"]

    assert raises_on_all(4, MeshError, run) == (
        "parallelize: the plan's mesh needs 3 ranks (dp 3), but the world has 4\n"
        "fix one of: torchrun --nproc-per-node 3 ...   # starts as many as the plan needs\n"
        "            a mesh whose sizes multiply to 4"
    )


def test_a_parameter_without_that_dim():
    def run():
        parallelize(Plan(mesh={"tp": 4}, parameters={"norm.weight": {"tp": Shard(1)}, "*": {}}), Net())

    assert "names dim 1 of a tensor with 1 dims" in raises_on_all(4, Exception, run)


SCRIPT = """
import os
import torch
from torch import nn
from vescale_dtensor import Shard
from vescale_plans import Plan, parallelize

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
plan = Plan(
    mesh={"dp": 2, "tp": 2},
    parameters={"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "*": {}},
)
model, optimizer = parallelize(plan, model, lambda p: torch.optim.AdamW(p))
for step in range(2):
    loss = model(torch.ones(4, 4) + step).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
os.write(1, f"loss {loss.item():.5f}\\n".encode())  # at once: four ranks share a pipe
"""


def run_script(tmp_path, *launcher):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=clean | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@in_turns(3)
def test_the_same_script_runs_without_torchrun_and_under_it(tmp_path):
    alone = run_script(tmp_path)
    assert alone.returncode == 0, alone.stderr
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0"]
    together = run_script(tmp_path, *launcher)
    assert together.returncode == 0, together.stderr
    assert together.stdout.splitlines() == alone.stdout.splitlines() * 4


EXIT = """
import sys, torch
import torch.distributed as dist
from vescale_plans._apply.join import join

join()
group = dist.new_group()
x = torch.ones(4)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
"""


@in_turns(3)
def test_whoever_joined_leaves_in_order(tmp_path):
    """Design section 3, contract 10: a gloo script that ends without destroying its groups aborts most of the time."""
    script = tmp_path / "leave.py"
    script.write_text(EXIT)
    times = 20 if os.environ.get("VESCALE_GRID") == "full" else 3
    for i in range(times):
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0", str(script), str(i),
            ],
            capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

"""What an unchanged loop does beside the plain step: clipping, scaling, accumulation, evaluation, other shapes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

ROWS, COUNT = 12, 4


class Net(nn.Module):
    """A linear map that is used first and last (tied), norms between; the second block is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(6))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x, y=None):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.last(x)
        return x if y is None else F.mse_loss(x, y)


def plan(ranks=2, mesh=None, kind="1f1b"):
    cuts = tuple(f"blocks.{6 * stage // ranks}" for stage in range(1, ranks))
    pipeline = vescale.Pipeline(cuts=cuts, microbatches=COUNT, schedule=kind)
    return vescale.Plan(mesh={"pp": ranks, **(mesh or {})}, parameters={"*": {}}, pipeline=pipeline)


def batches(steps=3, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, rows, 8, generator=generator) for _ in range(steps)]


def built(chosen=None, loss_fn=None):
    torch.manual_seed(0)
    model = Net()

    def optimizer_fn(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    if chosen is None:
        return model, optimizer_fn(model.parameters())
    return vescale.parallelize(chosen, model, optimizer_fn, loss_fn=loss_fn)


def whole(model):
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}


def compared(loop, *plan_arguments):
    """What the loop returned under the plan and on one device, and the largest error of a parameter."""
    model, optimizer = built(plan(*plan_arguments))
    found = loop(model, optimizer)
    alone, alone_optimizer = built()
    wanted = loop(alone, alone_optimizer)
    expected = whole(alone)
    errors = [((p - expected[n]).norm() / expected[n].norm()).item() for n, p in whole(model).items()]
    return torch.tensor(found), torch.tensor(wanted), max(errors)


def check(loop, ranks=2, *rest, world=None):
    for found, wanted, error in run_ranks(world or ranks, compared, loop, ranks, *rest):
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6), (found, wanted)
        assert error <= 1e-6


def clipping(order):
    def loop(model, optimizer):
        seen = []
        for x, y in batches():
            loss = model(x, y)
            loss.backward()
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, order)))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return loop


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_is_global(order):
    check(clipping(order))


def norms(foreach, chosen=None):
    """Of ten steps' gradients; on one device with squares summed in float64."""
    model, optimizer = built(chosen)
    seen = []
    for x, y in batches(10):
        model(x, y).backward()
        if chosen is None:
            of_each = [p.grad.double().square().sum().sqrt().float() for p in model.parameters() if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack(of_each))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
        seen.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("foreach", [None, False, True])
def test_ranks_clip_by_the_same_bits(foreach):
    """A rank takes the norms of its own gradients by one function, and is told the others' by another."""
    first, *others = run_ranks(3, norms, foreach, plan(3))
    assert others == [first, first]
    assert first == pytest.approx(norms(foreach), rel=2e-7)


def test_clip_grad_norm_is_global_over_three_stages_and_a_data_axis():
    check(clipping(2.0), 2, {"dp": 2}, world=4)
    check(clipping(2.0), 3)


def accumulating(model, optimizer):
    seen = []
    for x, y in batches(4):
        loss = model(x, y)
        (loss / 2).backward()
        seen.append(loss.item())
        if len(seen) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_several_calls_accumulate(kind):
    check(accumulating, 2, None, kind)


def scaling(model, optimizer):
    """A loss scaler whose second step overflows, on the first stage only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    seen = []
    for step, (x, y) in enumerate(batches(4)):
        loss = model(x, y)
        scaler.scale(loss).backward()
        names = dict(model.named_parameters())
        if step == 1 and "blocks.0.0.bias" in names:
            names["blocks.0.0.bias"].grad.mul_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.item(), scaler.get_scale()]
    return seen


def test_a_loss_scaler_skips_on_all_stages():
    check(scaling)
    check(scaling, 2, {"dp": 2}, world=4)


def evaluating(model, optimizer):
    x, y = batches(1)[0]
    with torch.no_grad():
        outputs, loss = model(x), model(x, y)
    return [*outputs.flatten().tolist(), loss.item()]


def test_evaluation_gives_whole_outputs_on_every_rank():
    check(evaluating, 2, {"dp": 2}, world=4)


def changing(model, optimizer):
    seen = []
    for rows in (12, 8, 12, 20):
        ((x, y),) = batches(1, rows)
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def test_batch_sizes_may_change():
    check(changing)


def with_a_loss_fn():
    model, optimizer = built(plan(), loss_fn=lambda output, x, target: F.mse_loss(output, target))
    alone, alone_optimizer = built()
    seen = []
    for x, y in batches():
        loss, wanted = model(x, target=y), F.mse_loss(alone(x), y)
        seen.append((loss.item(), wanted.item()))
        for one, other in ((loss, optimizer), (wanted, alone_optimizer)):
            one.backward()
            other.step()
            other.zero_grad()
    return torch.tensor(seen)


def test_a_loss_fn_runs_on_the_last_stage():
    for seen in run_ranks(2, with_a_loss_fn):
        assert torch.allclose(seen[:, 0], seen[:, 1], rtol=1e-6)


def released_twice():
    model, _ = built(plan())
    x, y = batches(1)[0]
    loss = model(x, y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="released by an earlier backward"):
        loss.backward()


def test_gradients_are_released_once():
    run_ranks(2, released_twice)


def loading(model, optimizer):
    """One device's state is loaded between two steps, and one with a name too many raises as ever."""
    torch.manual_seed(7)
    state = {name: torch.randn(value.shape) * 0.1 for name, value in Net().state_dict().items()}
    state["last.weight"] = state["first.weight"]
    seen = []
    for i, (x, y) in enumerate(batches()):
        if i == 1:
            assert model.load_state_dict(state) == ([], [])
            with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
                model.load_state_dict({**state, "more": torch.ones(1)})
        loss = model(x, y)
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_a_state_of_one_device_is_loaded():
    check(loading)
    check(loading, 2, {"dp": 2}, world=4)


class Shared(nn.Module):
    """Two blocks of later stages share a parameter."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4))
        self.blocks[3][1].weight = self.blocks[2][1].weight

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def whole_state(ranks):
    torch.manual_seed(0)
    cuts = tuple(f"blocks.{4 * stage // ranks}" for stage in range(1, ranks))
    chosen = vescale.Plan(mesh={"pp": ranks}, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=cuts))
    model, _ = vescale.parallelize(chosen, Shared())
    return vescale.whole_state_dict(model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_state_has_names_that_are_tied_over_later_stages(ranks):
    first, *others = run_ranks(ranks, whole_state, ranks)
    torch.manual_seed(0)
    wanted = Shared().state_dict()
    assert first.keys() == wanted.keys() and not any(others)
    assert all(torch.equal(first[name], value) for name, value in wanted.items())

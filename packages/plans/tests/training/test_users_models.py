"""What users do to their models, one thing at a time, on DP, ZeRO 2 and 3 and TP: one device's results."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import OperatorError, PlacementError, Replicate, Shard
from vescale_plans import Boundary, Plan, PlanError, parallelize
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale_plans")

WIDTH, WORDS, STEPS = 8, 3, 3
TP = {
    "parameters": {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}},
    "boundaries": {"*.up": Boundary(input={"tp": Replicate()}), "*.down": Boundary(output={"tp": Replicate()})},
}
PLANS = {
    "dp": partial(Plan, parameters={"*": {}}),
    "zero2": partial(Plan, parameters={"*": {}}, zero=2),
    "zero3": partial(Plan, parameters={"*": {}}, zero=3),
    "tp": partial(Plan, **TP),
}


def plan_of(kind: str, ranks: int) -> Plan:
    if kind == "tp2 x zero3":
        return Plan(mesh={"dp": ranks // 2, "tp": 2}, zero=3, **TP)
    return PLANS[kind](mesh={"tp" if kind == "tp" else "dp": ranks})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks and a head. checkpoints: of the blocks together, and of each: reentrant, not, or (None) none."""

    def __init__(self, checkpoints=(None, None)):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.checkpoints = checkpoints

    def body(self, x):
        for block in self.blocks:
            x = maybe_checkpoint(self.checkpoints[1], block, x)
        return x

    def forward(self, x, targets):
        return F.cross_entropy(self.head(maybe_checkpoint(self.checkpoints[0], self.body, x)), targets)


def maybe_checkpoint(reentrant, function, x):
    return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)


def batch(step: int):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, WIDTH, generator=generator).requires_grad_()  # a reentrant checkpoint needs one that does
    return x, torch.randint(WORDS, (8,), generator=generator)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model, optimizer, during=None) -> tuple[list, list, dict]:
    """Losses, gradients per step, and parameters at the end. during(model, optimizer, step) comes before each step."""
    losses, gradients = [], []
    for step in range(STEPS):
        if during is not None:
            during(model, optimizer, step)
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def check(got, wanted) -> None:
    losses, gradients, parameters = got
    torch.testing.assert_close(losses, wanted[0], rtol=1e-5, atol=0)
    for mine, theirs in zip(gradients, wanted[1], strict=True):
        assert mine.keys() == theirs.keys()
        close(mine, theirs)
    close(parameters, wanted[2])


def close(mine: dict, theirs: dict) -> None:
    for name, one in theirs.items():
        assert mine[name].dtype == one.dtype
        assert (mine[name] - one).norm() <= 1e-4 * one.norm() + 1e-7, name


def equals_one_device(kind: str, ranks: int, build, during=None, prepare=None) -> None:
    """`prepare(model, optimizer)` is called once the model is parallelized."""
    torch.manual_seed(0)
    alone = build()
    model = copy.deepcopy(alone)
    optimizer = adamw(alone.parameters())
    if prepare is not None:
        prepare(alone, optimizer)
    wanted = trained(alone, optimizer, during)
    model, optimizer = parallelize(plan_of(kind, ranks), model, adamw)
    if prepare is not None:
        prepare(model, optimizer)
    check(trained(model, optimizer, during), wanted)


# --- checkpoints in checkpoints ------------------------------------------------------------


@in_turns(3)
@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in PLANS), ("zero3", 4), ("tp2 x zero3", 4)])
def test_nested_checkpoints(kind, ranks):
    """An outer one that is not reentrant handed plain local shards to the recomputed code; reentrant ones under
    ZeRO-3 met flat parameters."""

    def work():
        for reentrant in itertools.product((False, True), repeat=2):
            equals_one_device(kind, ranks, partial(Net, reentrant))

    run_ranks(ranks, work)


def test_user_code_in_a_recomputation_never_sees_a_shard():
    def work():
        shapes = []

        class Seen(Block):
            def forward(self, x):
                shapes.append((type(x).__name__, tuple(x.shape)))
                return super().forward(x)

        for reentrant in itertools.product((False, True), repeat=2):
            torch.manual_seed(0)
            alone = Net(reentrant)
            alone.blocks = nn.ModuleList(Seen() for _ in range(3))
            model, _ = parallelize(plan_of("dp", 2), alone)
            model(*batch(0)).backward()
        assert len(shapes) >= 24
        assert set(shapes) == {("DTensor", (8, WIDTH))}

    run_ranks(2, work)


# --- sharing -------------------------------------------------------------------------------


def shared():
    model = Net()
    model.blocks[1] = model.blocks[0]
    return model


def shared_and_tied():
    model = shared()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[2].down.bias = model.head_bias = nn.Parameter(torch.ones(WIDTH))
    return model


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("build", [shared, shared_and_tied])
def test_a_module_under_two_names_and_ties(kind, build):
    """Objects were known by the `id` of others that had been freed: ties were lost, and shards sharded once more."""

    def work():
        equals_one_device(kind, 2, build)
        model, _ = parallelize(plan_of(kind, 2), build())
        assert model.blocks[0] is model.blocks[1]
        if build is shared_and_tied:
            assert model.blocks[2].up.weight is model.blocks[0].up.weight
            assert model.blocks[2].down.bias is model.head_bias

    run_ranks(2, work)


def test_one_module_has_one_boundary():
    model, plan = shared(), plan_of("tp", 2)
    plan.validate(model)
    only_second = Boundary(input={"tp": Replicate()})
    plan.override(boundaries={"blocks.1.up": only_second}).validate(model)  # known by any of its names
    other = plan.override(boundaries={"blocks.1.up": Boundary(input={"tp": Shard(0)})})
    with pytest.raises(PlanError, match="one module, and the plan gives them different boundaries"):
        other.validate(model)


# --- memory of parameters replaced ---------------------------------------------------------


def scaled_by_data(model, optimizer, step):
    if step == 1:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9


def vector(model, optimizer, step):
    if step == 1:
        found = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(found * 0.9, model.parameters())


def set_(model, optimizer, step):
    if step == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.set_((parameter.detach() * 0.9).clone())


def swapped(model, optimizer, step):
    if step == 1:
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.9))


def double_and_back(model, optimizer, step):
    if step == 1:
        model.double().float()


def moved(model, optimizer, step):
    model.to("cpu")
    model.float()


def averaged(model, optimizer, step):
    """An average swapped in for an evaluation, and the backup back: what is over the old memory keeps its values."""
    if step == 0:
        model.average = {name: p.data.clone() for name, p in model.named_parameters()}
        return
    for name, parameter in model.named_parameters():
        model.average[name].lerp_(parameter.data, 0.5)
    backup = {name: p.data for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = model.average[name]
    with torch.no_grad():
        evaluated = model(*batch(9))
    for name, parameter in model.named_parameters():
        parameter.data = backup[name]
    with torch.no_grad():
        assert model(*batch(9)) != evaluated


def evaluated_in_inference_mode(model, optimizer, step):
    """The model meets the new memory in an evaluation; it was made there, and autograd refused it in training."""
    scaled_by_data(model, optimizer, step)
    with torch.inference_mode():
        model(*batch(9))


def halved_gradient(model, optimizer, step):
    """In place of a step's own: an older gradient halved, added and replaced before backward."""
    model(*batch(step + 20)).backward()
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = (parameter.grad / 2, full(parameter.grad) / 2, None)[i % 3]


CHANGES = (
    scaled_by_data, vector, set_, swapped, double_and_back, moved, averaged, evaluated_in_inference_mode,
    halved_gradient,
)  # fmt: skip


@in_turns(3)
@pytest.mark.parametrize("kind", PLANS)
def test_memory_of_parameters_replaced(kind):
    """The flat buffer takes the write; it was ignored, and nothing trained any more."""

    def work():
        for change in CHANGES:
            equals_one_device(kind, 2, Net, change)

    run_ranks(2, work, timeout=180)


def test_an_exchange_of_tensors_with_hooks_under_zero3_is_refused_on_all_ranks():
    def work():
        model, optimizer = parallelize(plan_of("zero3", 2), Net(), adamw)
        trained(model, optimizer)
        first = next(model.parameters())
        handle = first.register_hook(lambda gradient: None)
        with pytest.raises(OperatorError, match="have hooks"):
            torch.utils.swap_tensors(first, nn.Parameter(first.detach() * 0.9))
        handle.remove()
        trained(model, optimizer)

    run_ranks(2, work)


@pytest.mark.parametrize("kind", PLANS)
def test_another_dtype_before_the_first_step(kind):
    def work():
        def prepare(model, optimizer):
            model.double()

        def in_double(model, optimizer, step):
            model.forward = lambda x, targets: type(model).forward(model, x.double(), targets)

        equals_one_device(kind, 2, Net, in_double, prepare)

    run_ranks(2, work)


def test_what_a_flat_buffer_cannot_take_is_refused():
    def work():
        model, _ = parallelize(plan_of("zero3", 2), Net(), adamw)
        weight = model.head.weight
        with pytest.raises(PlacementError, match="a value of another shape"):
            weight.data = torch.zeros(2, 2)
        with pytest.raises(OperatorError, match="set one by one"):
            weight.set_(torch.zeros(4).untyped_storage(), 0, (4,))
        weight.data = weight.data.double()
        with pytest.raises(PlanError, match="another dtype or device"):
            model(*batch(0))

    run_ranks(2, work)


# --- hooks on gradients --------------------------------------------------------------------


def stepped_in_hooks(model):
    """The recipe that saves gradient memory: an optimizer per parameter, stepped when its gradient is there. Returns
    (name, gradient) of every step, and of what lay in gradients then the most elements."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.02, foreach=False) for p in model.parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen, most = [], [0]

    def step(parameter):
        held = [one.grad for one in model.parameters() if one.grad is not None]
        most[0] = max(most[0], sum(getattr(one, "mesh_layout", one).shape.numel() for one in held))
        seen.append((names[parameter], full(parameter.grad).clone()))
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return seen, most


class Deep(Net):
    """Twice the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks.extend(Block() for _ in range(3))


@pytest.mark.parametrize("kind", [*PLANS, "zero1", "offload"])
def test_an_optimizer_stepped_in_hooks(kind):
    """`p.grad` was None there, or not reduced; under ZeRO-3 nothing trained."""

    def work():
        torch.manual_seed(0)
        alone = Deep()
        model = copy.deepcopy(alone)
        more = {"zero1": {"zero": 1}, "offload": {"zero": 2, "offload": True}}.get(kind)
        plan = plan_of("dp", 2).override(**more) if more else plan_of(kind, 2)
        model, _ = parallelize(plan, model)
        results = []
        for one in (alone, model):
            seen, most = stepped_in_hooks(one)
            losses = []
            for step in range(STEPS):
                loss = one(*batch(step))
                loss.backward()
                losses.append(loss.item())
                assert all(parameter.grad is None for parameter in one.parameters())
            found = {name: full(p.detach()).clone() for name, p in one.named_parameters()}
            results.append((losses, dict(seen), len(seen), found, most[0]))
        (losses, last, steps, found, _), (mine, my_last, my_steps, my_found, most) = results
        torch.testing.assert_close(mine, losses, rtol=1e-5, atol=0)
        assert my_steps == steps
        close(my_last, last)
        close(my_found, found)
        total = sum(parameter.numel() for parameter in alone.parameters())
        return most / total

    shares = run_ranks(2, work)
    if kind == "zero3":  # units are blocks there; below, all of so small a model is one bucket
        assert max(shares) < 0.5


@pytest.mark.parametrize("kind", PLANS)
def test_hooks_run_for_gradients_that_came(kind):
    """They ran for every gradient that was there: after `autograd.grad`, and after a backward of another part."""

    def work():
        torch.manual_seed(0)
        alone = Net()
        model, _ = parallelize(plan_of(kind, 2), copy.deepcopy(alone))
        found = []
        for one in (alone, model):
            seen = []
            for name, parameter in one.named_parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
            one(*batch(0)).backward()
            torch.autograd.grad(one(*batch(1)), one.head.weight)
            one.blocks.requires_grad_(False)
            one(*batch(2)).backward()
            found.append(sorted(seen))
        assert found[0] == found[1]

    run_ranks(2, work)


def test_tensor_hooks_of_parameters_under_zero3_see_whole_gradients():
    """Registered at rest they took the layout of the flat part."""

    def work():
        torch.manual_seed(0)
        alone = Net()
        model, _ = parallelize(plan_of("zero3", 2), copy.deepcopy(alone))
        found = []
        for one in (alone, model):
            norms = {}
            for name, parameter in one.named_parameters():
                parameter.register_hook(lambda g, name=name, norms=norms: norms.update({name: full(g).norm()}) or 2 * g)
            one(*batch(0)).backward()
            found.append((norms, {name: full(p.grad) for name, p in one.named_parameters()}))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)

    run_ranks(2, work)


# --- gradients of gradients ----------------------------------------------------------------


def of_all(model, step):
    """The penalty of all parameters' gradients, and a forward between it and its backward."""
    loss = model(*batch(step))
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return model(*batch(step + 30)) + loss + 0.1 * sum(gradient.square().sum() for gradient in first)


def of_one_weight(model, step):
    loss = model(*batch(step))
    return loss + torch.autograd.grad(loss, model.head.weight, create_graph=True)[0].square().sum()


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in PLANS), ("tp2 x zero3", 4)])
@pytest.mark.parametrize("loss", [of_all, of_one_weight])
def test_penalties_of_gradients(loss, kind, ranks):
    """Under ZeRO-3 the weights were let go before the second backward, and gradients had the layout of flat parts."""

    def work():
        torch.manual_seed(0)
        alone = Net((None, None)).double()
        model, optimizer = parallelize(plan_of(kind, ranks), copy.deepcopy(alone), adamw)
        results = []
        for one, steps in ((alone, adamw(alone.parameters())), (model, optimizer)):
            one.forward = lambda x, targets, forward=one.forward: forward(x.double(), targets)
            found = []
            for step in range(STEPS):
                total = loss(one, step)
                total.backward()
                found += [total.detach(), *(full(parameter.grad).clone() for parameter in one.parameters())]
                steps.step()
                steps.zero_grad()
            results.append([full(value) for value in found])
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)

    run_ranks(ranks, work)

"""Norms that a loop takes by itself, over all of model.parameters(): global, or refused; and optimizers of stages that
train nothing."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_plans import PlanError
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

COUNT, ROWS = 2, 8


class Net(nn.Module):
    """The first and the last layer share their weight, over the cut; a block is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.last(x), y)


def accumulated(numbers):
    numbers = list(numbers)
    total = torch.zeros((), dtype=numbers[0].dtype)
    for number in numbers:
        total += number
    return total


def gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


def parameters(model):
    return list(model.parameters())


# What a loop may compute of all gradients, and of all parameters.
IDIOMS = {
    "squares": lambda all_: sum(g.square().sum() for g in all_).sqrt(),
    "powers": lambda all_: sum((g**2).sum() for g in all_) ** 0.5,
    "products": lambda all_: sum((g * g).sum() for g in all_),
    "data": lambda all_: sum(g.data.norm(2).item() ** 2 for g in all_) ** 0.5,
    "flat": lambda all_: torch.stack([g.detach().float().flatten().norm(1) for g in all_]).sum(),
    "absolute": lambda all_: sum(torch.sum(torch.abs(g)) for g in all_),
    "cubes": lambda all_: sum((g.abs() ** 3).sum() for g in all_),
    "norms": lambda all_: sum(g.norm() for g in all_),
    "norms, weighted": lambda all_: sum(0.5 * g.norm(1) for g in all_) / 2,
    "norms, squared": lambda all_: sum(g.norm() ** 2 for g in all_).sqrt(),
    "norms, stacked": lambda all_: torch.stack([torch.linalg.vector_norm(g) for g in all_]).sum(),
    "in place": lambda all_: accumulated(g.square().sum() for g in all_),
    "copies": lambda all_: sum(g.clone().square().sum() for g in all_),
    "products of copies": lambda all_: sum((g.clone() * g).sum() for g in all_),
    "products with copies": lambda all_: sum((g * g.clone().detach()).sum() for g in all_),
    "largest": lambda all_: max(g.abs().max().item() for g in all_),
    "finite": lambda all_: float(all(torch.isfinite(g).all() for g in all_)),
    "no number": lambda all_: float(any(g.isnan().any() for g in all_)),
    "torch's": lambda all_: nn.utils.get_total_norm(all_),
}

# And what it may not: this rank's stages alone would give it.
REFUSED = {
    "mean": lambda model: sum(g.mean() for g in gradients(model)),
    "sum": lambda model: sum(g.sum() for g in gradients(model)),
    "scaled": lambda model: sum((g / 2).square().sum() for g in gradients(model)),
    "largest": lambda model: max(g.max() for g in gradients(model)),
    "flat": lambda model: torch.cat([g.flatten() for g in gradients(model)]),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "inner": lambda model: sum((p * p.grad).sum() for p in model.parameters() if p.grad is not None),
    "step": lambda model: torch.optim.LBFGS(model.parameters()).step(lambda: torch.tensor(1.0)),
}


def trained(chosen):
    """Each idiom of gradients and of parameters in three steps, which clip by hand and add a penalty by hand."""
    torch.manual_seed(0)
    model = Net()
    if chosen is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model, optimizer = vescale.parallelize(chosen, model, lambda ps: torch.optim.SGD(ps, lr=0.1))
    seen = []
    for x, y in torch.randn(3, 2, COUNT * ROWS, 8, generator=torch.Generator().manual_seed(1)).unbind():
        parts = 1 if chosen is not None else COUNT
        for pair in zip(x.chunk(parts), y.chunk(parts)):
            (model(*pair) / parts).backward()
        (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        for of in (gradients, parameters):
            seen += [float(idiom(of(model))) for idiom in IDIOMS.values()]
        norm = sum(g.square().sum() for g in gradients(model)).sqrt()
        for gradient in gradients(model):
            gradient.mul_(0.05 / norm)
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
    return torch.tensor(seen), whole


def plan(mesh, zero=0):
    cuts = ("blocks.2",) if mesh["pp"] == 2 else ("blocks.1", "blocks.3")
    pipeline = vescale.Pipeline(cuts=cuts, microbatches=COUNT)
    return vescale.Plan(mesh=mesh, parameters={"*": {}}, zero=zero, pipeline=pipeline)


PLANS = [plan({"pp": 2}), plan({"pp": 3}), plan({"pp": 2, "dp": 2}, zero=3)]


@pytest.mark.parametrize("chosen", PLANS, ids=["pp2", "pp3", "pp2 dp2 zero3"])
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_norms_that_a_loop_takes_are_global(chosen):
    wanted, expected = trained(None)
    for seen, whole in run_ranks(chosen.world_size, trained, chosen, timeout=90):
        assert torch.allclose(seen, wanted, rtol=2e-6, atol=0)
        for name, value in whole.items():
            assert (value - expected[name]).norm() <= 2e-6 * expected[name].norm()


def clipped(chosen, dtype):
    """Steps whose loop adds a penalty to the loss, and clips by a norm of its own. Gives the losses, the norms of the
    idioms that stay tensors, and the parameters."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    if chosen is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        model, optimizer = vescale.parallelize(chosen, model, lambda ps: torch.optim.SGD(ps, lr=0.5))
    seen = []
    for x, y in torch.randn(6, 2, COUNT * ROWS, 8, generator=torch.Generator().manual_seed(1)).to(dtype).unbind():
        loss = model(x, y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        loss = loss + 0.01 * sum(p.norm() for p in model.parameters() if p.requires_grad)
        loss.backward()
        norm = sum(g.square().sum() for g in gradients(model)).sqrt()
        found = [IDIOMS[name](gradients(model)) for name in IDIOMS if name not in PYTHONS]
        seen += [one.item() for one in (loss.detach(), norm, *found)]
        for gradient in gradients(model):
            gradient.mul_(0.05 / norm)
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
    return torch.tensor(seen, dtype=torch.double), norm.dtype, whole


PYTHONS = ("data", "flat", "largest", "finite", "no number")
"""Idioms that leave tensors, or the model's dtype: ranks may differ in the last bit."""
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("chosen", PLANS, ids=["pp2", "pp3", "pp2 dp2 zero3"])
def test_what_a_loop_adds_up_has_the_same_bits_on_all_ranks(chosen, dtype):
    """In the model's dtype; so a tied weight stays one, and one device's."""
    wanted, _, expected = clipped(None, dtype)
    ranks = run_ranks(chosen.world_size, clipped, chosen, dtype, timeout=90)
    for seen, kind, whole in ranks:
        assert kind is dtype and torch.equal(seen, ranks[0][0])
        assert torch.allclose(seen, wanted, rtol=EXACT[dtype], atol=0)
        for name, value in whole.items():
            assert value.dtype is dtype
            assert (value - expected[name]).norm() <= EXACT[dtype] * expected[name].norm()
    tied = [whole[name] for _, _, whole in ranks for name in ("first.weight", "last.weight") if name in whole]
    assert len(tied) >= chosen.mesh["pp"] - 1 and all(torch.equal(one, tied[0]) for one in tied)


def asked(chosen):
    """`torch.autograd.grad` of all parameters, or of one, and what is refused of the others' gradients."""
    torch.manual_seed(0)
    model = Net().double()
    if chosen is not None:
        model, _ = vescale.parallelize(chosen, model)
    x, y = torch.randn(2, COUNT * ROWS, 8, generator=torch.Generator().manual_seed(1)).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(model(x, y), trained)
    assert len(found) == len(trained) and all(p.grad is None or p.grad.numel() == 0 for p in trained)
    names = {id(p): n for n, p in model.named_parameters()}
    given = {names[id(p)]: g for p, g in zip(trained, found) if id(p) in names}
    if chosen is not None:
        with pytest.raises(PipelineError, match="stands for all that other stages hold"):
            sum(g.norm() for g in found)
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in given.items()}


@pytest.mark.parametrize("chosen", PLANS[:2], ids=["pp2", "pp3"])
def test_autograd_grad_of_all_parameters_gives_those_that_a_rank_holds(chosen):
    wanted = asked(None)
    ranks = run_ranks(chosen.world_size, asked, chosen, timeout=90)
    assert set().union(*ranks) | {"last.weight"} >= set(wanted)
    for found in ranks:
        for name, gradient in found.items():
            name = "first.weight" if name == "last.weight" else name
            assert torch.allclose(gradient, wanted[name], rtol=1e-9, atol=1e-12)


def refusals(chosen):
    torch.manual_seed(0)
    model, _ = vescale.parallelize(chosen, Net())
    x, y = torch.randn(2, COUNT * ROWS, 8)
    model(x, y).backward()
    found = {}
    for name, compute in REFUSED.items():
        try:
            compute(model)
        except PipelineError as error:
            found[name] = "stands for all that other stages hold" in str(error)
    return found


@pytest.mark.parametrize("chosen", PLANS, ids=["pp2", "pp3", "pp2 dp2 zero3"])
def test_what_norms_do_not_tell_is_refused(chosen):
    assert run_ranks(chosen.world_size, refusals, chosen, timeout=90) == [dict.fromkeys(REFUSED, True)] * (
        chosen.world_size
    )


COPIES = {
    "clone": lambda t: t.detach().clone(),
    "dtype": lambda t: t.double(),
    "squares": lambda t: t**2,
    "absolute": lambda t: t.detach().abs(),
    "view of a copy": lambda t: t.clone().flatten(),
}
READS = {
    "norm": lambda copy, now: copy.norm(),
    "sum": lambda copy, now: copy.square().sum(),
    "product": lambda copy, now: (copy * now).sum(),
    "product, other way": lambda copy, now: (now * copy).sum(),
    "largest": lambda copy, now: copy.abs().max(),
    "foreach": lambda copy, now: torch._foreach_norm([copy])[0],
}
CHANGES = {
    "backward": lambda model, optimizer, batch: model(*batch).backward(),
    "anew": lambda model, optimizer, batch: (optimizer.zero_grad(), model(*batch).backward()),
    "clipped": lambda model, optimizer, batch: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "step": lambda model, optimizer, batch: optimizer.step(),
    "by hand": lambda model, optimizer, batch: torch.no_grad()(lambda: [p.mul_(0.5) for p in model.parameters()])(),
}


def copied(chosen):
    """For each copy, of the last parameter or its gradient, and each change after it, what the reads gave."""
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(chosen, Net(), lambda ps: torch.optim.SGD(ps, lr=0.1))
    batch = torch.randn(2, COUNT * ROWS, 8).unbind()
    given = {}
    for change in CHANGES:
        of_values = change in ("step", "by hand")
        for name, copy in COPIES.items():
            model(*batch).backward()
            last = [p for p in model.parameters() if p.requires_grad][-1]
            kept = copy(last.detach() if of_values else last.grad)
            READS["norm"](copy(last.detach()), None) if name in ("clone", "dtype") else None
            CHANGES[change](model, optimizer, batch)
            for read, compute in READS.items():
                try:
                    compute(kept, last.detach() if of_values else last.grad)
                except PipelineError as error:
                    given[change, name, read] = "a copy of it was made before" in str(error)
    return given


@pytest.mark.parametrize("chosen", [PLANS[0], PLANS[2]], ids=["pp2", "pp2 dp2 zero3"])
def test_a_copy_that_what_it_was_made_of_has_left_behind_is_refused(chosen):
    for given in run_ranks(chosen.world_size, copied, chosen, timeout=90):
        assert given == dict.fromkeys(itertools.product(CHANGES, COPIES, READS), True)


def grads_of(parameters):
    return [p.grad for p in parameters if p.grad is not None]


# Ways to parameters that no stand-in is in; of the model, the optimizer and what its factory was given.
WAYS = {
    "names": lambda model, optimizer, given: [p for _, p in model.named_parameters()],
    "groups": lambda model, optimizer, given: [p for g in optimizer.param_groups for p in g["params"]],
    "first group": lambda model, optimizer, given: optimizer.param_groups[0]["params"],
    "given": lambda model, optimizer, given: given,
    "modules": lambda model, optimizer, given: list(
        dict.fromkeys(p for module in model.modules() for p in module.parameters(recurse=False) if module is not model)
    ),
    "trained": lambda model, optimizer, given: [p for n, p in model.named_parameters() if p.requires_grad],
    "matrices": lambda model, optimizer, given: [p for p in model.parameters() if p.ndim > 1],
    "vectors": lambda model, optimizer, given: [p for n, p in model.named_parameters() if "bias" in n],
    "blocks": lambda model, optimizer, given: list(model.blocks.parameters()),
    "a block": lambda model, optimizer, given: list(model.blocks[3].parameters()),
    "a tied weight": lambda model, optimizer, given: list(model.last.parameters()),
    "of one stage": lambda model, optimizer, given: [*model.blocks[0].parameters(), *model.first.parameters()],
}


def by_other_ways(chosen, way, values):
    torch.manual_seed(0)
    model, given = Net(), []

    def factory(ps):
        given.extend(ps)
        return torch.optim.SGD(given, lr=0.5)

    model, optimizer = (model, factory(model.parameters())) if chosen is None else (
        vescale.parallelize(chosen, model, factory)
    )  # fmt: skip
    seen = []
    for x, y in torch.randn(4, 2, COUNT * ROWS, 8, generator=torch.Generator().manual_seed(1)).unbind():
        parts = 1 if chosen is not None else COUNT
        for pair in zip(x.chunk(parts), y.chunk(parts)):
            (model(*pair) / parts).backward()
        found = WAYS[way](model, optimizer, given)
        if values:
            seen.append(float(nn.utils.get_total_norm(list(found)).detach()))
        seen.append(float(nn.utils.get_total_norm(grads_of(found), norm_type=3)))
        seen.append(float(nn.utils.clip_grad_norm_(found, 0.05)))
        # Layer by layer, on the ranks that hold one.
        for block in model.blocks if way == "names" else ():
            nn.utils.clip_grad_norm_(block.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
    return torch.tensor(seen), whole


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chosen", [PLANS[0], PLANS[2]], ids=["pp2", "pp2 dp2 zero3"])
def test_torchs_norm_of_what_each_rank_has_chosen_is_one_devices(chosen, way):
    wanted, expected = by_other_ways(None, way, True)
    for seen, whole in run_ranks(chosen.world_size, by_other_ways, chosen, way, True, timeout=90):
        torch.testing.assert_close(seen, wanted, rtol=3e-6, atol=0)
        for name, value in whole.items():
            assert (value - expected[name]).norm() <= 3e-6 * expected[name].norm()


def frozen(chosen, first, folder):
    """Five steps of what the factory's filter leaves; after three of them, of another model that loads the first's."""
    seen = []
    for begin, end in ((0, 3), (3, 5)):
        torch.manual_seed(0)
        model = Net()
        for name, parameter in model.named_parameters():
            is_first = name.startswith(("first", "blocks.0", "blocks.1"))
            parameter.requires_grad_(is_first != first and name != "first.weight")

        def factory(ps):
            return torch.optim.AdamW((p for p in ps if p.requires_grad), lr=1e-2)

        model, optimizer = (model, factory(model.parameters())) if chosen is None else (
            vescale.parallelize(chosen, model, factory)
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if begin:
            vescale.load(folder, state)
        for x, y in torch.randn(5, 2, COUNT * ROWS, 8, generator=torch.Generator().manual_seed(1))[begin:end].unbind():
            parts = 1 if chosen is not None else COUNT
            for pair in zip(x.chunk(parts), y.chunk(parts)):
                (model(*pair) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            seen.append(optimizer.param_groups[0]["lr"])
        if not begin:
            vescale.save(folder, state, step=1)
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return seen, {name: value.detach() for name, value in whole.items()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("chosen", [PLANS[0], PLANS[2]], ids=["pp2", "pp2 dp2 zero3"])
def test_a_stage_that_trains_nothing_has_an_optimizer_too(chosen, first, tmp_path):
    rates, expected = frozen(None, first, tmp_path / "one")
    for seen, whole in run_ranks(chosen.world_size, frozen, chosen, first, str(tmp_path / "some"), timeout=90):
        assert seen == rates
        for name, value in whole.items():
            assert (value - expected[name]).norm() <= 1e-5 * expected[name].norm()


def chosen_nowhere():
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):  # torch's own, as on one device
        vescale.parallelize(PLANS[0], Net(), lambda given: torch.optim.SGD(iter(()), lr=0.1))


def test_a_factory_that_chooses_nothing_gets_torchs_error():
    run_ranks(2, chosen_nowhere, timeout=90)


def test_an_optimizer_that_multiplies_all_gradients_is_refused():
    for given in (lambda ps: torch.optim.LBFGS(ps), torch.optim.LBFGS):
        with pytest.raises(PlanError, match="LBFGS computes with all parameters of the model at once"):
            vescale.parallelize(
                vescale.Plan(mesh={"pp": 1}, parameters={"*": {}}, pipeline=vescale.Pipeline()), Net(), given
            )

"""Training goes on from a checkpoint as if it had not stopped, under any plan."""

from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor import DTensor, ViewError
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

VOCABULARY, POSITIONS, BATCH = 61, 16, 12
STEPS, MORE = 5, 5
LOSS = 1e-5


def build(dropout=0.0):
    from nanogpt.model import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(VOCABULARY, POSITIONS, n_layer=2, n_head=4, n_embd=32, dropout=dropout))


def plan_of(mesh, **fields):
    plan = library.gpt(mesh=mesh)
    return plan.override(**fields) if fields else plan


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=generator) for _ in range(count)]


ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)


def start(mesh, fields, dropout=0.0, optimizer_fn=ADAMW):
    """Model, optimizer and scheduler under a plan, and the state that a checkpoint holds of them."""
    plan = plan_of(mesh, **fields)
    model, optimizer = vescale.parallelize(plan, build(dropout), optimizer_fn)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rng = vescale.get_rng_state()
    return {"plan": plan, "model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng, "step": 0}


def train(state, steps):
    losses = []
    for inputs, targets in batches(STEPS + MORE)[state["step"] : state["step"] + steps]:
        loss = state["model"](inputs, targets)
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
        state["step"] += 1
    return losses


def global_values(state):
    """Every parameter and optimizer state, whole."""
    found = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    optimizer = state["optimizer"]
    if hasattr(optimizer, "sharded_state_dict"):
        per_name = optimizer.sharded_state_dict()["state"]
    else:
        names = {id(p): name for name, p in state["model"].named_parameters()}
        per_name = {names[id(p)]: entries for p, entries in optimizer.state.items()}
    for name, entries in per_name.items():
        found |= {f"optimizer.{name}.{key}": value for key, value in entries.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).detach().clone()
        for name, value in found.items()
    }


def save_and_go_on(path, mesh, fields, dropout):
    torch.manual_seed(3)
    state = start(mesh, fields, dropout)
    train(state, STEPS)
    state["rng"] = vescale.get_rng_state()
    vescale.save(path, state)
    return global_values(state), train(state, MORE), global_values(state)


def resume(path, mesh, fields, dropout):
    torch.manual_seed(4)
    state = start(mesh, fields, dropout)
    report = vescale.load(path, state)
    assert not report.missing and not report.extra
    vescale.set_rng_state(state["rng"])
    values = global_values(state)
    return values, train(state, MORE), global_values(state)


PIPELINE = {"pipeline": vescale.Pipeline("pp", ("transformer.h.1",), microbatches=3)}
SAVED = ({"dp": 2, "tp": 2}, {"zero": 1})
RESUMED = [
    (1, {"dp": 1}, {}),
    (2, {"dp": 2}, {"zero": 2}),
    (2, {"tp": 2}, {}),
    (3, {"dp": 3}, {"zero": 1}),
    (4, {"tp": 4}, {}),
    (4, {"dp": 4}, {"zero": 3}),
    (8, {"dp": 2, "tp": 4}, {"zero": 3}),
    (4, {"pp": 2, "tp": 2}, PIPELINE),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    return path, run_ranks(4, save_and_go_on, path, *SAVED, 0.0, timeout=120)[0]


@in_turns(3)
@pytest.mark.parametrize("world, mesh, fields", RESUMED)
def test_resumes_under_another_plan(saved, world, mesh, fields):
    path, (wanted, losses, _) = saved
    ranks = run_ranks(world, resume, path, mesh, fields, 0.0, timeout=120)
    assert set().union(*(values for values, _, _ in ranks)) == set(wanted)  # a pipeline's stage has a part of them
    for values, found, _ in ranks:
        assert len(values) == len(wanted) or "pp" in mesh
        assert [name for name in values if not torch.equal(values[name], wanted[name])] == []
        assert max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)) <= LOSS


def test_a_pipeline_is_saved_whole(tmp_path):
    """Each stage saves its own part; one device loads all of it."""
    saved = run_ranks(4, save_and_go_on, tmp_path, {"pp": 2, "tp": 2}, PIPELINE, 0.0, timeout=120)
    wanted = {name: value for values, _, _ in saved for name, value in values.items()}
    ((values, losses, _),) = run_ranks(1, resume, tmp_path, {"dp": 1}, {}, 0.0, timeout=120)
    assert set(values) == set(wanted) and all(torch.equal(values[name], wanted[name]) for name in wanted)
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, saved[0][1], strict=True)) <= LOSS


def test_resumes_bitwise_on_the_same_mesh_with_dropout(tmp_path):
    before = run_ranks(4, save_and_go_on, tmp_path, *SAVED, 0.2, timeout=120)
    after = run_ranks(4, resume, tmp_path, *SAVED, 0.2, timeout=120)
    for (_, wanted_losses, wanted), (_, losses, values) in zip(before, after):
        assert losses == wanted_losses
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def reshard_and_go_on(mesh, fields):
    torch.manual_seed(3)
    old = start(*SAVED)
    train(old, STEPS)
    wanted = global_values(old)
    torch.manual_seed(4)
    new = start(mesh, fields)
    vescale.reshard({key: value for key, value in old.items() if key != "plan"}, new)
    assert new["step"] == STEPS
    values = global_values(new)
    different = [name for name in wanted if not torch.equal(values[name], wanted[name])]
    return different, set(values) ^ set(wanted), train(new, MORE), train(old, MORE)


@in_turns(3)
@pytest.mark.parametrize("mesh, fields", [({"tp": 4}, {}), ({"dp": 4}, {"zero": 3}), ({"dp": 2, "tp": 2}, {"zero": 2})])
def test_online_reshard_goes_on_as_from_disk(mesh, fields):
    for different, other, found, losses in run_ranks(4, reshard_and_go_on, mesh, fields, timeout=120):
        assert different == [] and not other
        assert max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)) <= LOSS


def samples(path, mesh, batches, load):
    """The places that this rank's part of some global batches has, after a checkpoint or before one."""
    order = torch.Generator().manual_seed(3)
    whole = torch.utils.data.DataLoader(torch.arange(1000), batch_size=12, shuffle=True, generator=order)
    loader = vescale.loader(whole, vescale.Plan(mesh=mesh, parameters={"*": {}}))
    if load:
        vescale.load(path, {"loader": loader})
    seen = []
    for _, batch in zip(range(batches), loader):
        seen.append((batch.to_local() if isinstance(batch, vescale.DTensor) else batch).tolist())
    if not load:
        vescale.save(path, {"loader": loader})
    return seen


def test_another_degree_goes_on_with_the_next_unseen_sample(tmp_path):
    whole = run_ranks(1, samples, tmp_path / "one", {"dp": 1}, 7, False)[0]
    before = run_ranks(2, samples, tmp_path / "two", {"dp": 2}, 3, False)
    after = run_ranks(4, samples, tmp_path / "two", {"dp": 4}, 4, True)
    stream = [[i for rank in ranks for i in rank] for part in (before, after) for ranks in zip(*part)]
    assert stream == whole


@in_turns(3)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("fields", [{"zero": 0}, {"zero": 2}], ids=str)
def test_states_that_are_whole_on_one_rank(tmp_path, fields):
    """Muon's: the other ranks' are empty."""

    def save():
        state = start({"dp": 2, "tp": 2}, fields, optimizer_fn=muon)
        train(state, 2)
        vescale.save(tmp_path, state)
        return global_values(state), train(state, 2)

    def load(mesh, fields):
        state = start(mesh, fields, optimizer_fn=muon)
        vescale.load(tmp_path, state)
        return global_values(state), train(state, 2)

    wanted, losses = run_ranks(4, save)[0]
    for mesh, other in (({"dp": 2, "tp": 2}, fields), ({"dp": 4}, {"zero": 3}), ({"tp": 4}, {})):
        found, more = run_ranks(4, load, mesh, other)[0]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        # Its iteration runs in bfloat16: the last bit of a gradient moves an update by 2^-8 of itself.
        assert more == losses if other is fields else max(abs(a / b - 1) for a, b in zip(more, losses)) < 1e-3


def kept_views(path, mesh, fields):
    """What views show that were taken before a load: of them that are taken again, and of those that were kept."""
    state = start(mesh, fields)
    vescale.save(path, {"model": state["model"]})
    weight = state["model"].transformer.h[0].mlp.c_fc.weight
    train(state, 1)
    with torch.no_grad():
        kept = [weight[0], weight[1:3], weight.detach()]
        vescale.load(path, {"model": state["model"]})
        shown = []
        for view, again in zip(kept, [weight[0], weight[1:3], weight.detach()]):
            try:
                shown.append((view.full_tensor(), again.full_tensor()))
            except ViewError:
                shown.append(None)
    return shown


@pytest.mark.parametrize("mesh, fields", [({"dp": 2}, {}), ({"tp": 2}, {}), ({"dp": 2}, {"zero": 3})])
def test_a_view_that_is_kept_over_a_load_shows_what_was_loaded_or_raises(tmp_path, mesh, fields):
    for shown in run_ranks(2, kept_views, str(tmp_path), mesh, fields):
        assert any(shown) and (None in shown) == (mesh != {"dp": 2} or bool(fields))
        assert all(torch.equal(*pair) for pair in shown if pair is not None)

"""accelerate's own Accelerator under a plan: scripts as its users write them, against one device."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

pytest.importorskip("accelerate", reason="these tests are of accelerate")
warm_up("vescale", "vescale.integrations.accelerate")

LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11
SHARDED = {"up.weight": {"tp": vescale.Shard(0)}, "up.bias": {"tp": vescale.Shard(0)},
           "down.weight": {"tp": vescale.Shard(1)}, "*": {}}  # fmt: skip
PLANS = {
    "dp2": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "dp2 zero 3": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp2": vescale.Plan(mesh={"tp": 2}, parameters=SHARDED),
    "dp2 tp2 zero 3": vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters=SHARDED, zero=3),
    "one": vescale.Plan(mesh={"dp": 1}, parameters={"*": {}}),
}
RANKS = {name: plan.world_size for name, plan in PLANS.items()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


def torchrun(world, rank):
    """The environment that torchrun gives a rank, or none for one process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in names.items():
        if world > 1:
            os.environ[name] = str(value)
        else:
            os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = "1"


def data():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(22, 6, generator=generator), torch.randint(4, (22,), generator=generator))


ORDERS = {
    "together": lambda a, m, o, l, s: a.prepare(m, o, l, s),
    "optimizer first": lambda a, m, o, l, s: [*reversed(a.prepare(s, l, o, m))],
    "loader apart": lambda a, m, o, l, s: [*a.prepare(m, o), a.prepare(l), a.prepare(s)],
}


def script(plan, order="together", accumulate=1, folder=None, resumes=False, epochs=2):
    """A user's script; one line is ours. Losses, what was gathered at the end, and whole parameters."""
    from accelerate import Accelerator

    rank = torch.distributed.get_rank()
    torchrun(torch.distributed.get_world_size() if plan else 1, rank)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if plan:
        from vescale.integrations.accelerate import parallelize

        parallelize(PLANS[plan], accelerator)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    model, optimizer, loader, scheduler = ORDERS[order](accelerator, model, optimizer, loader, scheduler)
    losses = []
    if resumes:
        accelerator.load_state(folder)
    for epoch in range(1 if resumes else 0, epochs):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss).mean().item())
        if folder and not resumes and epoch == 0:
            accelerator.save_state(folder)
    model.eval()
    predicted = []
    for inputs, labels in accelerator.prepare(DataLoader(data(), batch_size=5)):
        with torch.no_grad():
            logits = model(inputs)
        found, labels = accelerator.gather_for_metrics((logits, labels))
        assert type(found) is type(labels) is torch.Tensor
        predicted.append(found)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    whole = {n: (p.detach().full_tensor() if plan else p.detach()).clone() for n, p in model.named_parameters()}
    assert accelerator.is_main_process == (rank == 0 or not plan) and accelerator.num_processes == 1
    if rank == 0:
        assert all(torch.equal(state[name], value) for name, value in whole.items())
    return losses, torch.cat(predicted), whole


def compared(plan, **options):
    return errors(script(plan, **options), script(None, **{**options, "folder": None, "resumes": False}))


def errors(found, wanted):
    losses, wanted_losses = found[0], wanted[0][-len(found[0]):]  # fmt: skip
    return (
        max(abs(a - b) / b for a, b in zip(losses, wanted_losses, strict=True)),
        ((found[1] - wanted[1]).norm() / wanted[1].norm()).item(),
        max(((found[2][name] - p).norm() / p.norm()).item() for name, p in wanted[2].items()),
    )


CASES = [(plan, order, count) for plan in PLANS for order in ORDERS for count in (1, 3)]


@pytest.mark.parametrize(("plan", "order", "accumulate"), slice_of(CASES, 5))
def test_trains_as_one_device(plan, order, accumulate):
    for loss, predicted, parameter in run_ranks(
        RANKS[plan], compared, plan, order=order, accumulate=accumulate, timeout=120
    ):
        assert loss <= LOSS and predicted <= PARAMETER and parameter <= PARAMETER


@pytest.mark.parametrize(("first", "second"), [("dp2 tp2 zero 3", "dp2"), ("dp2", "tp2"), ("tp2", "one")])
def test_a_state_goes_on_under_another_mesh(first, second, tmp_path):
    run_ranks(RANKS[first], script, first, folder=str(tmp_path), timeout=120)
    found = run_ranks(RANKS[second], compared, second, folder=str(tmp_path), resumes=True, timeout=120)
    for loss, predicted, parameter in found:
        assert loss <= LOSS and predicted <= PARAMETER and parameter <= PARAMETER


def named_and_hooked(plan, folder):
    """A project that names its checkpoints, in the middle of an accumulation, and hooks that save a model themselves:
    as accelerate does on one device."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    def made():
        torchrun(torch.distributed.get_world_size() if plan else 1, torch.distributed.get_rank())
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, project_config=project)
        if plan:
            from vescale.integrations.accelerate import parallelize

            parallelize(PLANS[plan], accelerator)
        torch.manual_seed(0)
        model = Net()
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))

    def step(accelerator, model, optimizer, at):
        inputs, labels = data()[4 * at : 4 * at + 4]
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.sync_gradients

    whole = lambda model: [p.detach().full_tensor() if plan else p.detach().clone() for p in model.parameters()]
    accelerator, model, optimizer = made()
    for at in range(4):
        step(accelerator, model, optimizer, at)
        accelerator.save_state()
    kept = sorted(os.listdir(f"{folder}/checkpoints"))
    wanted = whole(model)
    accelerator, model, optimizer = made()
    accelerator.load_state()
    same = all(torch.equal(a, b) for a, b in zip(whole(model), wanted, strict=True))
    seen = [step(accelerator, model, optimizer, at) for at in range(4)]

    calls = []
    accelerator, model, optimizer = made()
    accelerator.project_configuration.automatic_checkpoint_naming = False

    def saves(models, weights, where):
        calls.append(("save", len(models), len(weights), where))
        if accelerator.is_main_process:
            torch.save(weights[0], f"{folder}/own.pt")
        weights.pop()

    accelerator.register_save_state_pre_hook(saves)
    accelerator.register_load_state_pre_hook(lambda models, where: calls.append(("load", len(models), models.clear())))
    accelerator.save_state(f"{folder}/own")
    accelerator.wait_for_everyone()
    own = torch.load(f"{folder}/own.pt")
    same = same and all(torch.equal(a, b) for a, b in zip(own.values(), whole(model), strict=True))
    step(accelerator, model, optimizer, 0)
    before = whole(model)
    accelerator.load_state(f"{folder}/own")
    same = same and all(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True))
    return kept, same, seen, [call[:3] for call in calls]


@pytest.mark.parametrize("plan", ["dp2 zero 3", "tp2"])
def test_projects_and_hooks_are_accelerates(plan, tmp_path):
    (wanted,) = run_ranks(1, named_and_hooked, None, str(tmp_path / "one"), timeout=120)
    assert wanted[0] == ["checkpoint_2", "checkpoint_3"] and wanted[1] and wanted[2] == [False, True, False, False]
    assert run_ranks(2, named_and_hooked, plan, str(tmp_path / "two"), timeout=120) == [wanted] * 2


def seeded_apart():
    """What TRL's trainers do, and what is drawn after it; the index that a script cuts its part by."""
    import random

    import numpy
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from vescale.integrations.accelerate import parallelize

    torchrun(2, torch.distributed.get_rank())
    accelerator = Accelerator(cpu=True)
    set_seed(3, device_specific=True)
    parallelize(PLANS["dp2"], accelerator)
    drawn = [torch.rand(2).tolist(), random.random(), numpy.random.rand()]
    torch.manual_seed(0)
    model = Net()
    set_seed(3, device_specific=True)
    accelerator.prepare(model)
    return drawn, torch.rand(2).tolist(), accelerator.process_index, accelerator.is_main_process


def test_all_ranks_draw_one_devices_numbers():
    (drawn, later, index, prints), second = run_ranks(2, seeded_apart)
    torch.manual_seed(3)
    assert drawn[0] == torch.rand(2).tolist() == later
    assert index == 0 and prints and second == (drawn, later, 0, False)


def refused(call):
    from accelerate import Accelerator

    from vescale.integrations.accelerate import parallelize

    torchrun(2, torch.distributed.get_rank())
    with pytest.raises(vescale.PlanError) as found:
        call(Accelerator(cpu=True), parallelize)
    return str(found.value)


def _late(accelerator, parallelize):
    accelerator.prepare(DataLoader(data(), batch_size=4))
    parallelize(PLANS["dp2"], accelerator)


def _two_optimizers(accelerator, parallelize):
    parallelize(PLANS["dp2"], accelerator)
    model = Net()
    accelerator.prepare(model, torch.optim.SGD(model.up.parameters()), torch.optim.SGD(model.down.parameters()))


REFUSED = [(_late, "has prepared objects already"), (_two_optimizers, "2 optimizers were made of one model")]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_refused(call, text):
    first, second = run_ranks(2, refused, call)
    assert first == second and text in first

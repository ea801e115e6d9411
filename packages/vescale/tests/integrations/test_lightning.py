"""Lightning's Trainer and Fabric, as their users write them, under plans: one device's losses and parameters; and
Fabric's own checkpoints taken up under another mesh."""

import os
import warnings

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import run_ranks, warm_up

pytest.importorskip("lightning", reason="these tests are of Lightning")
warm_up("vescale", "lightning")

LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11
SHARDED = {"up.weight": {"tp": vescale.Shard(0)}, "up.bias": {"tp": vescale.Shard(0)},
           "down.weight": {"tp": vescale.Shard(1)}, "*": {}}  # fmt: skip
PLANS = {
    "dp2": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "tp2": vescale.Plan(mesh={"tp": 2}, parameters=SHARDED),
    "dp2 tp2 zero 3": vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters=SHARDED, zero=3),
    "dp2 zero 2": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2),
}
STEPS = 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


def net():
    torch.manual_seed(0)
    return Net()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def data():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(80, 6, generator=generator), torch.randint(4, (80,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=8)


def sharded(plan):
    model = net()
    if plan is None:
        return model, adamw(model.parameters())
    return vescale.parallelize(PLANS[plan], model, adamw)


def fabric_script(plan, folder, start=0, stop=STEPS, resume=False):
    from lightning.fabric import Fabric

    from vescale.integrations.lightning import Checkpoints

    fabric = Fabric(accelerator="cpu", devices=1, plugins=[Checkpoints()] if plan else [])
    fabric.launch()
    inner, optimizer = sharded(plan)
    model, optimizer = fabric.setup(inner, optimizer)
    loader = fabric.setup_dataloaders(data())
    if resume:
        fabric.load(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer})
    torch.manual_seed(7 + start)
    losses = []
    for step, (inputs, labels) in enumerate(loader):
        if not start <= step < stop:
            continue
        if step == STEPS // 2:
            torch.manual_seed(7 + step)  # dropout goes on as where it was saved
        loss = nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if stop < STEPS:
        fabric.save(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer})
    return losses, inner


def trainer_script(plan, folder, stop=STEPS, resume=False):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from vescale.integrations.lightning import Checkpoints

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.its, self.losses = *sharded(plan), []

        def training_step(self, batch, at):
            if at == STEPS // 2:
                torch.manual_seed(7 + at)
            inputs, labels = batch
            loss = nn.functional.cross_entropy(self.net(inputs), labels)
            self.losses.append(loss.item())
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return [self.its], [torch.optim.lr_scheduler.ExponentialLR(self.its, 0.5)]

    module = Module()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=stop, gradient_clip_val=0.5, logger=False,
        callbacks=[saves] if stop < STEPS else [], enable_checkpointing=stop < STEPS, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, plugins=[Checkpoints()] if plan else [],
    )  # fmt: skip
    loader = vescale.loader(data(), PLANS[plan]) if plan else data()  # its position is in Lightning's checkpoint
    torch.manual_seed(7)
    trainer.fit(module, loader, ckpt_path=f"{folder}/step={STEPS // 2}.ckpt" if resume else None)
    if stop == STEPS and not resume:
        mean = sum(module.losses) / len(module.losses)
        assert abs(trainer.callback_metrics["loss"].item() - mean) <= 1e-5 * mean  # logged once, of all rows
    return module.losses, module.net


SCRIPTS = {"fabric": fabric_script, "trainer": trainer_script}


def quietly(script, *args, **options):
    """Lightning warns of what a test has few of (workers, logs); environment variables would name a cluster."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    kept = {name: os.environ.pop(name, None) for name in names}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return SCRIPTS[script](*args, **options)
    finally:
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def against_one_device(script, plan, folder, **options):
    found, model = quietly(script, plan, folder, **options)
    wanted, single = quietly(script, None, folder)
    apart = [abs(a - b) / b for a, b in zip(found, wanted[-len(found) :], strict=True)]
    far = [
        ((a.detach().full_tensor() - b.detach()).norm() / b.detach().norm()).item()
        for a, b in zip(model.parameters(), single.parameters(), strict=True)
    ]
    return max(apart), max(far), len(found)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_trains_as_one_device(script, plan, tmp_path):
    ranks = PLANS[plan].world_size
    for loss, parameter, steps in run_ranks(ranks, against_one_device, script, plan, str(tmp_path), timeout=120):
        assert loss <= LOSS and parameter <= PARAMETER and steps == STEPS


def first_half(script, plan, folder):
    quietly(script, plan, folder, stop=STEPS // 2)
    return sorted(os.listdir(folder))


RESUMES = {"fabric": {"start": STEPS // 2, "resume": True}, "trainer": {"resume": True}}


@pytest.mark.parametrize(("first", "second"), [("dp2 tp2 zero 3", "tp2"), ("tp2", "dp2 zero 2"), ("dp2", "tp2")])
@pytest.mark.parametrize("script", SCRIPTS)
def test_goes_on_under_another_mesh(script, first, second, tmp_path):
    folder = str(tmp_path)
    written = run_ranks(PLANS[first].world_size, first_half, script, first, folder, timeout=120)[0]
    assert len(written) == 1  # no rank wrote a file of its own
    answers = run_ranks(
        PLANS[second].world_size, against_one_device, script, second, folder, timeout=120, **RESUMES[script]
    )
    for loss, parameter, steps in answers:
        assert loss <= LOSS and parameter <= PARAMETER and steps == STEPS - STEPS // 2

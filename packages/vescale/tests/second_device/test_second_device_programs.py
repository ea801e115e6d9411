"""Loops that users of GPUs write, on the second device: one CPU's numbers, and no race, wrong order or hang.

A program trains on a device, by a plan or, without one, alone; it returns what its user would look at. Loaders with
workers and pinned memory, streams of the user's own, scalers, averages, schedules, text between steps, states saved.
"""

import contextlib
import copy
import math
import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import vescale
from vescale import Plan, Shard
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "vescale_testkit.second")

VOCABULARY, WIDTH, ROWS, POSITIONS = 50, 32, 8, 8


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Language(nn.Module):
    def __init__(self, dropout=0.0, recompute=False):
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, ids):
        x = self.table(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Tokens(Dataset):
    def __len__(self):
        return 3 * ROWS

    def __getitem__(self, at):
        return torch.randint(VOCABULARY, (POSITIONS + 1,), generator=torch.Generator().manual_seed(at))


def batch(step, device, rows=ROWS):
    ids = torch.randint(VOCABULARY, (rows, POSITIONS + 1), generator=torch.Generator().manual_seed(100 + step))
    return ids.to(device)


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def started(device, plan, model, make=adamw):
    """The model and its optimizer; the device's generator begins where one CPU's does."""
    if plan is None:
        optimizer = make(model.parameters())
    else:
        model, optimizer = vescale.parallelize(plan, model.to(device), make)
    torch.manual_seed(1)
    return model, optimizer


def trained(model, optimizer, ids, *, clip=None):
    loss = loss_of(model, ids)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def streams(device):
    """The stream of now, and one of the user's own; on a CPU nothing."""
    if device == "cpu":
        return None, contextlib.nullcontext()
    return torch.accelerator.current_stream(), torch.Stream(device=device)


# --- programs: what they return is numbers and tensors, by name


def trainer(device, plan):
    """As a Trainer's: accumulation, a scaler, a schedule with warmup, clipping, an average, evaluation, a log."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2) * 0.9**step)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    found, running = {}, torch.zeros((), device=device)
    for step in range(4):
        for part in batch(step, device).chunk(2):
            loss = loss_of(model, part) / 2
            scaler.scale(loss).backward()
            running += loss.detach()
        scaler.unscale_(optimizer)
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.1)
            if step == 2:
                found["running"] = running.item()
                found["held out"] = loss_of(model.eval(), batch(77, device))
                model.train()
    return found | {"scale": scaler.get_scale()} | {f"average of {name}": one for name, one in average.items()}, model


def overflow(device, plan):
    """A step that overflows is skipped everywhere; the scale halves, and grows again."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language())
    scaler, scales = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2), []
    for step in range(4):
        loss = loss_of(model, batch(step, device)) * (math.inf if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"scales": torch.tensor(scales)}, model


def workers(device, plan):
    """A loader with workers that pin, copies that nobody waits for, a compiled loss, numbers read by the epoch."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language())
    compiled = torch.compile(lambda y, ids: F.cross_entropy(y.flatten(0, 1), ids.flatten()), backend="aot_eager")
    order = torch.Generator().manual_seed(3)
    loader = DataLoader(Tokens(), ROWS, shuffle=True, num_workers=2, pin_memory=device != "cpu", generator=order)
    found = {}
    for epoch in range(2):
        for ids in loader:
            ids = ids.to(device, non_blocking=True)
            loss = compiled(model(ids[:, :-1]), ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"loss {epoch}"] = loss.item()
    return found, model


def prefetched(device, plan):
    """The next batch travels on a stream of its own; losses travel back, and are read at the end."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language())
    own, side = streams(device)
    batches, log = iter(DataLoader(Tokens(), ROWS, pin_memory=own is not None)), torch.zeros(3)
    log = log.pin_memory() if own is not None else log

    def following():
        with side:
            ids = next(batches, None)
            return None if ids is None else ids.to(device, non_blocking=True)

    ahead = following()
    for step in range(3):
        if own is not None:
            own.wait_stream(side)
            ahead.record_stream(own)
        loss, ahead = trained(model, optimizer, ahead), following()
        log[step].copy_(whole(loss) if own is None else loss.full_tensor(), non_blocking=True)
    if own is not None:
        torch.accelerator.synchronize()
    return {"log": log}, model


def on_streams(device, plan, **fields):
    """Every other step on a stream of the user's own, an evaluation after each on the other."""
    torch.manual_seed(0)
    plan = None if plan is None else plan.override(**fields)
    model, optimizer = started(device, plan, Language(dropout=0.1))
    own, side = streams(device)
    found = {}
    for step in range(4):
        if own is not None:
            side.wait_stream(own)
        with side if step % 2 else contextlib.nullcontext():
            found[f"loss {step}"] = trained(model, optimizer, batch(step, device), clip=1.0)
        if own is not None:
            own.wait_stream(side)
        with torch.no_grad():
            found[f"held out {step}"] = loss_of(model, batch(9, device))
    return {name: float(whole(loss)) for name, loss in found.items()}, model


on_streams_offloading = partial(on_streams, offload_activations={"blocks.*": True})


def texts(device, plan):
    """Text between steps, greedy and sampled, and the states of before taken back, the generator's too."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language(dropout=0.1))
    generators = torch if device == "cpu" else torch.get_device_module(device)
    found = {"loss": trained(model, optimizer, batch(0, device))}
    states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), generators.get_rng_state()
    again = []
    for _ in range(2):
        with torch.no_grad():
            model.eval()
            text = batch(50, device, 4)[:, :3]
            for at in range(4):
                chances = model(text)[:, -1]
                following = torch.multinomial(chances.softmax(-1), 1) if at % 2 else chances.argmax(-1, keepdim=True)
                text = torch.cat([text, following], 1)
            model.train()
        again.append([whole(text), whole(trained(model, optimizer, batch(1, device)))])
        if len(again) == 1:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            generators.set_rng_state(states[2])
    assert all(map(torch.equal, *again))
    return found | {"text": again[0][0], "loss of it": again[0][1]}, model


def averages(device, plan):
    """torch's own averages and their schedule; groups of parameters; hooks that note norms; recomputation by hand."""
    torch.manual_seed(0)

    def make(parameters):
        parameters = list(parameters)
        kinds = ([p for p in parameters if (p.ndim > 1) == is_wide] for is_wide in (True, False))
        return torch.optim.SGD([{"params": kind, "momentum": 0.9} for kind in kinds], lr=0.1)

    model, optimizer = started(device, plan, Language(dropout=0.1, recompute=True), make)
    average, schedule = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), SWALR(optimizer, swa_lr=0.05)
    norms, found = [], {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.detach().norm()))
    for step in range(3):
        norms.clear()
        found[f"loss {step}"] = trained(model, optimizer, batch(step, device))
        found[f"norm {step}"] = math.sqrt(sum(float(whole(norm)) ** 2 for norm in norms))
        average.update_parameters(model)
        schedule.step()
    return found | {f"average of {name}": p for name, p in average.module.named_parameters()}, model


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.norm_two = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm_one(self.one(x)))
        return self.head(F.relu(self.norm_two(self.two(x))).mean((2, 3)))


def pictures(device, plan):
    """Channels last, mixed pictures, smoothed labels, hits that stay on the device, a table of confusions."""
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model, optimizer = started(device, plan, Pictures().to(memory_format=torch.channels_last), make)
    found, hits = {}, torch.zeros((), device=device)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 3, 8, 8, generator=generator).to(device, memory_format=torch.channels_last)
        y, order = (torch.randint(10, (ROWS,), generator=generator), torch.randperm(ROWS, generator=generator))
        y, order = y.to(device), order.to(device)
        logits = model(0.7 * x + 0.3 * x[order])
        losses = [F.cross_entropy(logits, one, label_smoothing=0.1) for one in (y, y[order])]
        loss = 0.7 * losses[0] + 0.3 * losses[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hits += (logits.topk(5).indices == y[:, None]).any(-1).float().mean()
        found[f"loss {step}"] = loss.detach()
    with torch.no_grad():
        told = model.eval()(x).argmax(-1)
        confused = torch.zeros(10, 10, dtype=torch.int64, device=device)
        confused.index_put_((y, told), torch.ones_like(y), accumulate=True)
    return found | {"hits": hits, "confused": confused} | dict(model.named_buffers()), model


def policy(device, plan):
    """Sampled actions and their advantages, noise of a generator of the device, a teacher outside of the plan, a step
    whose loss is not finite left out."""
    torch.manual_seed(0)
    teacher = Language().to(device).requires_grad_(False)
    model, optimizer = started(device, plan, Language())
    noise, found = torch.Generator(device).manual_seed(5), {}
    for step in range(4):
        ids = batch(step, device)[:, :-1]
        masked = torch.rand(ids.shape, generator=noise, device=device) < 0.1
        logits = model(torch.where(masked, torch.zeros_like(ids), ids))[:, -1]
        actions = torch.distributions.Categorical(logits=logits)
        chosen = actions.sample()
        reward = (chosen % 7 == 0).float()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-5)
        with torch.no_grad():
            taught = teacher(ids)[:, -1].softmax(-1)
        loss = -(actions.log_prob(chosen) * advantage).mean() - 0.01 * actions.entropy().mean()
        loss = loss + F.kl_div(logits.log_softmax(-1), taught, reduction="batchmean")
        loss = loss + math.nan if step == 2 else loss
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
            found[f"loss {step}"], found[f"chosen {step}"] = loss.detach(), chosen
        optimizer.zero_grad()
    return found, model


def resumed(device, plan):
    """Saved beside the training, which goes on; then loaded at another stage of ZeRO, schedule and generator too."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language(dropout=0.1))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

    def step(at):
        loss = trained(model, optimizer, batch(at, device))
        schedule.step()
        return float(whole(loss))

    found = {"loss 0": step(0), "loss 1": step(1)}
    if plan is not None:
        generators, folder = torch.get_device_module(device), [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "random": generators.get_rng_state()}
        saving = vescale.save(folder[0], state, step=2, asynchronous=True)
        step(7)
        saving.wait()
        other = plan.override(zero=0 if plan.zero == 3 else 3) if plan.mesh["dp"] > 1 else plan
        model, optimizer = started(device, other, Language(dropout=0.1))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "random": generators.get_rng_state()}
        vescale.load(folder[0], state)
        generators.set_rng_state(state["random"])
    return found | {"loss 2": step(2), "loss 3": step(3)}, model


def half(device, plan):
    """Autocast to float16 with its scaler: low bits differ, and so may the order of a CPU's lists of operators."""
    torch.manual_seed(0)
    model, optimizer = started(device, plan, Language())
    scaler, found = torch.amp.GradScaler(device, init_scale=1024.0), {}
    for step in range(3):
        ids = batch(step, device)
        with torch.autocast(device, dtype=torch.float16):
            logits = model(ids[:, :-1])
            assert logits.dtype is torch.float16
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found, model


PROGRAMS = {
    "trainer": trainer, "overflow": overflow, "workers": workers, "prefetched": prefetched, "streams": on_streams,
    "streams, offloading": on_streams_offloading, "texts": texts, "averages": averages, "pictures": pictures,
    "policy": policy, "resumed": resumed, "half": half,
}  # fmt: skip
CUT = {"*.up.weight": {"tp": Shard(0)}, "*.up.bias": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "*": {}}
PLANS = {
    **{f"zero {zero}": Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero) for zero in range(4)},
    "tp": Plan(mesh={"dp": 1, "tp": 2}, parameters=CUT),
    "tp, zero 1": Plan(mesh={"dp": 2, "tp": 2}, parameters=CUT, zero=1),
}
PAIRS = [(name, plan) for name in PROGRAMS for plan in PLANS if name != "pictures" or "tp" not in plan]


def told(name, device, plan):
    found, model = PROGRAMS[name](device, plan)
    found |= {f"the parameter {one}": p for one, p in model.named_parameters()} if name != "half" else {}
    return {key: whole(one) if isinstance(one, torch.Tensor) else torch.tensor(one) for key, one in found.items()}


@pytest.mark.parametrize("name, plan", slice_of(PAIRS, 7))
def test_a_program_has_one_devices_numbers(name, plan):
    (wanted,) = run_ranks(1, told, name, "cpu", None)
    world = PLANS[plan].world_size
    for found in run_ranks(world, told, name, "second", PLANS[plan], device="second", timeout=300):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            off, size = (found[key].double() - value.double()).norm(), value.double().norm()
            within = 2e-2 if name == "half" else 1e-4 if value.dim() else 1e-5
            assert off <= within * size + 1e-9, f"{key}: {off / size:.2g} off"

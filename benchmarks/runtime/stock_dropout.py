"""How far torch's own DTensor is from one device in a run with dropout, beside ours, for the table of the README.

    python benchmarks/runtime/stock_dropout.py

The demo's GPT, dropout 0.1 in embedding, attention and residual, from random weights, 20 steps of AdamW on four gloo
ranks, DP2 x TP2. Torch's: its MLPs by `parallelize_module`, weights initialised as DTensors, gradients averaged over
the data axis, the same seed on all ranks, as its trainers do; ours: `library.gpt`, with sequence parallelism. The
figures are the largest distance of a step's loss from one device's, absolute: `init` with dropout 0, `all` with it.
The last line is one JSON object; status 1 when ours is over 1e-5 relative.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "examples"))

POSITIONS, STEPS, BATCH, VOCABULARY, LOSS = 24, 20, 8, 64, 1e-5


def make(dropout: float):
    from nanogpt.model import GPT, GPTConfig

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, dropout=dropout, **sizes))


def initialise(model) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.02)


def train(model, optimizer, part=slice(None), sync=lambda: None, total=lambda loss: loss) -> list[float]:
    data, losses = torch.Generator().manual_seed(5), []
    for _ in range(STEPS):
        inputs, targets = torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data)
        loss = model(inputs[part], targets[part])
        loss.backward()
        sync()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total(loss.detach())))
    return losses


def one_device(dropout: float) -> list[float]:
    model = make(dropout)
    initialise(model)
    return train(model, torch.optim.AdamW(model.parameters(), lr=5e-4))


def by_torch(dropout: float) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, group = make(dropout), mesh.get_group("dp")
    for module in list(model.modules()):
        if hasattr(module, "c_fc"):
            parallelize_module(module, mesh["tp"], {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()})
    initialise(model)

    def average(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor.div_(2)

    def sync():
        for parameter in model.parameters():
            if parameter.grad is not None:
                average(parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)

    rank, half = mesh.get_local_rank("dp"), BATCH // 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, foreach=False)
    return train(model, optimizer, slice(rank * half, (rank + 1) * half), sync, average)


def by_us(dropout: float) -> list[float]:
    import vescale
    from vescale_plans import library

    plan = library.gpt(mesh={"dp": 2, "tp": 2}, sequence_parallel=True)
    model, optimizer = vescale.parallelize(plan, make(dropout), lambda own: torch.optim.AdamW(own, lr=5e-4))
    initialise(model)
    return train(model, optimizer)


def main() -> int:
    from vescale_testkit import run_ranks

    figures = {}
    for name, dropout in (("init", 0.0), ("all", 0.1)):
        wanted = one_device(dropout)
        for who, run in (("torch DTensor", by_torch), ("veScale", by_us)):
            found = run_ranks(4, run, dropout, timeout=300)[0]
            figures[f"{who}, {name}"] = max(abs(a - b) for a, b in zip(found, wanted))
        relative = max(abs(a - b) / abs(b) for a, b in zip(found, wanted))
        figures[f"veScale, {name}, relative"] = relative
    print(json.dumps(figures))
    return int(max(value for name, value in figures.items() if "relative" in name) > LOSS)


if __name__ == "__main__":
    sys.exit(main())

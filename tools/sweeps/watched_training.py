"""A training of which one rank departs from the others (`watched_ways.py`): what `watchdog.py` starts.

    torchrun ... tools/sweeps/watched_training.py WAY LAYOUT CULPRIT FOLDER

Every rank trains; step AT of the culprit is another one.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from vescale_checkpoint import whole_state_dict

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from sweeps.watched_ways import depart

STEPS, AT = 46, 4
"""Of a training, and the odd one."""
LAYOUTS = ("dp", "zero", "tp", "pp")


class Net(nn.Module):
    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3 + more))
        self.spare = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return (x - y).square().mean() + self.spare(x).mean()


class Job:
    """One rank's training."""

    def __init__(self, layout: str, way: str, folder: str) -> None:
        import vescale

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(os.environ["WATCHED_TIMEOUT_S"])))
        torch.manual_seed(0)
        self.rank, self.folder, self.vescale = dist.get_rank(), folder, vescale
        self.pair = dist.new_group([0, 1])
        self.generator = torch.Generator().manual_seed(1)
        size, fields, mesh = dist.get_world_size(), {}, {layout: dist.get_world_size()}
        if layout == "zero":
            mesh, fields = {"dp": size}, {"zero": 3}
        elif layout == "pp":
            cuts = tuple(f"blocks.{i}" for i in range(1, size))
            fields = {"pipeline": vescale.Pipeline(axis="pp", cuts=cuts, schedule="1f1b", microbatches=2)}
        shards = {"blocks.*.weight": {"tp": vescale.Shard(0)}} if layout == "tp" else {}
        if way == "another_plan":
            fields["zero"], shards = 1, {}
        plan = vescale.Plan(mesh=mesh, parameters={**shards, "*": {}}, **fields)
        model = Net(more=way == "another_model")
        make = self.reversed_groups if way == "another_order" else lambda found: torch.optim.AdamW(found, lr=0.01)
        self.model, self.optimizer = vescale.parallelize(plan, model, make)

    @staticmethod
    def reversed_groups(found: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(found)[::-1], lr=0.01)  # type: ignore[call-overload]

    def batch(self, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        return (torch.randn(rows, 8, generator=self.generator), torch.randn(rows, 8, generator=self.generator))

    def step(self) -> None:
        loss = self.model(*self.batch())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer}

    def weight(self) -> torch.Tensor:
        own = [one for one in self.model.parameters() if one.is_leaf and hasattr(one, "full_tensor")]
        return own[0]


def main() -> None:
    chosen, layout, culprit, folder = sys.argv[1:]
    is_odd = int(os.environ["RANK"]) == int(culprit)
    job = Job(layout, chosen if is_odd else "", folder)
    job.vescale.save(f"{folder}/first", job.state(), step=1)
    try:
        for step in range(STEPS):
            if step == AT:
                print(f"departs {time.time()}", flush=True)
            depart(chosen, job) if is_odd and step == AT else job.step()
    except StopIteration:
        pass
    job.vescale.save(f"{folder}/last", job.state(), step=2)
    whole = whole_state_dict(job.model)  # on the first rank
    if layout == "dp":
        whole = {name: one.detach().to_local() for name, one in job.model.named_parameters()}
    if whole:
        found = hashlib.sha256(b"".join(whole[name].numpy().tobytes() for name in sorted(whole))).hexdigest()
        print(f"digest {found}", flush=True)


if __name__ == "__main__":
    main()

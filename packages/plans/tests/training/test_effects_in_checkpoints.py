"""What the last function of a user's checkpoint writes, it writes in the recomputation, too, as on one device."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        last = {
            "batch": lambda: nn.BatchNorm1d(5),
            "plain": lambda: nn.BatchNorm1d(5, affine=False, momentum=0.3),
            "instance": lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
            "images": lambda: nn.BatchNorm2d(5),
        }[kind]()
        more = {"instance": (3,), "images": (2, 3)}.get(kind, ())
        self.inside = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5 * 6), last)
        self.more, self.head = more, nn.Linear(5, 2)

    def region(self, x: torch.Tensor) -> torch.Tensor:
        *first, last = self.inside
        for one in first:
            x = one(x)
        x = x.view(len(x), 5, 6)[..., :3] if self.more == (3,) else x.view(len(x), 5, 2, 3) if self.more else x[:, :5]
        return last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.region, x, use_reentrant=False)
        return self.head(x.flatten(2).mean(2) if self.more else x)


KINDS = ("batch", "plain", "instance", "images")


def run(plan: Plan | None):
    found = []
    for kind in KINDS:
        torch.manual_seed(0)
        model = Net(kind).double()
        if plan is not None:
            model, _ = parallelize(plan, model, None)
        for seed in range(2):
            x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
        gradients = [one.grad for one in model.parameters()]
        tensors = [*gradients, *model.buffers()]
        found.append([(getattr(one, "full_tensor", one.clone)()).clone() for one in tensors])
    return found


def test_one_devices_numbers():
    expected = run(None)
    data = Plan(mesh={"dp": 2}, parameters={"*": {}})
    tensor = Plan(
        mesh={"tp": 2}, parameters={"inside.[01].*": {"tp": Shard(0)}, "inside.3.*": {"tp": Shard(0)}, "*": {}}
    )
    for plan in (data, tensor):
        for found in run_ranks(2, run, plan):
            torch.testing.assert_close(found, expected)

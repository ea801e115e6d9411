"""Sparse tensors beside a model's parameters: graphs as buffers, as attributes, and as inputs."""

import pytest
import torch
from torch import nn

from vescale_dtensor import Shard
from vescale_plans import Plan, parallelize
from vescale_testkit import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 4)
        adjacent = (torch.rand(7, 7) > 0.5).double()
        self.register_buffer("rows", adjacent.to_sparse_csr())
        self.register_buffer("entries", adjacent.T.to_sparse())
        self.shift = torch.eye(7, dtype=torch.float64).roll(1, 0).to_sparse()

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(self.rows, self.first(x)).relu()
        x = (self.entries @ self.second(x)).tanh() + edges @ x[:, :5]
        return self.head(torch.sparse.mm(self.shift, x))


def train(options: dict | None):
    torch.manual_seed(0)
    model = Graphs().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    if options is not None:
        model, optimizer = parallelize(Plan(**options), model, lambda given: torch.optim.Adam(given, lr=0.02))
    seen = []
    for _ in range(3):
        edges = (torch.rand(7, 7, dtype=torch.float64) > 0.6).double().to_sparse()
        loss = model(torch.randn(7, 3, dtype=torch.float64), edges).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for one in (loss, *[weight.grad for weight in model.parameters()]):
            seen.append(getattr(one, "full_tensor", one.clone)().detach())
        optimizer.step()
    seen += [getattr(one, "full_tensor", one.clone)().detach() for one in model.parameters()]
    return [*seen, model.rows.to_dense(), model.entries.to_dense()]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2}, "parameters": {"*": {}}, "zero": 3},
        {"mesh": {"tp": 2}, "parameters": {"first.*": {"tp": Shard(0)}, "second.weight": {"tp": Shard(1)}, "*": {}}},
    ],
)
def test_one_devices_numbers(options) -> None:
    expected = train(None)
    for found in run_ranks(2, train, options):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def differing(rank_differs: bool):
    torch.manual_seed(0)
    model, _ = parallelize(Plan(mesh={"dp": 2}, parameters={"*": {}}), Graphs().double())
    edges = torch.eye(7, dtype=torch.float64)
    if rank_differs and torch.distributed.get_rank():
        edges[0, 0] = 2
    with torch.no_grad():
        return model(torch.ones(7, 3, dtype=torch.float64), edges.to_sparse()).full_tensor()


def test_inputs_are_compared_across_ranks() -> None:
    run_ranks(2, differing, False)
    with pytest.raises(Exception, match="plain input tensor 1 differs between ranks 0 and 1"):
        run_ranks(2, differing, True)

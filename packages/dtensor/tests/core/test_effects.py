"""Collectives of a captured graph: in the order of eager code on every rank, whatever the sizes, and none while it is
captured."""

import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from vescale_dtensor import OperatorError, Replicate, Shard, distribute_tensor
from vescale_dtensor.engine import Effects, attach, local_only
from vescale_testkit import mesh_of, run_ranks, warm_up

warm_up("torch._dynamo", "torch._inductor")

SIZES = [(2, 512, 2, 512), (512, 2, 512, 2), (512, 512, 2, 2), (2, 2, 2, 512)]


def four(a, b, c, d):
    """Independent sums, read in another order than they are made in."""
    p, q, r, s = ((one * (i + 2)).redistribute([Replicate()]) for i, one in enumerate((a, b, c, d)))
    return (s.sum(0) @ r.sum(0)) + (p.sum(0) @ q.sum(0)) + (p.sum(0) * s.sum(0)).sum()


def captured(sizes):
    """The graph on local tensors, and its effects."""
    mesh = mesh_of(2)
    tensors = [distribute_tensor(torch.randn(2 * size, 32, dtype=torch.float64), mesh, [Shard(0)]) for size in sizes]
    layouts, effects = [one._layout for one in tensors], Effects()
    wanted = four(*tensors).full_tensor()  # decisions and routes are made before a graph is captured
    with local_only():
        local = [one.detach() for one in tensors]

    def run(local):
        made = four(*(attach(one.view_as(one), layout) for one, layout in zip(local, layouts)))
        with local_only():
            return made.view_as(made), effects.end_pass()

    with effects.capture():
        graph = make_fx(run)(local)
    return graph, effects, local, wanted


def orders(backend):
    found = []
    for sizes in SIZES:
        torch.compiler.reset()
        graph, effects, local, wanted = captured(sizes)
        sent, run = [], effects.run
        effects.run = lambda number, given, sent=sent, run=run: (sent.append(number), run(number, given))[1]
        with effects.done(), torch.no_grad():
            value, token = torch.compile(graph, backend=backend, fullgraph=True, dynamic=False)(local)
        found.append((sent, torch.allclose(value, wanted, rtol=1e-9), token is not None))
    return found


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor makes C++ on a CPU")
def test_a_compiler_keeps_the_order():
    for found in run_ranks(2, orders, "inductor", timeout=300):
        assert found == [([0, 1, 2, 3], True, True)] * len(SIZES)


def sent_while_captured():
    mesh, effects = mesh_of(2), Effects()
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    with effects.capture():
        shown = tensor.redistribute([Replicate()])
        try:
            (tensor.sum() * 2).item()
        except OperatorError as error:
            read = str(error)
    return tuple(shown.shape), read, tensor.full_tensor().tolist()


def test_nothing_is_sent_while_a_graph_is_captured():
    for shape, read, after in run_ranks(2, sent_while_captured):
        assert shape == (4,) and "what is captured sends nothing" in read and after == [0.0, 1.0, 2.0, 3.0]

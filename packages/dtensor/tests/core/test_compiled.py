"""A function that torch.compile made and that is given DTensors runs as it is written, and says so."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks, warm_up

warm_up("torch._dynamo")


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, logits, labels):
        return F.cross_entropy(logits * self.scale, labels)


def mean(logits, labels):
    return F.nll_loss(inner(logits), labels) + logits.shape[0] * 1e-3


def inner(logits):
    return logits.log_softmax(-1)


def with_a_break(logits, labels):
    factor = 2 if logits.sum().item() > 0 else 3
    return F.cross_entropy(logits, labels) * factor


def in_a_dict(logits, labels):
    outputs = {"logits": logits, "aux": [logits.square().mean()]}
    return F.cross_entropy(outputs["logits"], labels) + outputs["aux"][0]


FUNCTIONS = {"mean": mean, "module": Loss, "a break": with_a_break, "a dict": in_a_dict, "plain first": mean}


def compiled(name, layouts):
    """Losses, gradients and the scale's gradient, of calls with DTensors or plain tensors; what was warned of."""
    torch._dynamo.reset()
    function = FUNCTIONS[name]() if name == "module" else FUNCTIONS[name]
    run = torch.compile(function, backend="eager")
    labels = torch.tensor([0, 3, 1, 2, 0, 1, 3, 2])
    logits = [torch.randn(8, 4, generator=torch.Generator().manual_seed(at)) for at in range(3)]
    if name == "plain first":
        run(logits[0], labels)
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one in logits:
            leaf = distribute_tensor(one, mesh_of(2), layouts) if layouts else one.clone()
            leaf.requires_grad_()
            loss = run(leaf, labels)
            loss.backward()
            found += [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for tensor in (loss, leaf.grad)]
        plain = run(logits[0], labels)
    texts = [str(one.message) for one in told if "torch.compile" in str(one.message)]
    more = [function.scale.grad] if name == "module" else []
    return [one.detach() for one in (*found, plain, *more)], texts


def compared(name, layouts):
    (found, told), (wanted, silent) = compiled(name, layouts), compiled(name, None)
    assert not silent and sum("is given a DTensor" in text for text in told) <= 1
    return [torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(found, wanted, strict=True)], told


@pytest.mark.parametrize("layout", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_runs_as_it_is_written(name, layout):
    for alike, _ in run_ranks(2, compared, name, [layout], timeout=120):
        assert all(alike)


def whole_graph():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="runs as it is written"):
        torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(
            distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)])
        )
    torch._dynamo.reset()

    def doubled(x):
        return x * 2

    with pytest.warns(UserWarning, match="doubled is given a DTensor, and runs as it is written"):
        torch.compile(doubled, backend="eager")(distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)]))
    return torch.compile(doubled, backend="eager")(torch.ones(2)).tolist()  # torch does not look at it again


def test_it_is_told():
    assert run_ranks(2, whole_graph, timeout=120) == [[2.0, 2.0]] * 2


def by_head(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (b + 1) * (h + 1) * (q_idx - kv_idx).abs()


def flexible(way):
    """How many graphs were compiled for a call on shards, for a second one, and for plain tensors afterwards."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append([tuple(one.shape) for one in inputs if one.ndim == 4])
        return graph

    compiled = torch.compile(flex_attention, backend=counted, fullgraph=way == "whole")
    call = compiled
    if way == "around":
        call = torch.compile(lambda *qkv, **given: flex_attention(*qkv, **given) * 1, backend=counted)
    plain = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
    heads = distribute_tensor(plain, mesh_of(2), [Shard(1)])
    wanted, counts = flex_attention(plain, plain, plain, score_mod=by_head), []
    for one in (heads, heads, plain):
        out = call(one, one, one, score_mod=by_head)
        torch.testing.assert_close(getattr(out, "full_tensor", lambda out=out: out)(), wanted)
        counts.append(len(graphs))
    assert graphs[0][0] == (2, 2, 16, 8)  # the shards
    return counts


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("way", ["broken", "whole", "around"])
def test_flex_attention_is_compiled_on_shards(way):
    assert run_ranks(2, flexible, way, timeout=240) == [[1, 1, 2]] * 2


BEFORE = """
import functools, torch
from torch.nn.attention.flex_attention import flex_attention
early = torch.compile(flex_attention, backend="aot_eager"), functools.partial(flex_attention, scale=0.5)
import inspect
signature = inspect.signature(flex_attention)

from vescale_dtensor import DTensor, Shard, distribute_tensor
from vescale_testkit import fake_world, mesh_of
assert inspect.signature(flex_attention) == signature
with fake_world(1):
    heads = distribute_tensor(torch.randn(2, 4, 16, 8), mesh_of(1), [Shard(1)])
    for call in early:
        assert type(call(heads, heads, heads)) is DTensor
"""


def test_who_held_flex_attention_before_the_library_was_imported():
    done = subprocess.run([sys.executable, "-c", BEFORE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The reproducible mode: losses and parameters equal to the bit on every mesh, and what it refuses."""

import math
import warnings
from functools import cache, partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_dtensor import Replicate, Shard
from vescale_dtensor._reproducible.functions import product
from vescale_dtensor._reproducible.merging import _asked, merges
from vescale_dtensor.engine import is_reproducible
from vescale_plans import library
from vescale_testkit import mesh_of, raises_on_all, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

BATCH, POSITIONS, STEPS = 8, 16, 20
SPLITS = {"batch": 8, "seq": 2, "hidden": 8}


def build_gpt():
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(block_size=POSITIONS, n_layer=2, n_head=4, n_embd=64, dropout=0.1))


def build_llama():
    from llama.model import build

    return dropped(build(hidden_size=64, intermediate_size=192, num_hidden_layers=2, attention_dropout=0.1))


def build_mixtral(**changes):
    from mixtral.model import build

    return dropped(build(attention_dropout=0.1, router_jitter_noise=0.1, **changes))


def dropped(model):
    """Dropout where GPT has it and these have none: on the embedding, and on what every block adds to the residual."""

    def forward(inner, module, *args, **kwargs):
        out = inner(*args, **kwargs)
        out, *rest = out if isinstance(out, tuple) else (out,)
        out = torch.nn.functional.dropout(out, 0.1, module.training)
        return (out, *rest) if rest else out

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("embed_tokens", "self_attn", "mlp"):
            module.forward = partial(forward, module.forward, module)
    return model


def loss_of(model, x, y):
    return model(input_ids=x, labels=x).loss


class Hearing(torch.nn.Module):
    """Two convolutions over the sequence, as speech models begin; norms of channels between."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 16)
        self.first = torch.nn.Conv1d(16, 32, 3, padding=1)
        self.norms = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.GroupNorm(4, 32))
        self.second = torch.nn.Conv1d(32, 16, 3, padding=1, bias=False)
        self.head = torch.nn.Linear(16, 256)

    def forward(self, x, y):
        x = torch.nn.functional.gelu(self.norms(self.first(self.embed(x).transpose(1, 2))))
        x = torch.nn.functional.gelu(self.second(x)).transpose(1, 2)
        return torch.nn.functional.cross_entropy(self.head(x).transpose(1, 2), y)


def plan_hearing(mesh):
    """Channels between the two are split: the second's sum over them is partial."""
    split = {"first.*": {"tp": Shard(0)}, "second.weight": {"tp": Shard(1)}, "*": {}}
    return vescale.Plan(mesh=mesh, parameters=split, data_axis="dp")


MODELS = {
    "hearing": (Hearing, plan_hearing, lambda model, x, y: model(x, y)),
    "nanogpt": (build_gpt, library.gpt, lambda model, x, y: model(x, y)),
    "llama": (build_llama, library.llama, loss_of),
    "mixtral": (build_mixtral, library.mixtral, loss_of),
    # torch's grouped product is no function of meta tensors in float32, which a pipeline's dry run is made of.
    "mixtral, batched": (partial(build_mixtral, experts_implementation="batched_mm"), library.mixtral, loss_of),
}
MESHES = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2tp2": {"dp": 2, "tp": 2},
    "pp2": {"pp": 2, "tp": 1},
    "pp2tp2": {"pp": 2, "tp": 2},
    "pp2dp2tp2": {"pp": 2, "dp": 2, "tp": 2},
}
# Experts spread over an axis: theirs alone, and with experts split inside or other replicas of them.
EXPERTS = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "ep2tp2": {"ep": 2, "tp": 2},
    "dp2ep2": {"dp": 2, "ep": 2},
}


def microbatches_in(mesh):
    """As many as leave a rank two rows: of one row, a slice along positions is a view, which Mixtral writes to."""
    return 2 if "dp" in mesh else 4


def plan_of(name, mesh, changes):
    plan = MODELS[name][1](mesh)
    if "pp" in mesh:
        cut = "transformer.h.1" if name == "nanogpt" else "model.layers.1"
        pipeline = vescale.Pipeline(cuts=(cut,), microbatches=microbatches_in(mesh))
        plan = plan.override(data_axis="dp" if "dp" in mesh else None, pipeline=pipeline)
    if "ep" in mesh:
        plan = plan.override(expert_axis="ep", data_axis=tuple(axis for axis in ("dp", "ep") if axis in mesh))
    return plan.override(**changes)


def recompute(model):
    """Every block is computed again in backward, dropout included."""
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def train(
    name, mesh=None, steps=STEPS, dtype=torch.float32, splits=None, microbatches=1, optimizer=None, change=None,
    **changes,
):  # fmt: skip
    """(losses, parameters): on one device without a mesh, accumulating as many microbatches as told."""
    from corpus import read_corpus

    build, _, loss_of = MODELS[name]
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model = (change or (lambda model: model))(build().to(dtype))
    optimizer_fn = optimizer or partial(torch.optim.AdamW, lr=5e-4)
    losses = []
    with vescale.reproducible(splits or SPLITS):
        if mesh is None:
            optimizer = optimizer_fn(model.parameters())
        else:
            model, optimizer = vescale.parallelize(plan_of(name, mesh, changes), model, optimizer_fn)
        for step in range(steps):
            total = None
            for batch in zip(*[part.chunk(microbatches) for part in corpus.batch(step, BATCH, POSITIONS)]):
                loss = loss_of(model, *batch) / microbatches
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    held = [*model.named_parameters(), *[(name, b) for name, b in model.named_buffers() if "running" in name]]
    return losses, {name: whole(tensor.detach()) for name, tensor in held}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ZERO = {"dp4zero1": 1, "dp4zero3": 3, "pp2dp2tp2zero3": 3}
CASES = [
    (name, dtype, mesh)
    for mesh in (*MESHES, *ZERO)
    for dtype in DTYPES
    for name in ("nanogpt", "llama", "mixtral, batched" if mesh.startswith("pp") else "mixtral")
]


EXPERT_CASES = [(name, dtype, mesh) for mesh in EXPERTS for dtype in DTYPES for name in ("mixtral", "mixtral, batched")]


@cache
def on_one_device(name, dtype, **given):
    return run_ranks(1, train, name, dtype=dtype, timeout=500, **given)[0]


@pytest.mark.filterwarnings("ignore:.*has no canonical form")  # choosing experts, and torch's grouped product
@pytest.mark.parametrize("name, dtype, mesh", [*slice_of(CASES, 36), *slice_of(EXPERT_CASES, 64)])
def test_equal_to_the_bit(name, dtype, mesh):
    """The loss of every step and every parameter after the last; under a pipeline one device accumulates."""
    changes = {"zero": ZERO[mesh]} if mesh in ZERO else {}
    sizes = (MESHES | EXPERTS)[mesh.partition("zero")[0]]
    given = {"microbatches": microbatches_in(sizes)} if "pp" in sizes else {}
    found = run_ranks(math.prod(sizes.values()), train, name, sizes, dtype=DTYPES[dtype], timeout=500, **changes)
    wanted = on_one_device(name, DTYPES[dtype], **given)
    held = set()
    for losses, parameters in found:
        assert losses == wanted[0]
        assert [n for n, p in parameters.items() if not torch.equal(p, wanted[1][n])] == []
        held.update(parameters)
    assert held == set(wanted[1])


ADAMW, SGD = partial(torch.optim.AdamW, lr=5e-4), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
WAYS = {
    "fused AdamW": {"optimizer": partial(ADAMW, fused=True)},
    "AdamW tensor by tensor": {"optimizer": partial(ADAMW, foreach=False)},
    "AdamW of lists, recomputing": {"optimizer": partial(ADAMW, foreach=True), "change": recompute},
    "SGD of lists, bf16": {"optimizer": partial(SGD, foreach=True), "dtype": torch.bfloat16},
    "SGD tensor by tensor, bf16, recomputing": {
        "optimizer": partial(SGD, foreach=False),
        "dtype": torch.bfloat16,
        "change": recompute,
    },
    "fused SGD": {"optimizer": partial(SGD, fused=True)},
}


@pytest.mark.parametrize("way", slice_of(WAYS, 3))
def test_optimizers_and_recomputation(way):
    """Vectors end elsewhere on a shard than on the whole: no optimizer may tell. On dp2 x tp2 with SP."""
    found = run_ranks(4, train, "nanogpt", MESHES["dp2tp2"], steps=4, timeout=300, **WAYS[way])
    ((losses, wanted),) = run_ranks(1, train, "nanogpt", steps=4, timeout=300, **WAYS[way])
    for own, parameters in found:
        assert own == losses
        assert [n for n, p in parameters.items() if not torch.equal(p, wanted[n])] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions_split_by_samples_and_channels(dtype):
    ((losses, wanted),) = run_ranks(1, train, "hearing", steps=4, dtype=DTYPES[dtype])
    for own, parameters in run_ranks(4, train, "hearing", MESHES["dp2tp2"], steps=4, dtype=DTYPES[dtype]):
        assert own == losses
        assert [n for n, p in parameters.items() if not torch.equal(p, wanted[n])] == []


# --- what it says no to, and yes -------------------------------------------------------------


def test_this_machine_does_what_the_mode_relies_on(monkeypatch):
    assert vescale.check_premise() == []
    plain = torch.bmm
    calls = iter(range(10**6))
    monkeypatch.setattr(torch, "bmm", lambda a, b: plain(a, b) + next(calls))
    found = vescale.check_premise()
    assert "bmm of [16, 16] x [16, 48]: other bits again" in found
    assert all(one.startswith("bmm") for one in found)


def test_a_mesh_that_does_not_divide_the_splits_names_the_nearest():
    told = r"has 2 blocks(.|\n)*splits=\{\"batch\": 4\}"
    mesh, splits = {"dp": 4}, {"batch": 2}
    raises_on_all(4, vescale.ReproducibleError, train, "nanogpt", mesh, steps=1, splits=splits, match=told, timeout=120)


@pytest.mark.parametrize(
    "splits, told",
    [
        ({"rows": 2}, "unknown splits 'rows'"),
        ({"batch": 6}, r"not a power of two(.|\n)*\"batch\": 8"),
        ({"seq": 0}, "not a power of two"),
    ],
)
def test_wrong_splits(splits, told):
    with pytest.raises(vescale.ReproducibleError, match=told):
        vescale.reproducible(splits)


def test_what_computes_out_of_sight_raises():
    with vescale.reproducible():
        with pytest.raises(vescale.ReproducibleError, match="on already"), vescale.reproducible():
            pass
        with pytest.raises(vescale.ReproducibleError, match="local_map"):
            vescale.local_map(torch.relu, [Replicate()])(torch.ones(2))

    def refused():
        try:
            vescale.parallelize(library.gpt({"dp": 1}), build_gpt(), mode="compile", reproducible={"batch": 2})
        finally:
            assert not is_reproducible()

    raises_on_all(1, vescale.ReproducibleError, refused, match='mode="compile"')


def test_what_runs_whole_is_told_once_with_its_line():
    def told():
        x = vescale.distribute_tensor(torch.arange(8.0), mesh_of(2), [Shard(0)])
        with vescale.reproducible(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [x.cumsum(0).full_tensor().tolist() for _ in range(2)]
            x.sum()
        return found, [str(one.message) for one in caught]

    for found, texts in run_ranks(2, told):
        assert found == [torch.arange(8.0).cumsum(0).tolist()] * 2
        (text,) = texts
        assert text.startswith("cumsum has no canonical form: its sharded inputs are gathered (8 elements in this call")
        assert "test_reproducible.py:" in text


def test_zeros_have_the_sign_of_one_device():
    def negated(sharded):
        x = torch.zeros(4, 2)
        x = vescale.distribute_tensor(x, mesh_of(2), [Shard(0)]) if sharded else x
        with vescale.reproducible():
            total = -x.sum(0)
            return (total.full_tensor() if sharded else total).signbit().tolist()

    assert run_ranks(2, negated, True) == [negated(False)] * 2 == [[True, True]] * 2


def test_the_mode_leaves_nothing():
    x, w = torch.randn(6, 10), torch.randn(7, 10)
    before, threads = torch.nn.functional.linear(x, w), torch.get_num_threads()
    mode = vescale.reproducible({"batch": 2, "hidden": 2}, threads=1)
    for _ in range(2):
        with mode:
            assert torch.get_num_threads() == 1
            inside = torch.nn.functional.linear(x, w)
    torch.testing.assert_close(inside, before)
    assert torch.equal(torch.nn.functional.linear(x, w), before) and torch.get_num_threads() == threads


# --- its forms, against torch's own ----------------------------------------------------------


def forms():
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).requires_grad_()

    functional, ids = torch.nn.functional, torch.randint(12, (4, 6), generator=generator)
    x, y, w, b = drawn(4, 6, 12), drawn(4, 12, 6), drawn(36, 12), drawn(36)
    heads = [drawn(2, 4, 6, 8), drawn(2, 2, 6, 8), drawn(2, 2, 6, 8)]
    return {
        "linear": (functional.linear, (x, w, b)),
        "linear of rows": (functional.linear, (drawn(10, 12), w)),
        "matmul": (torch.matmul, (x, y)),
        "matmul, broadcast": (torch.matmul, (drawn(3, 1, 4, 5), drawn(2, 5, 7))),
        "mm": (torch.mm, (drawn(8, 12), drawn(12, 9))),
        "einsum": (lambda a, b: torch.einsum("bthd,bshd->bhts", a, b), (drawn(2, 3, 4, 8), drawn(2, 5, 4, 8))),
        "layer_norm": (lambda x, w, b: functional.layer_norm(x, (12,), w, b), (x, drawn(12), drawn(12))),
        "rms_norm": (lambda x, w: functional.rms_norm(x, (12,), w), (x, drawn(12))),
        "softmax": (lambda x: functional.softmax(x, 1), (x,)),
        "log_softmax": (lambda x: functional.log_softmax(x, -1), (x,)),
        "attention": (lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), (
            drawn(2, 4, 6, 8), drawn(2, 4, 6, 8), drawn(2, 4, 6, 8))),
        "grouped attention": (
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), heads),
        "embedding": (lambda w: functional.embedding(ids, w), (drawn(12, 5),)),
        "cross_entropy": (lambda x: functional.cross_entropy(x.transpose(1, 2), ids, ignore_index=3), (x,)),
        "cross_entropy, none": (
            lambda x: functional.cross_entropy(x.view(-1, 12), ids.view(-1), reduction="none"), (x,)),
        "sum": (lambda x: x.sum((0, 2), keepdim=True), (x,)),
        "mean": (lambda x: x.mean(-1), (x,)),
        "broadcast": (lambda x, w: x * w + x.pow(2), (x, drawn(12))),
        "expand": (lambda x: x[:, :, None].expand(4, 6, 3, 12).reshape(4, 18, 12), (x,)),
        "repeat": (lambda x: x.repeat(2, 1, 3), (x,)),
        "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), (x,)),
        "gelu": (functional.gelu, (x,)),
        "conv1d": (lambda x, w, b: functional.conv1d(x, w, b, stride=2, padding=1), (x, drawn(8, 6, 3), drawn(8))),
        "conv2d": (
            lambda x, w: functional.conv2d(x, w, padding="same", dilation=(1, 2)),
            (drawn(4, 2, 6, 7), drawn(6, 2, 3, 4))),
        "batch_norm": (lambda x, w, b: functional.batch_norm(x, None, None, w, b, True), (x, drawn(6), drawn(6))),
        "group_norm": (lambda x, w, b: functional.group_norm(x, 3, w, b), (x, drawn(6), drawn(6))),
        "vector_norm": (torch.linalg.vector_norm, (x,)),
        "add with a weight": (lambda x, y: x.add(y, alpha=0.3).sub(y, alpha=2), (x, drawn(4, 6, 12))),
    }  # fmt: skip


@pytest.mark.parametrize("name", forms())
def test_a_form_computes_what_torch_does(name):
    function, inputs = forms()[name]
    wanted = function(*inputs)
    seed = torch.randn(wanted.shape, dtype=wanted.dtype)
    gradients = torch.autograd.grad(wanted, inputs, seed)
    with vescale.reproducible({"batch": 4, "seq": 2, "hidden": 4}):
        found = function(*inputs)
        of_inputs = torch.autograd.grad(found, inputs, seed)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(of_inputs, gradients):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- blocks computed together ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 96, 256])
def test_blocks_in_one_product_have_the_bits_of_blocks(hidden, dtype, monkeypatch):
    """Whatever this machine merges: forward and both gradients are those of single blocks."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*sizes, generator=generator).to(dtype) for sizes in ((8, 16, hidden), (3 * hidden, hidden)))

    def run():
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        with vescale.reproducible(SPLITS):
            out = torch.nn.functional.linear(a, b)
            out.backward(out.detach().cos())
        return out.detach(), a.grad, b.grad

    together = run()
    monkeypatch.setattr(product, "merges", lambda *given: False)
    assert all(torch.equal(one, other) for one, other in zip(together, run()))


def test_blocks_that_differ_in_one_product_are_not_merged(monkeypatch):
    def in_order(a, b):
        out = a[:, :, :1] * b[:, :1]
        for k in range(1, a.shape[2]):
            out = out + a[:, :, k : k + 1] * b[:, k : k + 1]
        return out

    def with_an_edge(a, b):
        """The last entry of a wide product is one unit in the last place off."""
        out = in_order(a, b)
        if out.shape[2] > 32:
            out[-1, -1, -1] *= 1 + torch.finfo(torch.float32).eps
        return out

    like = torch.zeros(())
    for bmm, wanted in ((in_order, True), (with_an_edge, False)):
        monkeypatch.setattr(torch, "bmm", bmm)
        _asked.cache_clear()
        assert merges(like, 2, 2, (16, 40, 32)) == wanted
    _asked.cache_clear()

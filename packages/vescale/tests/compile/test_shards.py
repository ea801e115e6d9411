"""Compile mode on several ranks: each block is a graph of this rank's shards, and computes what eager mode does.

By `aot_eager`, which runs the same kernels, every number is eager mode's to the bit: the order of sums and of draws
included. Plain torch is the oracle of eager mode itself in other suites; here one row is compared with it, too.
"""

import copy
import shutil
import sys
import types
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale import Boundary, Plan, Replicate, Shard
from vescale_plans._capture.explain import compiled
from vescale_testkit import run_ranks, warm_up

warm_up("torch._inductor.compile_fx", "vescale", "transformers.models.llama.modeling_llama")

STEPS, VOCABULARY = 4, 64
needs_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor makes C++ on a CPU")


def named():
    """A compiler imports the module of a forward's globals; a rank has these by value, and the module perhaps not."""
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).__dict__.update(globals())


# --- models and plans ------------------------------------------------------------------


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, use_cache=False, **rates, **special)
    )


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, use_cache=False, **sizes)
    )


class Loss(NamedTuple):
    loss: torch.Tensor


class Block(nn.Module):
    """Heads, rows and columns that two ranks cannot share alike, and a buffer."""

    def __init__(self, heads=3, width=5, hidden=17):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(heads * width)
        self.q, self.k, self.v, self.o = (nn.Linear(heads * width, heads * width) for _ in range(4))
        self.up, self.down = nn.Linear(heads * width, hidden), nn.Linear(hidden, heads * width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, heads * width))

    def forward(self, x, mask=None):
        rows, length, width = x.shape
        h = self.norm(x)
        q, k, v = (one(h).view(rows, length, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.o(h.transpose(1, 2).reshape(rows, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(x * self.scale))), 0.1, self.training)


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, 15), nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(15, VOCABULARY)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if labels is None:
            return self.head(x)
        return Loss(F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def megatron(model, mesh, columns=COLUMNS, rows=ROWS, **more):
    cut = {f"*.{name}.{kind}": {"tp": Shard(0)} for name in columns for kind in ("weight", "bias")}
    cut |= {f"*.{name}.weight": {"tp": Shard(1)} for name in rows}
    has = {name for name, _ in model.named_parameters()}
    cut = {glob: where for glob, where in cut.items() if any(name.endswith(glob[1:]) for name in has)}
    return Plan(mesh=mesh, parameters=cut | {"*": {}}, **more).complete(model)


def generated(model):
    words = torch.zeros(4, 8, dtype=torch.int64)
    sample = {"input_ids": words, "labels": words}
    return vescale.generate_plan(model, world_size=2, batch=4, hardware="cpu", pin={"tp": 2, "pp": 1}, sample=sample)


def pipelined(model, mesh, cut, schedule="1f1b", complete=Plan, **more):
    """Of three microbatches."""
    return complete(mesh=mesh, pipeline=vescale.Pipeline(cuts=(cut,), microbatches=3, schedule=schedule), **more)


def experts(model):
    plan = Plan(mesh={"ep": 2}, parameters={"*": {}}, expert_axis="ep", data_axis="ep", zero=1)
    return plan.complete(model)


uneven = partial(megatron, columns=("q", "k", "v", "up"), rows=("o", "down"))
PAIRS = {
    "llama, tp 2": (llama, partial(megatron, mesh={"tp": 2})),
    "llama, zero 3": (llama, lambda model: Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3)),
    "llama, generated": (llama, generated),
    "gpt2, generated, three dropouts": (gpt2, generated),
    "llama, bfloat16, zero 3": (
        llama,
        lambda model: Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3, precision=vescale.Precision(torch.bfloat16)),
    ),
    "llama, cp 2": (llama, lambda model: Plan(mesh={"cp": 2}, parameters={"*": {}}, context_axis="cp")),
    "uneven, tp 2": (Uneven, partial(uneven, mesh={"tp": 2})),
    "llama, tp 2, recomputed": (llama, partial(megatron, mesh={"tp": 2}, checkpointing={"model.layers.*": True})),
    "gpt2, pp 2": (gpt2, lambda model: pipelined(model, {"pp": 2}, "transformer.h.1", parameters={"*": {}})),
    "mixtral, ep 2": (mixtral, experts),
}
FOURS = {
    "llama, dp 2 tp 2, zero 3": (llama, partial(megatron, mesh={"dp": 2, "tp": 2}, zero=3)),
    "uneven, dp 2 tp 2, zero 2": (Uneven, partial(uneven, mesh={"dp": 2, "tp": 2}, zero=2)),
    "uneven, pp 2 tp 2": (
        Uneven,
        lambda model: pipelined(model, {"pp": 2, "tp": 2}, "blocks.1", complete=partial(uneven, model)),
    ),
    "llama, pp 2 dp 2, zero 3, recomputed": (
        llama,
        lambda model: pipelined(
            model,
            {"pp": 2, "dp": 2},
            "model.layers.2",
            parameters={"*": {}},
            zero=3,
            checkpointing={"*.layers.*": True},
        ),
    ),
}


# --- a training ----------------------------------------------------------------------


LENGTHS = (9, 12)


def words_of(step, lengths=LENGTHS):
    return torch.randint(VOCABULARY, (6, lengths[step % len(lengths)]), generator=torch.Generator().manual_seed(step))


def full(tensor):
    return tensor.full_tensor().clone() if isinstance(tensor, vescale.DTensor) else tensor.detach().clone()


def training(build, plan_of, backend, mode="eager", lengths=LENGTHS):
    """Two microbatches a step, clipping, and an evaluation in between. Returns what can be compared."""
    named()
    torch.manual_seed(0)
    torch.compiler.reset()
    model = build()
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if plan_of is None:
        optimizer = make(model.parameters())
    else:
        model, optimizer = vescale.parallelize(plan_of(model), model, make, mode=mode)
        if backend is not None:
            compiled(model, backend)
    torch.manual_seed(7)
    numbers, tensors = [], {}
    for step in range(STEPS):
        for half in words_of(step, lengths).chunk(2):
            loss = model(input_ids=half, labels=half).loss
            loss.backward()
            numbers.append(loss.item())
        numbers.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        tensors |= {f"{name}.grad {step}": full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.eval()
            words = words_of(9, lengths)
            with torch.no_grad():
                numbers.append(model(input_ids=words, labels=words).loss.item())
            model.train()
    tensors |= {name: full(p) for name, p in (*model.named_parameters(), *model.named_buffers())}
    tensors["generator"] = torch.get_rng_state()
    captured = model._vescale.captured if plan_of is not None else None
    return numbers, tensors, (captured.graphs, captured.reasons()) if captured is not None else None


def both(build, plan_of):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, graph = (training(build, plan_of, backend) for backend in (None, "aot_eager"))
    apart = [one for one, held in eager[1].items() if not torch.equal(held, graph[1][one])]
    return eager[0] == graph[0], apart, graph[2]


@pytest.mark.parametrize(
    "ranks, row",
    [(ranks, row) for ranks, rows in ((2, PAIRS), (4, FOURS)) for row in rows.values()],
    ids=[*PAIRS, *FOURS],
)
def test_graphs_of_shards_are_eager_mode_to_the_bit(request, ranks, row):
    for numbers_are, apart, (graphs, reasons) in run_ranks(ranks, both, *row, timeout=600):
        assert numbers_are and not apart, apart[:4]
        assert graphs >= 2, graphs  # of two lengths; blocks that are alike share
        assert all("experts" in why for why in reasons), reasons
        assert bool(reasons) == ("ep 2" in request.node.callspec.id), reasons


def close(lengths):
    plan_of = partial(megatron, mesh={"tp": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = training(llama, None, None, lengths=lengths)
        graph = training(llama, plan_of, None, mode="compile", lengths=lengths)
    first = {name: held for name, held in plain[1].items() if name.endswith(".grad 0")}
    apart = [((held - graph[1][name]).norm() / held.norm()).item() for name, held in first.items()]
    return plain[0], graph[0], max(apart), graph[2]


@needs_a_compiler
@pytest.mark.parametrize("lengths", [pytest.param((12,), marks=pytest.mark.core), LENGTHS], ids=["one", "two"])
def test_inductor_computes_what_one_device_does(lengths):
    for plain, graph, apart, (graphs, reasons) in run_ranks(2, close, lengths, timeout=600):
        assert graph == pytest.approx(plain, rel=1e-5)
        assert apart < 1e-5 and graphs >= len(lengths) and not reasons


# --- what makes a call eager, or is refused ---------------------------------------------------


class Tower(nn.Module):
    def __init__(self, kind, **how):
        super().__init__()
        self.blocks = nn.ModuleList([kind(**how) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x[0] if isinstance(x, tuple) else x).square().mean()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))

    def forward(self, x):
        return x + self.inner(x)


class Two(Wide):
    """Gives one value twice, of which one has no gradient, and what it was given."""

    def forward(self, x):
        given = x[0] + x[1] if isinstance(x, tuple) else x
        out = super().forward(given)
        return out, out.detach(), given, x


class Counting(Wide):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Drawing(Wide):
    def forward(self, x):
        return super().forward(x) * torch.rand(8)


class Norm(Wide):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return super().forward(self.norm(x))


class WritesToData(Wide):
    """A count that autograd does not see."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        out = super().forward(x) * (self.count + 1)
        self.count.data[1:].add_(1)
        return out


def wide(model):
    columns, rows = {"tp": Shard(0)}, {"tp": Shard(1)}
    cut = {"*.inner.0.weight": columns, "*.inner.0.bias": columns, "*.inner.2.weight": rows, "*": {}}
    boundaries = {"blocks.*.inner": Boundary(output={"tp": Replicate()})}
    return Plan(mesh={"tp": 2}, parameters=cut, boundaries=boundaries)


def told(kind, act=lambda model: None):
    named()
    torch.compiler.reset()
    found = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = Tower(kind)
        model, optimizer = vescale.parallelize(wide(model), model, partial(torch.optim.SGD, lr=0.1))
        if backend:
            compiled(model, backend)
        losses, seen = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                if step == 1:
                    seen.append(act(model))
                loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        said = [str(one.message) for one in caught if issubclass(one.category, vescale.CompileWarning)]
        state = {name: full(p) for name, p in model.state_dict().items()}
        found.append((losses, state, said, seen, model))
    eager, graph = found
    same = eager[0] == graph[0] and all(torch.equal(held, graph[1][name]) for name, held in eager[1].items())
    return same, graph[2], graph[4]._vescale.captured, eager, graph


def refusals():
    answers = {}
    for kind in (Counting, Drawing, Norm, WritesToData):
        same, said, captured, _, graph = told(kind)
        answers[kind.__name__] = same, len(said), captured.graphs, " ".join(captured.reasons())
        if kind is Counting:
            answers["calls"] = [block.calls for block in graph[4].blocks] == [3, 3]
    return answers


def test_what_a_graph_would_not_do_is_eager_and_said():
    for found in run_ranks(2, refusals, timeout=300):
        assert found.pop("calls")
        reasons = {name: reason for name, (*_, reason) in found.items()}
        assert all(same and count == 2 and graphs == 0 for same, count, graphs, _ in found.values()), found
        assert "changes what outlives its call" in reasons["Counting"]
        assert "random" in reasons["Drawing"] and "writes in place" in reasons["Norm"]
        assert "writes in place" in reasons["WritesToData"]


def split():
    named()
    torch.manual_seed(0)
    model = Tower(Wide)
    plan = pipelined(model, {"pp": 2}, "blocks.1", schedule="zb-h1", parameters={"*": {}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
        compiled(model, "aot_eager")
        model(torch.ones(6, 8)).backward()
    return [str(one.message) for one in caught], vescale.explain_compile(model)


def test_a_schedule_that_splits_the_backward_runs_eagerly_and_says_so():
    for said, found in run_ranks(2, split, timeout=120):
        assert len(said) == 1 and "apart" in said[0]
        assert found.graphs == 0 and "gradients of inputs and of weights apart" in found.eager[0]


def looked_at_in_between():
    """A debugger that comes between a forward and its backward does not change how a checkpointed block is computed."""
    named()
    losses = []
    for backend in (None, "aot_eager"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Tower(Wide)
        plan = wide(model).override(checkpointing={"blocks.*": True})
        model, optimizer = vescale.parallelize(plan, model, partial(torch.optim.SGD, lr=0.1))
        if backend:
            compiled(model, backend)
        kept = []
        for step in range(3):
            if step == 2:
                sys.settrace(lambda *_: None)
            loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)))
            sys.settrace((lambda *_: None) if step == 1 else None)
            loss.backward()
            sys.settrace(None)
            kept.append([loss.item(), *(full(p.grad) for p in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        losses.append(kept)
    graphs = model._vescale.captured.graphs
    return graphs, all(map(torch.equal, *([torch.as_tensor(x) for step in one for x in step] for one in losses)))


def test_a_checkpointed_block_is_computed_again_as_it_was():
    assert run_ranks(2, looked_at_in_between, timeout=120) == [(2, True)] * 2  # the first block is given no gradient


def hook_inside(model):
    calls = []
    model.blocks[0].inner.register_forward_hook(lambda module, args, out: calls.append(tuple(out.shape)))
    return calls


def other_weight(model):
    with torch.no_grad():
        model.blocks[1].inner[0].weight.mul_(0.5)


def lengths():
    """More than are compiled; the first of them is compiled still."""
    same, _, captured, eager, graph = told(Wide)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in [*range(7, 18), 7]:
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
            same = same and graph[4](x).item() == eager[4](x).item()
    said = [str(one.message) for one in caught if issubclass(one.category, vescale.CompileWarning)]
    return same, captured.graphs, [one.last for one in captured.regions], said


def test_further_sizes_are_eager_and_said_once():
    for same, graphs, last, said in run_ranks(2, lengths, timeout=300):
        assert same and graphs > 8 and last == ["", ""]
        assert len(said) == 1 and "8 other sizes" in said[0]


def cast(backend):
    named()
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Tower(Wide)
    model, _ = vescale.parallelize(wide(model), model)
    if backend:
        compiled(model, backend)
    losses = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=step != 1):
            loss = model(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        losses.append(loss.item())
    captured = model._vescale.captured
    return losses, [full(p.grad) for p in model.parameters()], captured.reasons() if captured else None


def both_cast():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, graph = cast(None), cast("aot_eager")
    return eager[0] == graph[0], [torch.equal(a, b) for a, b in zip(eager[1], graph[1])], graph[2]


def test_a_graph_under_autocast_casts_its_forward_alone():
    for losses_are, gradients_are, reasons in run_ranks(2, both_cast, timeout=300):
        assert losses_are and all(gradients_are) and reasons == []


def changes():
    answers = {}
    for act in (hook_inside, other_weight):
        same, said, captured, eager, graph = told(Wide, act)
        answers[act.__name__] = same, said, eager[3] == graph[3], captured.graphs
    same, _, captured, _, _ = told(Two)
    answers["results"] = same, captured.graphs
    same, said, captured, eager, graph = told(Wide)
    copied = copy.deepcopy(graph[4])
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
    answers["copy"] = copied(x).item() == eager[4](x).item(), copied._vescale.captured.graphs
    try:
        graph[4](torch.randn(6, 9))
    except RuntimeError as error:
        answers["error"] = type(error).__name__
    answers["after the error"] = graph[4](x).item() == eager[4](x).item()
    weight = graph[4].blocks[0].inner[0].weight
    answers["held"] = type(weight).__name__, tuple(weight.shape)
    loss = graph[4](x)
    try:
        torch.autograd.grad(loss, weight, create_graph=True)
    except vescale.PlanError as error:
        answers["second order"] = str(error)
    return answers


def test_what_changes_between_calls_is_seen():
    for found in run_ranks(2, changes, timeout=300):
        assert found["hook_inside"][:3] == (True, [], True)
        assert found["other_weight"] == (True, [], True, 2)  # the first block is given no gradient
        assert found["results"] == (True, 2)
        assert found["copy"] == (True, 2)
        assert found["error"] == "ShapeError" and found["after the error"]
        assert found["held"] == ("DTensor", (12, 8))
        assert "the gradient of a compiled graph has no gradient" in found["second order"]

"""Dry runs against real ones: the same collectives, the same memory, the same operations."""

import random
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import vescale
from vescale_plans import Pipeline, Plan, PlanError, dry_run, library
from vescale_plans._dry.meter import Meter
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

BATCH, POSITIONS, VOCABULARY = 8, 32, 128


def gpt():
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, n_layer=2, n_head=4, n_embd=64))


def llama():
    from llama.model import build

    return build(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=2)


def mixtral(experts="eager"):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=8, experts_implementation=experts, **sizes
    )
    return MixtralForCausalLM(config).train()


def tokens():
    ids = torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=torch.Generator().manual_seed(0))
    return ids[0], ids[1]


def labelled():
    return {"input_ids": tokens()[0], "labels": tokens()[0]}


CASES = {
    "gpt, dp2 tp2 sp": (gpt, tokens, partial(library.gpt, {"dp": 2, "tp": 2})),
    "llama, dp2 tp2 sp": (llama, labelled, partial(library.llama, {"dp": 2, "tp": 2})),
    "llama, tp4": (llama, labelled, partial(library.llama, {"tp": 4}, sequence_parallel=False)),
    "llama, dp4": (llama, labelled, partial(library.llama, {"dp": 4})),
    "llama, dp4, zero 1": (llama, labelled, lambda: replace(library.llama({"dp": 4}), zero=1)),
    "llama, dp2 tp2, zero 2": (llama, labelled, lambda: replace(library.llama({"dp": 2, "tp": 2}), zero=2)),
    "gpt, dp2 tp2, zero 3": (gpt, tokens, lambda: replace(library.gpt({"dp": 2, "tp": 2}), zero=3)),
    "mixtral, ep4": (
        mixtral, labelled, partial(Plan, {"ep": 4}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    ),
    "mixtral as it comes, ep4": (
        partial(mixtral, None), labelled, partial(Plan, {"ep": 4}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    ),
}  # fmt: skip
EVEN = [name for name in CASES if "mixtral" not in name]  # where the load of ranks does not depend on values


def loss_of(model, batch):
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return getattr(out, "loss", out)


def really(name):
    """Collectives of a warm step, on every rank, and the lowest peak of some: gloo's threads may keep buffers for
    longer on a loaded machine."""
    build, batch, plan = CASES[name]
    torch.manual_seed(0)
    model, meter = build(), Meter("gloo")  # which takes memory of its own, that no operator makes
    model, optimizer = vescale.parallelize(plan(), model, torch.optim.AdamW)
    batch = batch()
    meter.label([*model.parameters(), *model.buffers()], "parameters")
    peaks = []
    with vescale.comm_trace(model) as trace, meter:
        for _ in range(6):
            trace.events.clear()
            meter.mark()
            meter.kind = "activations"
            loss = loss_of(model, batch)
            meter.kind = "gradients"
            loss.backward()
            del loss
            meter.kind = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
            peaks.append((meter.peak.total(), dict(meter.peak)))
    return described(trace.events), *min(peaks[1:], key=lambda peak: peak[0]), meter.flops


def described(events):
    return [(e.kind, e.axes, e.cause.function, e.cause.module, e.cause.direction, e.received, e.count) for e in events]


def dryly(name):
    build, batch, plan = CASES[name]
    return dry_run(plan(), build(), batch(), backend="gloo")


@in_turns(3)
@pytest.mark.parametrize("name", EVEN)
def test_counts_what_a_real_run_issues(name):
    found = dryly(name)
    events, peak, kinds, flops = run_ranks(4, really, name)[0]
    ours = [e for e in described(found.collectives) if e[2] != "check_agreement"]
    assert [e[:5] for e in ours if e[6]] == [e[:5] for e in events if e[6]]
    assert found.received == sum(e[5] for e in events)
    assert found.flops == flops
    assert 0.98 < found.peak / peak < 1.03, (found.peak / peak, found.memory, kinds)


@pytest.mark.parametrize("name", ["mixtral, ep4", "mixtral as it comes, ep4"])
def test_experts_of_an_even_load(name):
    """In float32, whatever computes them: as a stock model comes, one grouped product."""
    found = dryly(name)
    kinds = [e.cause.function for e in found.collectives if e.cause.function.startswith("expert")]
    assert kinds.count("expert dispatch") == kinds.count("expert combine") == 4
    assert kinds.count("expert counts") == 2
    rows = BATCH * POSITIONS // 4 * 2 * 64 * 4
    moved = {e.received for e in found.collectives if e.cause.function == "expert dispatch"}
    assert moved == {rows * 3 // 4}


@pytest.mark.parametrize("name", ["gpt, dp2 tp2 sp", "llama, tp4", "llama, dp4"])
def test_operations_are_shared_out_whole(name):
    """Nothing is computed twice: the operations of four ranks are those of one device. Some transformers multiply a
    table of positions out, which every rank has whole."""
    build, batch, _ = CASES[name]
    model, meter, tables = build(), Meter(), 0

    def count(sign, *_):
        nonlocal tables
        tables += sign * meter.flops

    for path, module in model.named_modules():
        if path.endswith("rotary_emb"):
            module.register_forward_pre_hook(partial(count, -1))
            module.register_forward_hook(partial(count, +1))
    with meter:
        loss_of(model, batch()).backward()
    assert dryly(name).flops * 4 == meter.flops + 3 * tables


def test_a_model_far_larger_than_memory():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=8
    )
    with vescale.deferred_init():
        model = LlamaForCausalLM(config)
    ids = torch.zeros(16, 4096, dtype=torch.int64)
    found = dry_run(library.llama({"dp": 8, "tp": 8}), model, {"input_ids": ids, "labels": ids})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 8 < found.memory["parameters"] / 4 < parameters / 8 * 1.02
    assert found.memory["optimizer"] > 2 * 4 * parameters / 8
    assert "all_gather" in str(found) and "at the peak" in str(found)


def joined_already():
    with pytest.raises(PlanError, match="of a world of 2 already"):
        dryly("gpt, dp2 tp2 sp")


def test_only_outside_a_world():
    run_ranks(2, joined_already)


def test_tracebacks_are_told_as_before():
    """torch puts a rank before their lines once a world was joined, and again with every other."""
    told = sys.excepthook
    dry_run(Plan({"dp": 2}, {"*": {}}), torch.nn.Linear(4, 4), torch.zeros(2, 4), step=lambda model, x: model(x).sum())
    assert sys.excepthook is told


def test_a_loss_that_is_not_found():
    with pytest.raises(PlanError, match="no loss: a tensor without dims"):
        dry_run(Plan({"dp": 2}, {"*": {}}), torch.nn.Linear(4, 4), torch.zeros(2, 4))
    found = dry_run(
        Plan({"dp": 2}, {"*": {}}), torch.nn.Linear(4, 4), torch.zeros(2, 4), step=lambda model, x: model(x).sum()
    )
    gradients = [e for e in found.collectives if e.cause.function == "gradient sync" and e.count]
    assert [(e.kind, e.axes) for e in gradients] == [("all_reduce", ("dp",))]


def sums(model, x):
    return model(x).square().sum()


class Moves(torch.nn.Module):
    """Brings a table that is no integer to the device of what it meets, as GPT-J does its positions'."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(8, 4))

    def forward(self, ids):
        return self.linear(self.table.to(ids.device).repeat(2, 1)[ids])


class LeavesOut(torch.nn.Module):
    """Has a parameter without use."""

    def __init__(self):
        super().__init__()
        self.linear, self.beside = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.linear(x)


class LearnsBias(torch.nn.Module):
    """Attention with a bias that has a gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = torch.nn.Linear(4, 8), torch.nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        heads = self.linear(x).view(4, 3, 2, 4).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.bias)


class Chooses(torch.nn.Module):
    """Calls its experts one by one, each with the rows that chose it."""

    def __init__(self, choose):
        super().__init__()
        self.router, self.choose = torch.nn.Linear(4, 4), choose
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.choose(self.router(x))
        out = torch.zeros_like(x)
        hit = torch.nn.functional.one_hot(chosen, 4).sum(dim=(0, 1)).nonzero()
        for which in hit.flatten().tolist():
            rows, at = torch.where(chosen == which)
            out.index_add_(0, rows, self.experts[which](x[rows]) * weights[rows, at, None])
        return out


class Packs(torch.nn.Module):
    """Rows as often as their counts say, numbered up to the sum of the counts, as Qwen3-VL does with patches."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, counts):
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        within = torch.arange(counts.sum()) - starts
        return self.linear(within[:, None].expand(-1, 4).float())


CHOICES = {
    "topk": lambda logits: logits.softmax(-1).topk(2),
    "max": lambda logits: logits.softmax(-1).max(-1, keepdim=True),
    "argmax": lambda logits: (logits.amax(-1, keepdim=True), logits.argmax(-1, keepdim=True)),
}
MODELS = {
    "moves": (Moves, torch.arange(8)),
    "leaves a parameter out": (LeavesOut, torch.zeros(4, 4)),
    "learns a bias": (LearnsBias, torch.zeros(4, 3, 4)),
    "packs rows": (Packs, torch.tensor([1, 2, 3, 1])),
}


@pytest.mark.filterwarnings("ignore:repeat_interleave has no rule")
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_what_needs_no_values_needs_none(name, zero):
    build, batch = MODELS[name]
    found = dry_run(Plan({"dp": 2}, {"*": {}}, zero=zero), build(), batch, step=sums)
    assert found.peak and any(e.cause.function == "gradient sync" for e in found.collectives)


@pytest.mark.parametrize("kind", CHOICES)
def test_experts_called_one_by_one_have_an_even_load(kind):
    """As many rows in all as on one device, whoever is chosen there."""
    torch.manual_seed(0)
    model = Chooses(CHOICES[kind])
    with Meter() as meter:
        sums(model, torch.randn(16, 4)).backward()
    assert dry_run(Plan({"tp": 2}, {"*": {}}), model, torch.zeros(16, 4), step=sums).flops == meter.flops


class Reads(torch.nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out if out.sum().item() > 0 else out + 1


class Counts(torch.nn.Linear):
    """As many as the largest value says."""

    def forward(self, x):
        out = super().forward(x)
        return out * torch.bincount(out.detach().round().long().abs().flatten()).max()


@pytest.mark.parametrize("kind", [Reads, Counts])
def test_a_value_that_is_read_is_an_error_of_the_plan(kind):
    with pytest.raises(PlanError, match="reads a value, and a dry run has none"):
        dry_run(Plan({"dp": 2}, {"*": {}}), kind(4, 4), torch.zeros(4, 4), step=sums)


@pytest.mark.parametrize(("zero", "virtual"), [(0, 1), (3, 1), (3, 2)])
def test_a_dry_run_draws_nothing(zero, virtual):
    """Not from Python's generator either: it is the model's, and stages of a pipeline may not draw from it."""
    stages = tuple(f"model.layers.{at}" for at in range(1, 2 * virtual))
    schedule = "1f1b" if virtual == 1 else "interleaved"
    pipeline = Pipeline(cuts=stages, schedule=schedule, virtual=virtual, microbatches=2)
    from llama.model import build

    model = build(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=4)
    before = random.getstate()
    found = vescale.dry_run(Plan({"pp": 2, "dp": 2}, {"*": {}}, pipeline=pipeline, zero=zero), model, labelled())
    assert len(found.stages) == 2 and found.peak > 0
    assert random.getstate() == before
    vescale.dry_run(replace(library.llama({"dp": 2}), zero=zero), model, labelled())
    assert random.getstate() == before


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_integers_that_nobody_sends_are_places_of_every_table(backend):
    """Labels that a context axis deals out arrive, and are looked up among classes that a tensor axis splits: they were
    what the memory held before, which here is full of what is no class."""
    plan = replace(library.llama({"dp": 1, "cp": 2, "tp": 2}), context_axis="cp", data_axis=None)
    batch = {name: torch.full((BATCH, POSITIONS), 3) for name in ("input_ids", "labels")}
    held = [torch.full((size,), 2**40) for size in (BATCH * POSITIONS // 2, BATCH * POSITIONS, BATCH) for _ in range(9)]
    del held
    assert vescale.dry_run(plan, llama(), batch, backend=backend).peak > 0


class Reports(nn.Module):
    """A training forward that returns metrics of its last stage beside its loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x).tanh()
        hit = x.argmax(-1) == labels
        return {"loss": nn.functional.cross_entropy(x, labels), "accuracy": hit.float().mean(), "hits": hit.sum()}


def test_metrics_beside_a_pipelines_loss_are_numbers_that_a_dry_run_does_not_know():
    plan = vescale.Plan(
        mesh={"pp": 2},
        parameters={"*": {}},
        pipeline=vescale.Pipeline(cuts=("blocks.3",), schedule="1f1b", microbatches=4),
    )
    with vescale.deferred_init():
        model = Reports()
    batch = torch.randn(8, 6), torch.randint(6, (8,))
    found = vescale.dry_run(plan, model, batch, step=lambda model, batch: model(*batch)["loss"])
    assert len(found.stages) == 2

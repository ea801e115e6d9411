"""Outputs of an evaluation that other stages than the last compute: on every rank, as one device has them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_pipeline import PipelineError
from vescale_testkit import raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

ROWS, WIDTH, COUNT = 8, 6, 4


class Net(nn.Module):
    """Returns what its first block computes, what the third writes to in place, what two stages use, and its last."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x, y):
        first = self.blocks[0](x)
        second = self.blocks[1](first).tanh()
        third = self.blocks[2](second)
        written = self.blocks[3](third)
        written *= 2
        deep = self.blocks[4](written + second)
        last = self.blocks[5](deep.relu())
        loss = F.mse_loss(last, y)
        return {
            "loss": loss,
            "hidden": (first, [second, third]),
            "views": {"half": first[:, : WIDTH // 2], "sum": second.sum(-1)},
            "written": written,
            "given": x,
            "last": last,
        }


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value.full_tensor() if hasattr(value, "full_tensor") else value]
    value = value.values() if isinstance(value, dict) else value
    return [tensor for item in value for tensor in tensors(item)]


def plan(mesh, cuts, kind="1f1b", zero=0):
    virtual = (len(cuts) + 1) // mesh["pp"]
    pipeline = vescale.Pipeline(cuts=cuts, microbatches=COUNT, schedule=kind, virtual=virtual)
    return vescale.Plan(mesh=mesh, parameters={"*": {}}, zero=zero, pipeline=pipeline)


EVERY = tuple(f"blocks.{i}" for i in (1, 2, 4))
PLANS = {
    "two stages": plan({"pp": 2}, ("blocks.3",)),
    "three stages": plan({"pp": 3}, ("blocks.1", "blocks.4")),
    "a stage a block, interleaved": plan({"pp": 2}, EVERY, "interleaved"),
    "in a V": plan({"pp": 2}, EVERY, "zbv"),
    "gpipe": plan({"pp": 4}, EVERY, "gpipe"),
    "over a data axis": plan({"pp": 2, "dp": 2}, ("blocks.2",), zero=3),
}


def evaluated(chosen, trains_before, mode):
    torch.manual_seed(0)
    one = Net().double()
    model, _ = vescale.parallelize(chosen, copy.deepcopy(one))
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    if trains_before:
        model(x, y)["loss"].backward()
    with mode():
        found, wanted = tensors(model(x, y)), tensors(one(x, y))
    return [(a - b).abs().max().item() if a.shape == b.shape else str(a.shape) for a, b in zip(found, wanted)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trains_before", [False, True], ids=["alone", "after a step"])
@pytest.mark.parametrize("name", PLANS)
def test_what_every_stage_computes_is_returned(name, trains_before, mode):
    chosen = PLANS[name]
    for found in run_ranks(chosen.world_size, evaluated, chosen, trains_before, mode, timeout=90):
        assert found == pytest.approx([0] * 9, abs=1e-12)


class Measured(nn.Module):
    """Returns one number, or table, beside its loss and its rows."""

    def __init__(self, measure):
        super().__init__()
        self.first, self.last, self.measure = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), measure

    def forward(self, x, labels):
        hidden = self.first(x).tanh()
        out = self.last(hidden)
        loss = F.cross_entropy(out, labels)
        return {"loss": loss, "out": out, "measure": self.measure(self, hidden, out, labels)}


MEASURES = {
    "accuracy": lambda model, hidden, out, labels: (out.argmax(-1) == labels).float().mean(),
    "hits": lambda model, hidden, out, labels: (out.argmax(-1) == labels).sum(),
    "means of features": lambda model, hidden, out, labels: out.mean(0),
    "of the first stage": lambda model, hidden, out, labels: hidden.abs().mean(),
    "transposed": lambda model, hidden, out, labels: out.T,
    "rows of the first, transposed": lambda model, hidden, out, labels: hidden.T * 2,
    "labels weigh": lambda model, hidden, out, labels: F.cross_entropy(out * 2, labels) + 1,
    "a table": lambda model, hidden, out, labels: torch.arange(5.0) * 2,
    "a table as long as a part": lambda model, hidden, out, labels: torch.arange(2.0) * 2,
    "of weights": lambda model, hidden, out, labels: model.last.weight.norm() * 1.0,
    "an input": lambda model, hidden, out, labels: labels,
}
LOST = {
    "largest": (lambda model, hidden, out, labels: out.max(), "max"),
    "a sum and a mean": (
        lambda model, hidden, out, labels: out.sum() + out.mean(),
        "weigh the microbatches differently",
    ),
    "a sum and a number": (lambda model, hidden, out, labels: out.sum() + 1, "weigh the microbatches differently"),
    "a root": (lambda model, hidden, out, labels: out.square().mean().sqrt(), "sqrt"),
    "pairs": (lambda model, hidden, out, labels: out @ out.T, "matmul"),
    "shares of a sum over rows": (lambda model, hidden, out, labels: out.softmax(0), "softmax"),
}


def measured(measure):
    """The difference from one device, for batches whose parts have other numbers of labels; a loss alone, first."""
    torch.manual_seed(0)
    one = Measured(measure).double()
    chosen = vescale.Plan(
        mesh={"pp": 2}, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=("last",), microbatches=COUNT)
    )
    model, _ = vescale.parallelize(chosen, copy.deepcopy(one))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    labels = torch.arange(ROWS) % WIDTH
    labels[1:4] = -100
    with torch.no_grad():
        found, wanted = model(x, labels), one(x, labels)
    errors = []
    for name in ("loss", "out", "measure"):
        a, b = tensors([found[name]])[0].clone(), wanted[name]
        errors.append((a - b).abs().max().item() if (a.shape, a.dtype) == (b.shape, b.dtype) else (a.shape, a.dtype))
    return errors


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_is_of_the_whole_batch(name):
    for found in run_ranks(2, measured, MEASURES[name], timeout=90):
        assert found == pytest.approx([0] * 3, abs=1e-12)


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_told_from_the_parts_raises_when_it_is_used(name):
    measure, cause = LOST[name]
    text = raises_on_all(2, PipelineError, lambda: measured(measure))
    assert "on an output of an evaluation that comes from the batch by" in text and cause in text


def hidden_states(kind):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=2)
        one, cut = GPT2LMHeadModel(config).eval(), "transformer.h.2"
    else:
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
        )
        one, cut = LlamaForCausalLM(config).eval(), "model.layers.2"
    model, _ = vescale.parallelize(plan({"pp": 2}, (cut,)), copy.deepcopy(one))
    ids = torch.randint(64, (ROWS, 12), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids, "output_hidden_states": True, "use_cache": False}
    with torch.no_grad():
        found, wanted = model(**given), one(**given)
    assert len(found.hidden_states) == len(wanted.hidden_states) == 5
    pairs = zip([*found.hidden_states, found.logits, found.loss], [*wanted.hidden_states, wanted.logits, wanted.loss])
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hidden_states_of_transformers(kind):
    for found in run_ranks(2, hidden_states, kind, timeout=90):
        assert max(found) < 2e-6


class Reports(nn.Module):
    """A training forward that returns metrics of its last stage beside its loss, and what does not leave it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x, labels):
        first = x = self.blocks[0](x).tanh()
        early = first.detach().mean()
        for block in self.blocks[1:]:
            x = block(x).tanh()
        loss, hit = F.cross_entropy(x, labels), x.argmax(-1) == labels
        joined = {
            "accuracy": hit.float().mean(),
            "hits": hit.sum(),
            "labels weigh": F.cross_entropy(x.detach() * 2, labels) + 1,
            "features": x.detach().abs().mean(0),
            "of the first rows": first.detach().square().mean(),
        }
        refused = {
            "rows": x,
            "with a gradient": x.square().mean(),
            "largest": x.detach().max(),
            "of the first stage": early,
        }
        return {"loss": loss, "joined": joined, "refused": refused}


def reported(chosen):
    """Of three steps the loss and the joined; then the shapes of the rest, and what a use of it says."""
    torch.manual_seed(0)
    model = Reports()

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    model, optimizer = vescale.parallelize(chosen, model, make) if chosen else (model, make(model.parameters()))
    steps = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, labels = torch.randn(ROWS, WIDTH, generator=generator), torch.randint(WIDTH, (ROWS,), generator=generator)
        labels[: 2 + step] = -100
        loss, joined, refused = model(x, labels).values()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(one.requires_grad for one in joined.values())
        steps.append((loss.detach(), {name: one.clone() for name, one in joined.items()}))
    for one in refused.values() if chosen else ():
        for use in (lambda one=one: one + loss, lambda one=one: one.tolist(), lambda one=one: one.detach()):
            with pytest.raises(PipelineError, match="that is not the loss"):
                use()
    return steps, [tuple(one.shape) for one in refused.values()]


@pytest.mark.parametrize("name", ["two stages", "in a V", "over a data axis"])
def test_a_training_call_returns_metrics_of_the_whole_batch_and_refuses_the_rest(name):
    wanted, shapes = reported(None)
    for steps, seen in run_ranks(PLANS[name].world_size, reported, PLANS[name], timeout=90):
        torch.testing.assert_close(steps, wanted, rtol=2e-6, atol=1e-7)
        assert seen == shapes

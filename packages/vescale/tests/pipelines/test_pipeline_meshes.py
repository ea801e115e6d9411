"""Pipelines beside data, tensor and sequence parallelism and ZeRO, on one mesh: within the standard tolerances."""

from functools import partial

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

POSITIONS, STEPS, ROWS, COUNT, VOCABULARY, LAYERS = 16, 10, 2, 4, 64, 4
LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11


def build_gpt():
    from nanogpt.model import GPT, GPTConfig

    sizes = {"n_layer": LAYERS, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, dropout=0.1, **sizes))


def build_llama():
    from llama.model import build

    return build(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS)


MODELS = {
    "gpt": (build_gpt, lambda model, x, y: model(x, y), "transformer.h.{}"),
    "llama": (build_llama, lambda model, x, y: model(input_ids=x, labels=y).loss, "model.layers.{}"),
}
# mesh, sequence parallel, ZeRO stage, schedule, virtual stages
CASES = [
    ({"pp": 2, "dp": 2}, False, 0, "1f1b", 1),
    ({"pp": 2, "dp": 2}, False, 1, "zb-h1", 1),
    ({"pp": 2, "dp": 2}, False, 2, "1f1b", 1),
    ({"pp": 2, "dp": 2}, False, 2, "zbv", 2),
    ({"pp": 2, "dp": 2}, False, 3, "interleaved", 2),
    ({"pp": 2, "dp": 2}, False, 3, "zb-h1", 1),
    ({"pp": 2, "tp": 2}, True, 0, "1f1b", 1),
    ({"pp": 2, "tp": 2}, True, 0, "zbv", 2),
    ({"dp": 2, "pp": 2}, False, 0, "interleaved", 2),
    ({"pp": 2, "dp": 2, "tp": 2}, True, 1, "1f1b", 1),
]


def plan_of(name, mesh, sequence_parallel, zero, kind, virtual):
    cut, stages = MODELS[name][2], mesh["pp"] * virtual
    cuts = tuple(cut.format(LAYERS * stage // stages) for stage in range(1, stages))
    plan = getattr(library, name)(mesh={"dp": 1, "tp": 1, **mesh}, sequence_parallel=sequence_parallel)
    return plan.override(
        mesh=mesh if "tp" in mesh else {**mesh, "tp": 1},
        data_axis="dp" if "dp" in mesh else None,
        zero=zero,
        pipeline=vescale.Pipeline(cuts=cuts, schedule=kind, microbatches=COUNT, virtual=virtual),
    )


def train(name, plan):
    """Losses of the whole batches, and the parameters that this rank has, whole."""
    build, loss_of, _ = MODELS[name]
    torch.manual_seed(0)
    model, optimizer_fn = build(), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    if plan is None:
        optimizer = optimizer_fn(model.parameters())
    else:
        model, optimizer = vescale.parallelize(plan, model, optimizer_fn)
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(STEPS):
        inputs, labels = torch.randint(VOCABULARY, (2, COUNT * ROWS, POSITIONS), generator=data)
        if plan is None:
            total = 0
            for x, y in zip(inputs.chunk(COUNT), labels.chunk(COUNT)):
                loss = loss_of(model, x, y) / COUNT
                loss.backward()
                total += loss.item()
        else:
            loss = loss_of(model, inputs, labels)
            loss.backward()
            total = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    whole = {n: p.detach() if plan is None else p.detach().full_tensor() for n, p in model.named_parameters()}
    return losses, whole


def compared(name, *case):
    losses, whole = train(name, plan_of(name, *case))
    wanted_losses, wanted = train(name, None)
    errors = {n: ((p - wanted[n]).norm() / wanted[n].norm()).item() for n, p in whole.items()}
    return [abs(a - b) / abs(b) for a, b in zip(losses, wanted_losses)], errors


@pytest.mark.parametrize("name, case", slice_of([(n, case) for case in CASES for n in MODELS], fraction=12))
def test_training_equals_one_device(name, case):
    ranks = 1
    for size in case[0].values():
        ranks *= size
    held = set()
    for losses, parameters in run_ranks(ranks, compared, name, *case, timeout=300):
        assert max(losses) <= LOSS
        assert {n: e for n, e in parameters.items() if not e <= PARAMETER} == {}
        held.update(parameters)
    assert held >= {n for n, _ in MODELS[name][0]().named_parameters()}


def trained_twice(kind, virtual, name):
    """What differs between ZeRO 0 and ZeRO 3, and the bytes of gathered parameters: after a call, and at rest."""
    outcomes, held = [], []
    for zero in (0, 3):
        torch.manual_seed(0)
        build, loss_of, _ = MODELS[name]
        plan = plan_of(name, {"pp": 2, "dp": 2}, False, zero, kind, virtual)
        model, optimizer = vescale.parallelize(plan, build(), partial(torch.optim.AdamW, lr=1e-3))
        torch.manual_seed(1)
        data = torch.Generator().manual_seed(5)
        losses = []
        for _ in range(3):
            inputs, labels = torch.randint(VOCABULARY, (2, COUNT * ROWS, POSITIONS), generator=data)
            for _ in range(2):  # gradients of two calls add up
                loss = loss_of(model, inputs, labels)
                held.append(gathered(model))
                loss.backward()
                held.append(gathered(model))
                losses.append(loss.item())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [norm.item(), loss_of(model, inputs, labels).item()]
            held.append(gathered(model))
        outcomes.append((losses, {n: p.detach().full_tensor() for n, p in model.named_parameters()}))
    (losses, whole), (others, theirs) = outcomes
    far = max(abs(a - b) / abs(a) for a, b in zip(losses, others))
    return far, [n for n, p in whole.items() if not torch.equal(p, theirs[n])], held


def gathered(model):
    buffers = [buffer for unit in model._vescale.sync.units for buffer in unit.buckets if buffer.reshards]
    return sum(buffer.full.untyped_storage().nbytes() for buffer in buffers)


@in_turns(3)
@pytest.mark.parametrize(("kind", "virtual", "name"), [("1f1b", 1, "gpt"), ("zbv", 2, "llama")])
def test_zero_3_is_zero_0(kind, virtual, name):
    for far, different, held in run_ranks(4, trained_twice, kind, virtual, name, timeout=300):
        assert far <= 1e-6 and different == []
        with_zero_3 = held[len(held) // 2 :]
        assert max(held[: len(held) // 2]) == 0
        # Gathered during a call, let go by the backward that releases its gradients, and after evaluation.
        assert all(size > 0 for size in with_zero_3[0::5] + with_zero_3[2::5])
        assert {*with_zero_3[1::5], *with_zero_3[3::5], *with_zero_3[4::5]} == {0}


class WithUnused(torch.nn.Module):
    """Each stage has a parameter that no step uses, which weight decay would change if it had a gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.first, self.last = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def train_with_unused(zero=None):
    torch.manual_seed(0)
    model, make = WithUnused(), partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    if zero is None:
        optimizer = make(model.parameters())
    else:
        pipeline = vescale.Pipeline(axis="pp", cuts=("blocks.2",), schedule="gpipe", microbatches=2)
        mesh = {"pp": 2, "dp": 2}
        plan = vescale.Plan(mesh=mesh, parameters={"*": {}}, pipeline=pipeline, zero=zero)
        model, optimizer = vescale.parallelize(plan, model, make)
    for step in range(3):
        model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).backward()
        unused = [name for name, one in model.named_parameters() if one.grad is None]
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.detach().full_tensor() if zero is not None else p.detach() for n, p in model.named_parameters()}
    return unused, whole


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_no_step_uses_has_no_gradient(zero):
    _, wanted = train_with_unused()
    for unused, found in run_ranks(4, train_with_unused, zero, timeout=200):
        assert all(name.startswith(("first.", "last.")) for name in unused)
        for name, one in found.items():
            torch.testing.assert_close(one, wanted[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")

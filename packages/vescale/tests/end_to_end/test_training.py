"""Training under every kind of plan against one device: losses, parameters, and what is communicated."""

import contextlib
import itertools
from functools import partial

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

POSITIONS, STEPS, LAYERS = 24, 20, 2
LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11


def build_gpt(vocabulary):
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=vocabulary, block_size=POSITIONS, n_layer=LAYERS, n_head=4, n_embd=32))


def build_llama(vocabulary):
    from llama.model import build

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS}
    return build(vocab_size=vocabulary, **sizes)


MODELS = {
    "gpt": (build_gpt, lambda model, x, y: model(x, y)),
    "llama": (build_llama, lambda model, x, y: model(input_ids=x, labels=x).loss),
}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=5e-4),
    "sgd": partial(torch.optim.SGD, lr=0.05),
}
# (mesh, sequence parallel, vocabulary, batch): the last ones divide by nothing.
CASES = {
    "dp2 tp2 sp": ({"dp": 2, "tp": 2}, True, 64, 8),
    "dp2 tp2": ({"dp": 2, "tp": 2}, False, 64, 8),
    "tp4": ({"tp": 4}, False, 64, 8),
    "dp4": ({"dp": 4}, False, 64, 8),
    "dp2 tp2 sp, uneven": ({"dp": 2, "tp": 2}, True, 67, 5),
    "tp4 sp, uneven": ({"tp": 4}, True, 67, 3),
    "dp4, uneven": ({"dp": 4}, False, 67, 6),
}


def batches(vocabulary, batch, steps):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocabulary, (2, batch, POSITIONS), generator=generator) for _ in range(steps)]


def train(name, optimizer, vocabulary, batch, plan=None, steps=STEPS, trace_last=False, accumulate=1):
    """Losses, parameters (whole), and the trace of the last step's last forward and backward."""
    build, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = build(vocabulary)
    if plan is None:
        optimizer = OPTIMIZERS[optimizer](model.parameters())
    else:
        model, optimizer = vescale.parallelize(plan, model, OPTIMIZERS[optimizer])
    losses = []
    for part, (inputs, targets) in enumerate(batches(vocabulary, batch, steps * accumulate), start=1):
        last = trace_last and part == steps * accumulate
        with vescale.comm_trace(model) if last else contextlib.nullcontext() as trace:
            loss = loss_of(model, inputs, targets)
            loss.backward()
        losses.append(loss.item())
        if part % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    whole = {n: p.detach() if plan is None else p.detach().full_tensor() for n, p in model.named_parameters()}
    return losses, whole, trace


def compared(name, optimizer, mesh, sequence_parallel, vocabulary, batch):
    """Per step the relative error of the loss, per parameter the relative error of its norm. Runs on every rank."""
    plan = getattr(library, name)(mesh=mesh, sequence_parallel=sequence_parallel)
    losses, whole, _ = train(name, optimizer, vocabulary, batch, plan)
    wanted_losses, wanted, _ = train(name, optimizer, vocabulary, batch)
    assert set(whole) == set(wanted)
    if optimizer == "adamw":
        _drop_key_biases(whole, wanted)
    return (
        [abs(a - b) / abs(b) for a, b in zip(losses, wanted_losses)],
        {n: ((whole[n] - wanted[n]).norm() / wanted[n].norm()).item() for n in wanted},
    )


def _drop_key_biases(*states):
    """Compared under SGD only. A key bias b adds q.b to every score of a query, and softmax(s + c) = softmax(s): its
    gradient is exactly zero, what is computed is rounding, and AdamW takes full steps along the rounding's sign."""
    for state in states:
        for name in [n for n in state if n.endswith("c_attn.bias")]:
            query, _, value = state[name].chunk(3)
            state[name] = torch.cat([query, value])


@in_turns(3)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("name", list(MODELS))
def test_training_equals_one_device(name, case, optimizer):
    for losses, parameters in run_ranks(4, compared, name, optimizer, *CASES[case], timeout=300):
        assert max(losses) <= LOSS
        assert {n: e for n, e in parameters.items() if not e <= PARAMETER} == {}


# Meshes of 4 ranks over a data and a tensor axis, and hybrid sharding: (mesh, data axes, sequence parallel).
ZERO_MESHES = {
    "dp4": ({"dp": 4}, "dp", False),
    "dp2 tp2": ({"dp": 2, "tp": 2}, "dp", True),
    "tp4": ({"tp": 4}, None, True),
    "hybrid": ({"dpr": 2, "dp": 2}, ("dpr", "dp"), False),
}


def staged(name, mesh, axes, sequence_parallel, accumulate):
    """Per ZeRO stage the largest errors of losses and parameters, and whether all is bitwise ZeRO-0's."""
    library_plan = getattr(library, name)(mesh=mesh, sequence_parallel=sequence_parallel)
    wanted_losses, wanted, _ = train(name, "adamw", 64, 8, accumulate=accumulate)
    first, found = None, []
    for zero in range(4) if axes else (0,):  # without a data axis there is nothing to shard over
        plan = library_plan.override(zero=zero, data_axis=axes)
        losses, whole, _ = train(name, "adamw", 64, 8, plan, accumulate=accumulate)
        first = first or (losses, whole)
        alike = losses == first[0] and all(torch.equal(whole[n], first[1][n]) for n in whole)
        compared_whole, compared_wanted = dict(whole), dict(wanted)
        _drop_key_biases(compared_whole, compared_wanted)
        found.append(
            (
                max(abs(a - b) / abs(b) for a, b in zip(losses, wanted_losses)),
                max(((compared_whole[n] - w).norm() / w.norm()).item() for n, w in compared_wanted.items()),
                alike,
            )
        )
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "accumulate"), slice_of(list(itertools.product(MODELS, ZERO_MESHES, (1, 3))), 10)
)
def test_zero_stages_equal_one_device_and_each_other(name, mesh, accumulate):
    for loss, parameter, alike in run_ranks(4, staged, name, *ZERO_MESHES[mesh], accumulate, timeout=400)[0]:
        assert loss <= LOSS and parameter <= PARAMETER and alike


def counted(name, mesh, sequence_parallel):
    plan = getattr(library, name)(mesh=mesh, sequence_parallel=sequence_parallel)
    _, _, trace = train(name, "sgd", 64, 8, plan, steps=2, trace_last=True)
    layers = [n for n in ("transformer.h.", "model.layers.") if trace.select(module=n)]
    assert len(layers) == 1, str(trace)
    counts = {
        (direction, kind): trace.count(kind=kind, direction=direction, module=layers[0]) / LAYERS
        for direction in ("forward", "backward")
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    }
    return counts, trace.count(function="gradient sync"), str(trace)


@pytest.mark.parametrize("name", list(MODELS))
def test_sequence_parallel_communicates_the_megatron_minimum(name):
    for counts, syncs, trace in run_ranks(4, counted, name, {"dp": 2, "tp": 2}, True, timeout=120):
        for direction in ("forward", "backward"):
            wanted = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 0, "all_to_all": 0}
            assert {kind: counts[direction, kind] for kind in wanted} == wanted, trace
        # One bucket partial on dp (sharded weights), one on dp and tp (norms): each reduced once.
        assert syncs == 2, trace


@pytest.mark.parametrize("name", list(MODELS))
def test_tensor_parallel_communicates_the_megatron_minimum(name):
    for counts, _, trace in run_ranks(4, counted, name, {"tp": 4}, False, timeout=120):
        for direction in ("forward", "backward"):
            wanted = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 2, "all_to_all": 0}
            assert {kind: counts[direction, kind] for kind in wanted} == wanted, trace

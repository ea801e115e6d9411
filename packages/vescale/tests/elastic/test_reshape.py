"""Another plan amid training: losses, parameters, gradients and states are one device's, to the bit."""

import random
from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor.testing import in_turns, run_ranks, warm_up
from vescale_plans import library

warm_up("torch._dynamo", "vescale", "transformers")

BATCH, POSITIONS = 8, 16
SPLITS = {"batch": 4, "seq": 8, "hidden": 4}


def build_gpt():
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(block_size=POSITIONS, n_layer=2, n_head=4, n_embd=64, dropout=0.1))


def build_llama():
    from llama.model import build

    return with_dropout(build(hidden_size=64, intermediate_size=192, num_hidden_layers=2, attention_dropout=0.1))


def build_mixtral():
    from mixtral.model import build

    return with_dropout(build(attention_dropout=0.1, router_jitter_noise=0.1))


def with_dropout(model):
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("embed_tokens", "self_attn", "mlp"):
            module.register_forward_hook(dropped)
    return model


def dropped(module, args, output):
    first, *rest = output if isinstance(output, tuple) else (output,)
    first = torch.nn.functional.dropout(first, 0.1, module.training)
    return (first, *rest) if rest else first


MODELS = {
    "gpt": (build_gpt, library.gpt, lambda model, x, y: model(x, y), "transformer.h.*"),
    "llama": (build_llama, library.llama, lambda model, x, y: model(input_ids=x, labels=x).loss, "model.layers.*"),
    "mixtral": (
        build_mixtral,
        library.mixtral,
        lambda model, x, y: model(input_ids=x, labels=x).loss,
        "model.layers.*",
    ),
}
ADAMW, SGD = partial(torch.optim.AdamW, lr=5e-4), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
RAISED = [
    ({"dp": 4}, {}),
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 4}, {"zero": 3}),
    ({"tp": 4}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 2}),
    ({"dp": 4}, {"zero": 1}),
]


def plan_of(name, mesh, changes):
    plan = MODELS[name][1](mesh)
    return plan.override(**changes)


def drawn(draw, name):
    """A plan over 4 ranks."""
    meshes = [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}]
    if name == "llama":
        meshes += [{"cp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}]
    if name == "mixtral":
        meshes += [{"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}]
    mesh = draw.choice(meshes)
    data = tuple(axis for axis in ("dp", "ep") if axis in mesh)
    changes = {"data_axis": data, "zero": draw.choice([0, 1, 2, 3]) if data or "cp" in mesh else 0}
    if "cp" in mesh:
        changes |= {"context_axis": "cp", "context_layout": draw.choice(["contiguous", "zigzag"])}
    if "ep" in mesh:
        changes["expert_axis"] = "ep"
    if draw.random() < 0.3:
        changes["checkpointing"] = {MODELS[name][3]: True}
    return mesh, changes


def train(name, plans, *, each=2, make=ADAMW, scheduled=True):
    """(losses, parameters, received): `each` steps under each plan; with as many accumulated gradients before a change
    as steps; without a mesh on one device."""
    from corpus import read_corpus

    build, _, loss_of, _ = MODELS[name]
    torch.manual_seed(0)
    corpus = read_corpus(None, seed=0, device=torch.device("cpu"))
    model, losses, received = build(), [], []
    with vescale.reproducible(SPLITS):
        if plans[0] is None:
            optimizer = make(model.parameters())
        else:
            model, optimizer = vescale.parallelize(plan_of(name, *plans[0]), model, make)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
        own = list(model.parameters())
        for place, plan in enumerate(plans):
            if place:  # amid the accumulation of a step's gradients
                losses.append(backward(loss_of, model, corpus, -place))
                if plan is not None:
                    received.append(vescale.reshape(model, optimizer, plan_of(name, *plan)))
            for step in range(place * each, place * each + each):
                losses.append(backward(loss_of, model, corpus, step))
                torch.nn.utils.clip_grad_norm_(own, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
        assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
    return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}, received


def backward(loss_of, model, corpus, step):
    loss = loss_of(model, *corpus.batch(abs(step) + 1000 * (step < 0), BATCH, POSITIONS))
    loss.backward()
    return loss.item()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def check_equal(name, plans, ranks=4, **more):
    """Every loss and every parameter, on every rank. Returns what each received."""
    found = run_ranks(ranks, train, name, plans, timeout=600, **more)
    ((wanted, values, _),) = run_ranks(1, train, name, [None] * len(plans), timeout=600, **more)
    for losses, parameters, _ in found:
        assert losses == wanted
        assert [key for key, value in parameters.items() if not torch.equal(value, values[key])] == []
        assert parameters.keys() == values.keys()
    return [received for _, _, received in found]


@pytest.mark.parametrize("name, make", [("gpt", ADAMW), ("llama", SGD)])
def test_training_goes_on_to_the_bit(name, make):
    received = check_equal(name, RAISED, make=make)
    assert [of[0] for of in received] == [0] * 4  # each rank cuts its parts out of what it has


@in_turns(3)
@pytest.mark.parametrize("name, seed", [("gpt", 0), ("llama", 0), ("mixtral", 0)])
def test_random_plans(name, seed, count=5):
    draw = random.Random(f"{name} {seed}")
    check_equal(name, [drawn(draw, name) for _ in range(count)], each=1, make=draw.choice([ADAMW, SGD]))

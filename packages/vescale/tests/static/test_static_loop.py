"""A training loop with all that belongs to one is the same under static mode: to the bit, what it saves included."""

import itertools
from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor import DTensor
from vescale_dtensor.testing import run_ranks, slice_of, warm_up
from vescale_plans import Plan, Precision, library

warm_up("torch._dynamo", "vescale", "transformers")

POSITIONS, STEPS, SAVED, BATCH, VOCABULARY, MESH = 16, 6, 3, 8, 64, {"dp": 2, "tp": 2}


def build(name):
    torch.manual_seed(0)
    if name == "mixtral":
        from mixtral.model import build

        return build(vocab_size=VOCABULARY, attention_dropout=0.1)
    from llama.model import build

    return build(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2)


def llama(**more):
    return library.llama(mesh=MESH).override(**more)


EXPERTS = {"mesh": {"dp": 2, "ep": 2}, "parameters": {"*": {}}, "data_axis": ("dp", "ep"), "expert_axis": "ep"}
BLOCK = "model.layers.?"
adamw = partial(torch.optim.AdamW, lr=1e-3)
CASES = {  # model, plan, optimizer, what runs static
    "fused": ("llama", llama(zero=1), partial(adamw, fused=True), "model.layers.0"),
    "two precisions": ("llama", llama(zero=2, precision=Precision()), adamw, "model.layers.0.mlp"),
    "gathered in part": ("llama", llama(zero=3, checkpointing={BLOCK: True}), adamw, "model.layers.0"),
    "gathered again": ("llama", llama(zero=3, regather={BLOCK: True}), adamw, "model.layers.0"),
    "offload": ("llama", llama(zero=1, offload=True), adamw, "model.layers.0"),
    "experts": ("mixtral", Plan(**EXPERTS), adamw, "model.layers.0.input_layernorm"),
    "experts, zero 3": ("mixtral", Plan(**EXPERTS, zero=3), adamw, "model.layers.0.input_layernorm"),
}


def start(case, mode):
    name, plan, optimizer_fn, _ = CASES[case]
    model, optimizer = vescale.parallelize(plan, build(name), optimizer_fn, mode=mode)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"plan": plan, "model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def train(state, steps):
    """Accumulates, clips, skips an overflow, evaluates; what is seen of it on the way, and what is communicated."""
    model, optimizer = state["model"], state["optimizer"]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    data = torch.randint(VOCABULARY, (STEPS, 2, 2, BATCH, POSITIONS), generator=torch.Generator().manual_seed(5))
    seen, events = [], []
    torch.manual_seed(state["step"])
    for halves in data[state["step"] : state["step"] + steps]:
        with vescale.comm_trace(model) as trace:
            with vescale.no_sync(model):
                scaler.scale(model(input_ids=halves[0][0], labels=halves[0][1]).loss).backward()
            loss = model(input_ids=halves[1][0], labels=halves[1][1]).loss
            scaler.scale(loss).backward()
        if state["step"] == 1:
            first = next(p for p in model.parameters() if p.grad is not None)
            first.grad.mul_(float("inf"))
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state["scheduler"].step()
        state["step"] += 1
        with torch.no_grad():
            other = model.eval()(input_ids=halves[0][0], labels=halves[0][1]).loss
        model.train()
        seen += [repr(loss.item()), repr(float(norm)), repr(other.item()), scaler.get_scale()]  # a NaN is as another
        events.append([(e.kind, e.axes, e.received, e.cause.direction) for e in trace.events])
    return seen, events


def local(tensor):
    return tensor.detach().to_local().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def compared(case, way, path):
    states = {mode: start(case, mode) for mode in ("eager", way)}
    first = {mode: train(state, SAVED) for mode, state in states.items()}
    for mode, state in states.items():
        vescale.save(f"{path}/{mode}", state)
    rest = {mode: train(state, STEPS - SAVED) for mode, state in states.items()}
    resumed = {}
    for mode, other in (("eager", way), (way, "eager")):  # what one has saved the other goes on from
        state = start(case, mode)
        vescale.load(f"{path}/{other}", state)
        resumed[mode] = train(state, STEPS - SAVED)[0]
    one, two = ({n: local(p) for n, p in states[mode]["model"].state_dict().items()} for mode in states)
    return {
        "as eager": (first["eager"][0] + rest["eager"][0]) == (first[way][0] + rest[way][0]),
        "communicates as eager": rest["eager"][1] == rest[way][1] and any(rest["eager"][1]),
        "resumed": resumed["eager"] == resumed[way] == rest["eager"][0],
        "names": list(one) == list(two) == list(build(CASES[case][0]).state_dict()),
        "differ": [name for name in one if not torch.equal(one[name], two[name])],
    }, vescale.explain_static(states[way]["model"]).calls[CASES[case][3]][0]


@pytest.mark.parametrize("case, way", slice_of(itertools.product(CASES, ("static", "auto")), 7))
def test_a_whole_loop_under_static_mode(case, way, tmp_path):
    for found, verdict in run_ranks(4, compared, case, way, str(tmp_path), timeout=300):
        assert found == {
            "as eager": True, "communicates as eager": True, "resumed": True, "names": True, "differ": [],
        }  # fmt: skip
        assert verdict.startswith("static")

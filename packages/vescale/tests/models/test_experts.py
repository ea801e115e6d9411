"""Expert parallelism of unmodified HuggingFace models against one device: training, skew, and what is moved."""

from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor import InterleavedShard, Replicate, Shard
from vescale_dtensor.engine import watched
from vescale_plans import Boundary, Plan, expert_load
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

VOCABULARY, HIDDEN, LAYERS, EXPERTS, CHOSEN = 64, 32, 2, 8, 2
BATCH, POSITIONS, STEPS = 8, 12, 10
LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts_per_tok": CHOSEN, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
MODELS = {
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": EXPERTS, "router_jitter_noise": 0.1, "attention_dropout": 0.1, **LOSSES},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"num_experts": EXPERTS, "head_dim": 8, "norm_topk_prob": True, **LOSSES}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": EXPERTS, **LOSSES}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
         "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
         "num_key_value_heads": 4},
    ),
}  # fmt: skip

# Tensor parallelism inside the experts: gate and up are one weight [experts, 2 * inner, hidden].
INNER = {"*.experts.gate_up_proj": {"tp": InterleavedShard(1, 2)}, "*.experts.down_proj": {"tp": Shard(2)}, "*": {}}
WHOLE = {"*.mlp": Boundary(output={"tp": Replicate()})}
PLANS = {
    "ep4": partial(Plan, {"ep": 4}, {"*": {}}, data_axis="ep", expert_axis="ep"),
    "ep4, the batch whole": partial(Plan, {"ep": 4}, {"*": {}}, data_axis=None, expert_axis="ep"),
    "ep2 tp2": partial(Plan, {"ep": 2, "tp": 2}, INNER, WHOLE, data_axis="ep", expert_axis="ep"),
    "dp2 ep2": partial(Plan, {"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep"),
    "dp2 ep2, zero 1": partial(Plan, {"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep", zero=1),
    "dp2 ep2, zero 3": partial(Plan, {"dp": 2, "ep": 2}, {"*": {}}, data_axis=("dp", "ep"), expert_axis="ep", zero=3),
    "ep2 dp2, zero 3": partial(Plan, {"ep": 2, "dp": 2}, {"*": {}}, data_axis=("ep", "dp"), expert_axis="ep", zero=3),
}

EVERYWHERE = {  # every rank has all experts
    "dp4": partial(Plan, {"dp": 4}, {"*": {}}),
    "dp4, zero 3": partial(Plan, {"dp": 4}, {"*": {}}, zero=3),
    "dp2 dp2, zero 2": partial(Plan, {"out": 2, "in": 2}, {"*": {}}, data_axis=("out", "in"), zero=2),
    "dp2 tp2": partial(Plan, {"dp": 2, "tp": 2}, INNER, WHOLE),
    "dp2 tp2, zero 3": partial(Plan, {"dp": 2, "tp": 2}, INNER, WHOLE, zero=3),
    "dp2 cp2": partial(Plan, {"dp": 2, "cp": 2}, {"*": {}}, context_axis="cp"),
    "cp4, zero 3": partial(Plan, {"cp": 4}, {"*": {}}, data_axis=None, context_axis="cp", zero=3),
}


def build(name, implementation="eager", skewed=False):
    import transformers

    kind, extra = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**SIZES, **extra}, experts_implementation=implementation)).train()
    if skewed:  # every token finds all experts equally good: top-k breaks the tie, for all tokens alike
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                torch.nn.init.zeros_(module.weight)
    return model


def batches(batch, positions, steps):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (batch, positions), generator=generator) for _ in range(steps)]


def train(model, optimizer, data):
    losses = []
    torch.manual_seed(11)
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(name, plan, batch=BATCH, positions=POSITIONS, steps=STEPS, **how):
    """Relative errors of losses and of parameters. Runs on every rank."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    data = batches(batch, positions, steps)
    alone = build(name, **how)
    expected = train(alone, adamw(alone.parameters()), data)
    model, optimizer = vescale.parallelize(plan(), build(name, **how), adamw)
    losses = train(model, optimizer, data)
    whole = {key: value.detach().full_tensor() for key, value in model.named_parameters()}
    errors = {
        key: ((whole[key] - value).norm() / value.norm().clamp_min(1e-12)).item()
        for key, value in alone.named_parameters()
    }
    return [abs(a - b) / abs(b) for a, b in zip(losses, expected)], errors


def check(found):
    for losses, errors in found:
        assert max(losses) < LOSS, losses
        assert {key: error for key, error in errors.items() if error > PARAMETER} == {}


@in_turns(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_device(name, plan):
    check(run_ranks(4, compared, name, PLANS[plan]))


@in_turns(6)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("plan", EVERYWHERE)
@pytest.mark.parametrize("name", MODELS)
def test_experts_that_every_rank_has(name, plan, implementation):
    check(run_ranks(4, compared, name, EVERYWHERE[plan], implementation=implementation))


@pytest.mark.parametrize("batch", [3, 1], ids=["uneven", "two ranks without rows"])
def test_experts_that_every_rank_has_and_an_uneven_batch(batch):
    check(run_ranks(4, compared, "mixtral", EVERYWHERE["dp4"], batch=batch, implementation="grouped_mm", steps=3))


def rows_here(plan):
    """Who communicates for experts, and their load."""
    model, tokens = build("qwen3-moe", implementation="grouped_mm"), batches(BATCH, POSITIONS, 1)[0]
    model, _ = vescale.parallelize(plan(), model)
    with vescale.comm_trace(model) as trace:
        model(input_ids=tokens, labels=tokens).loss.backward()
    gathered = [event for event in trace.events if "experts" in event.cause.module]
    return len(gathered), expert_load(model)


@pytest.mark.parametrize("plan", ["dp4", "dp2 cp2", "cp4, zero 3"])
def test_each_rank_computes_the_rows_of_its_batch(plan):
    model, tokens = build("qwen3-moe", implementation="grouped_mm"), batches(BATCH, POSITIONS, 1)[0]
    batch = {"input_ids": tokens, "labels": tokens}
    alone = vescale.dry_run(Plan({"dp": 1}, {"*": {}}), model, batch).flops
    assert vescale.dry_run(EVERYWHERE[plan](), model, batch).flops / alone < 0.27  # a zigzag's first rank has fewer
    for gathered, load in run_ranks(4, rows_here, EVERYWHERE[plan]):
        assert not gathered
        assert [sum(each) for each in load.values()] == [BATCH * POSITIONS * CHOSEN] * LAYERS


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_grouped_matrix_products_of_the_model_run_on_local_experts(name):
    check(run_ranks(4, compared, name, PLANS["dp2 ep2"], implementation="grouped_mm"))


def load_when_skewed():
    model, _ = vescale.parallelize(PLANS["ep4"](), build("mixtral", skewed=True))
    model(input_ids=batches(BATCH, POSITIONS, 1)[0])
    return expert_load(model)


def test_load_is_counted_over_all_ranks():
    for loads in run_ranks(4, load_when_skewed):
        for load in loads.values():
            assert sorted(load) == [0] * (EXPERTS - CHOSEN) + [BATCH * POSITIONS] * CHOSEN


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_all_tokens_to_the_same_experts(implementation):
    """Three of four ranks compute no row, and take part in every exchange all the same."""
    check(run_ranks(4, compared, "mixtral", PLANS["ep4"], implementation=implementation, skewed=True))


def test_fewer_tokens_than_ranks():
    check(run_ranks(4, compared, "qwen3-moe", PLANS["ep4"], batch=1, positions=3))


def traced(plan):
    model, _ = vescale.parallelize(plan(), build("mixtral"))
    tokens = batches(BATCH, POSITIONS, 1)[0]
    with vescale.comm_trace(model) as trace:
        model(input_ids=tokens, labels=tokens).loss.backward()
    moved = {}
    for event in trace.events:
        if event.cause.function.startswith("expert"):
            count, received = moved.get((event.cause.function, event.cause.direction), (0, 0))
            assert event.kind == "all_to_all"
            moved[event.cause.function, event.cause.direction] = (count + event.count, received + event.received)
    elsewhere = [event for event in trace.events if "experts" in event.cause.module and event.kind != "all_to_all"]
    return moved, len(elsewhere), expert_load(model)


def test_two_exchanges_each_way_of_the_rows_and_no_more():
    found = run_ranks(4, traced, PLANS["ep4"])
    loads = found[0][2]
    assert all(load == loads for _, _, load in found) and len(loads) == LAYERS
    assert all(sum(load) == BATCH * POSITIONS * CHOSEN for load in loads.values())
    total = {}
    for moved, elsewhere, _ in found:
        assert elsewhere == 0
        assert {key: count for key, (count, _) in moved.items()} == {
            ("expert counts", "forward"): LAYERS,
            ("expert dispatch", "forward"): LAYERS,
            ("expert combine", "forward"): LAYERS,
            ("expert dispatch", "backward"): LAYERS,
            ("expert combine", "backward"): LAYERS,
        }
        for key, (_, received) in moved.items():
            total[key] = total.get(key, 0) + received
    rows = BATCH * POSITIONS * CHOSEN * LAYERS * HIDDEN * 4
    exchanged = {received for key, received in total.items() if key[0] != "expert counts"}
    assert len(exchanged) == 1 and exchanged.pop() < rows  # all of them, less those that stay on their rank
    assert total["expert counts", "forward"] == LAYERS * 4 * 3 * (EXPERTS // 4) * 8


def spread_and_saved(path):
    """Two steps on ep4, saved; loaded on ep2 tp2 and on dp2 ep2 ZeRO-3: the whole states there equal those saved."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    model, optimizer = vescale.parallelize(PLANS["ep4"](), build("mixtral"), adamw)
    train(model, optimizer, batches(BATCH, POSITIONS, 2))
    vescale.save(path, {"model": model, "optimizer": optimizer}, step=1)
    found = [whole_state(model, optimizer)]
    for plan in ("ep2 tp2", "dp2 ep2, zero 3"):
        torch.manual_seed(99)
        other, its_optimizer = vescale.parallelize(PLANS[plan](), build("mixtral"), adamw)
        vescale.load(path, {"model": other, "optimizer": its_optimizer})
        found.append(whole_state(other, its_optimizer))
    return [same(found[0], one) for one in found[1:]], len(found[0])


def whole_state(model, optimizer):
    whole = {name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")}
    for name, states in optimizer.sharded_state_dict()["state"].items():
        for key, value in states.items():
            whole[name, key] = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
    return whole


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def loaded(path, plan):
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    model, optimizer = vescale.parallelize(plan, build("mixtral"), adamw)
    vescale.load(path, {"model": model, "optimizer": optimizer})
    return whole_state(model, optimizer)


def test_checkpoints_load_under_any_spread_bitwise(tmp_path):
    for verdicts, count in run_ranks(4, spread_and_saved, str(tmp_path)):
        assert verdicts == [True, True] and count > 60
    spread = run_ranks(4, loaded, str(tmp_path), PLANS["ep4"]())[0]
    (alone,) = run_ranks(1, loaded, str(tmp_path), Plan({"dp": 1}, {"*": {}}))
    assert same(spread, alone)


def overlapped(name, plan, overlaps):
    """Two steps after those in which the block is watched: every gradient's and parameter's bits, and what happened
    in which order."""
    model, optimizer = vescale.parallelize(plan(), build(name), partial(torch.optim.AdamW, lr=1e-3))
    for border in model._vescale.experts if not overlaps else ():
        border.beside.run = lambda: None
    happened = []
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3MLP":
            module.register_forward_hook(lambda module, args, output: happened.append("shared"))

    def note(what, event):
        if event.cause.function == "expert dispatch" and event.cause.direction == "forward":
            happened.append(f"dispatch {what}")

    losses = train(model, optimizer, batches(BATCH, POSITIONS, 3))
    happened.clear()
    with watched(partial(note, "starts"), partial(note, "ends")):
        losses += train(model, optimizer, batches(BATCH, POSITIONS, 1))
    return losses, {key: value.detach().full_tensor() for key, value in model.named_parameters()}, happened


@pytest.mark.parametrize("plan", ["ep4", "dp2 ep2, zero 3"])
def test_the_shared_expert_runs_while_tokens_travel(plan):
    """And gives the same bits."""
    for ours, without in zip(*(run_ranks(4, overlapped, "deepseek-v3", PLANS[plan], one) for one in (True, False))):
        dense = ["shared"]  # the first layer has no experts
        assert ours[2] == [*dense, "dispatch starts", "shared", "dispatch ends"]
        assert without[2] == [*dense, "dispatch starts", "dispatch ends", "shared"]
        assert ours[0] == without[0]
        assert all(torch.equal(ours[1][key], value) for key, value in without[1].items())

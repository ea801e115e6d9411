"""Context parallelism on unmodified models: training against one device, and what is communicated."""

import contextlib
import itertools
from collections import Counter
from functools import partial

import pytest
import torch

import vescale
from vescale_dtensor import Replicate, Shard, comm_trace
from vescale_dtensor.engine import DescribedMask
from vescale_plans import Boundary, Pipeline, Plan, library
from vescale_testkit import in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

LOSS, PARAMETER, GRADIENT = 1e-5, 1e-4, 1e-6  # the gradient's before the first step
# One device's own gradient of a key's norm is 5e-7 from float64's: gradients of these are compared in float64.
ROUNDED = {"qwen3-moe"}
STEPS, VOCABULARY, BATCH, POSITIONS = 10, 61, 2, 24
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def tokens(step, positions=POSITIONS):
    return torch.randint(3, VOCABULARY, (BATCH, positions), generator=torch.Generator().manual_seed(step))


def causal(model, step):
    """Ignored labels, unevenly spread: most lie in the second half of the sequence."""
    labels = tokens(step)
    labels[0, POSITIONS // 2 + 1 :], labels[1, :5] = -100, -100
    return model(input_ids=tokens(step), labels=labels).loss


def padded(model, step):
    mask = torch.ones(BATCH, POSITIONS, dtype=torch.long)
    mask[1, 15:] = 0
    return model(input_ids=tokens(step), attention_mask=mask, labels=tokens(step)).loss


def counted(model, step):
    """The batch's number of labels is the caller's, as transformers' Trainer gives it."""
    return model(input_ids=tokens(step), labels=tokens(step), num_items_in_batch=BATCH * (POSITIONS - 1)).loss


def packed(model, step):
    """Two documents in a row, told by positions that begin anew; their border lies within a rank's part."""
    places = torch.cat([torch.arange(9), torch.arange(POSITIONS - 9)]).expand(BATCH, -1)
    return model(input_ids=tokens(step), position_ids=places, labels=tokens(step), use_cache=False).loss


def masked(model, step):
    mask = torch.ones(BATCH, POSITIONS, dtype=torch.long)
    mask[0, 17:] = 0
    return model(input_ids=tokens(step), attention_mask=mask, labels=tokens(step + 100)).loss


def translated(model, step):
    return model(input_ids=tokens(step), labels=tokens(step, 9)).loss


def heard(model, step):
    features = torch.randn(BATCH, 16, 40, generator=torch.Generator().manual_seed(step))
    return model(input_features=features, labels=tokens(step, 7)).loss


# class, its config, the loss
MODELS = {
    "llama": ("LlamaForCausalLM", DECODER, causal),
    "llama, padding": ("LlamaForCausalLM", DECODER, padded),
    "llama, documents": ("LlamaForCausalLM", DECODER, packed),
    "llama, eager": ("LlamaForCausalLM", DECODER | {"attn_implementation": "eager"}, padded),
    "llama, attention dropout": ("LlamaForCausalLM", DECODER | {"attention_dropout": 0.1}, causal),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 6}, causal),
    "gemma 3": (
        "Gemma3ForCausalLM",
        DECODER | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        causal,
    ),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        DECODER | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        padded,
    ),
    "gpt-neox, dropout": ("GPTNeoXForCausalLM", DECODER | {"hidden_dropout": 0.1, "attention_dropout": 0.1}, causal),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        DECODER | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        counted,
    ),
    "bert": ("BertForMaskedLM", DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, masked),
    "bert, dropout": ("BertForMaskedLM", DECODER | DROPOUT, masked),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
        translated,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 16, "dropout": 0.0,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        heard,
    ),
}  # fmt: skip

REPLICATED = {"parameters": {"*": {}}, "context_axis": "cp"}
CUTS = {  # where the second of two stages begins
    "gpt-neox": "gpt_neox.layers.1", "gpt-neox, dropout": "gpt_neox.layers.1",
    "bert": "bert.encoder.layer.1", "bert, dropout": "bert.encoder.layer.1",
    "t5": "decoder", "whisper": "model.decoder",
}  # fmt: skip
LOSSES = {  # of a pipeline whose forward does not tell: microbatches call other functions, or sort rows by experts
    "llama, padding": "mean", "llama, eager": "mean", "gpt-neox": "mean", "qwen3-moe": "sum",
}  # fmt: skip


def of_stages(name):
    cuts = (CUTS.get(name, "model.layers.1"),)
    pipeline = Pipeline(axis="pp", cuts=cuts, microbatches=2, schedule="1f1b", loss=LOSSES.get(name))
    return Plan(mesh={"pp": 2, "cp": 2}, pipeline=pipeline, **REPLICATED)


COLUMNS, ROWS, WHOLE, STREAM = ({"tp": placement} for placement in (Shard(0), Shard(1), Replicate(), Shard(1)))
MEETING = Boundary(input=WHOLE, output=STREAM, arguments={"key_value_states": WHOLE})
BY_HAND = {  # encoders and decoders: the planner knows tensor parallelism of them, but not by positions
    "t5": {
        "parameters": {
            **{f"*.{name}.weight": COLUMNS for name in ("q", "k", "v", "wi")},
            **{f"*.{name}.weight": ROWS for name in ("o", "wo")}, "*": {},
        },
        "boundaries": {
            "*.embed_tokens": Boundary(output=STREAM), "*.SelfAttention": MEETING, "*.EncDecAttention": MEETING,
            "*.DenseReluDense": Boundary(input=WHOLE, output=STREAM),
        },
    },
    "whisper": {
        "parameters": {
            **{f"*.{name}.*": COLUMNS for name in ("q_proj", "k_proj", "v_proj", "fc1")},
            **{f"*.{name}.weight": ROWS for name in ("out_proj", "fc2")}, "*": {},
        },
        "boundaries": {
            "*.layers.0": Boundary(input=STREAM), "*.self_attn": MEETING, "*.encoder_attn": MEETING,
            "*.fc1": Boundary(input=WHOLE), "*.fc2": Boundary(output=STREAM),
        },
    },
}  # fmt: skip


def of_tensors(name):
    if name not in _of_tensors:  # a cached function would travel to ranks by its module's name
        _of_tensors[name] = _planned(name)
    return _of_tensors[name]


_of_tensors = {}


def _planned(name):
    """With sequence parallelism: Megatron's plan of a Llama, of encoders with decoders by hand, else the planner's."""
    mesh = {"cp": 2, "tp": 2}
    if name.startswith("llama"):
        return library.llama(mesh).override(context_axis="cp")
    if name in BY_HAND:
        return Plan(mesh=mesh, context_axis="cp", **BY_HAND[name])
    model, loss_of = build(name)
    batch = {}
    with contextlib.suppress(_Called):
        loss_of(partial(_call, batch), 0)
    pin = {"pp": 1, "dp": 1, "tp": 2, "sp": True}
    plan = vescale.generate_plan(model, world_size=2, batch=BATCH, hardware="h100", sample=batch, pin=pin)
    return plan.override(mesh=mesh, context_axis="cp")


class _Called(Exception):
    pass


def _call(batch, **given):
    batch.update(given)
    raise _Called


def _alone(zero, name):
    """ZeRO over the context axis."""
    return Plan(mesh={"cp": 2}, zero=zero, **REPLICATED)


def _generated(name):
    """The planner's, where it is told to cut sequences."""
    pin = {"cp": 2, "tp": 2, "sp": True, "zero": 1}
    model, loss_of = build(name)
    batch = {}
    with contextlib.suppress(_Called):
        loss_of(partial(_call, batch), 0)
    asked = {"world_size": 4, "batch": BATCH, "seq": POSITIONS, "hardware": "h100", "sample": batch, "pin": pin}
    return vescale.generate_plan(model, **asked, forbid=[{"microbatches": 2}, {"checkpointing": True}])


PLANS = {
    "cp 2": lambda name: Plan(mesh={"cp": 2}, **REPLICATED),
    "cp 4": lambda name: Plan(mesh={"cp": 4}, **REPLICATED),
    "cp 2 x tp 2 + sp": of_tensors,
    "dp 2 x cp 2, zero 3": lambda name: Plan(mesh={"dp": 2, "cp": 2}, zero=3, **REPLICATED),
    "pp 2 x cp 2": of_stages,
    **{f"cp 2, zero {zero}": partial(_alone, zero) for zero in (1, 2, 3)},
    "cp 2 x tp 2, generated": _generated,
    "cp 2, recomputed": lambda name: Plan(mesh={"cp": 2}, checkpointing={"model.layers.*": True}, **REPLICATED),
}


# Of a third of it, the keys', the gradient is zero but for rounding, which Adam turns into steps.
PARTLY_NOTHING = "query_key_value.bias"


def build(name):
    import transformers

    kind, sizes, loss_of = MODELS[name]
    kind = getattr(transformers, kind)
    config = kind.config_class(**{k: v for k, v in sizes.items() if k != "attn_implementation"})
    config._attn_implementation = sizes.get("attn_implementation", "sdpa")
    torch.manual_seed(0)
    return kind(config).train(), loss_of


def accumulated(model, loss_of, step):
    """The loss of a batch that is computed row by row, as a pipeline's microbatches are, and its backward."""
    total, weights = 0.0, valid_of(model, loss_of, step)
    for row, weight in enumerate(weights):
        loss = loss_of(partial(_of_row, model, row), step)
        (loss * (weight / sum(weights))).backward()
        total += loss.item() * weight / sum(weights)
    return total


def valid_of(model, loss_of, step):
    """Per row of the batch, the labels that count."""
    batch = {}
    with contextlib.suppress(_Called):
        loss_of(partial(_call, batch), step)
    labels = batch["labels"]
    shifted = labels[:, 1:] if "Causal" in type(model).__name__ else labels
    return [int(row.ne(-100).sum()) for row in shifted]


def _of_row(model, row, **given):
    return model(**{k: v[row : row + 1] if isinstance(v, torch.Tensor) else v for k, v in given.items()})


def train(name, plan=None, steps=STEPS, by_rows=False, dtype=torch.float32):
    """Losses, the first step's gradients and the last parameters, whole, of this stage, and the last step's
    collectives."""
    model, loss_of = build(name)
    if dtype is torch.float64:
        model.double().set_experts_implementation("eager")  # grouped products have no float64
    optimizer_fn = partial(torch.optim.AdamW, lr=1e-3)
    optimizer = optimizer_fn(model.parameters()) if plan is None else None
    if plan is not None:
        model, optimizer = vescale.parallelize(plan, model, optimizer_fn)
    whole = (lambda tensor: tensor.full_tensor()) if plan is not None else (lambda tensor: tensor.clone())
    losses, gradients = [], {}
    torch.manual_seed(1)
    for step in range(steps):
        if by_rows:
            losses.append(accumulated(model, loss_of, step))
        else:
            with comm_trace() as trace:
                loss = loss_of(model, step)
                loss.backward()
            losses.append(loss.item())
        if step == 0:
            gradients = {n: whole(p.grad).cpu() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: whole(p.detach()).cpu() for n, p in model.named_parameters() if p.numel()}
    return losses, gradients, parameters, [] if by_rows else trace.events


def check(name, plan, way, steps=STEPS):
    """Raises where a plan's training is not one device's; kinds of collectives, and the names held here."""
    one = train(name, steps=steps, by_rows=plan.startswith("pp") and "dropout" in name)
    plan = PLANS[plan](name).override(context=way)
    many = train(name, plan, steps)
    gradients = [one[1], many[1]]
    if name in ROUNDED and plan.pipeline is None:  # no stage knows what experts in a loop read
        gradients = [train(name, given, 1, dtype=torch.float64)[1] for given in (None, plan)]
    for step, (expected, found) in enumerate(zip(one[0], many[0], strict=True)):
        assert abs(found - expected) <= LOSS * abs(expected), (step, expected, found)
    largest = max(float(gradient.norm()) for gradient in gradients[0].values())
    nothing = set()  # gradients that are zero but for rounding: of a key's bias before softmax
    for parameter, expected in gradients[0].items():
        norm = float(expected.norm())
        if norm < 1e-6 * largest:
            nothing.add(parameter)
            continue
        if parameter in many[2]:
            error = float((gradients[1][parameter] - expected).norm()) / norm
            assert error <= GRADIENT, (parameter, error)
    assert all("key" in parameter or "k_proj" in parameter for parameter in nothing), nothing
    for parameter, expected in one[2].items():
        if parameter not in nothing and not parameter.endswith(PARTLY_NOTHING) and parameter in many[2]:
            error = float((many[2][parameter] - expected).norm() / max(float(expected.norm()), 1e-30))
            assert error <= PARAMETER, (parameter, error)
    return Counter(event.kind for event in many[3]), set(many[2]), set(one[2])


WAYS = ("ring", "all-to-all", "gather")
MESHES = ("cp 2", "cp 4", "cp 2 x tp 2 + sp", "dp 2 x cp 2, zero 3", "pp 2 x cp 2")
CASES = [*itertools.product(MODELS, MESHES, WAYS), *(("llama", "cp 2, recomputed", way) for way in WAYS)]
CASES += [("llama", "cp 2 x tp 2, generated", "ring")]
CASES += [("llama", f"cp 2, zero {zero}", "ring") for zero in (1, 2, 3)] + [("mistral", "cp 2, zero 3", "gather")]


@pytest.mark.parametrize(("name", "plan", "way"), slice_of(CASES, 26))
def test_models(name, plan, way):
    """All of them with VESCALE_GRID=full."""
    ranks = PLANS[plan](name).world_size
    answers = run_ranks(ranks, check, name, plan, way, timeout=240)
    for kinds, _, _ in answers:
        if not plan.startswith("pp") and name == "llama":
            assert ("ring" in kinds) == (way == "ring") and ("heads_to_sequence" in kinds) == (way == "all-to-all")
    assert set().union(*(held for _, held, _ in answers)) == answers[0][2]  # every parameter was compared


def check_described(name, plan):
    """How often a mask's description was enough, and how often a rank made its rows."""
    count = Counter()
    kept = {one: getattr(DescribedMask, one) for one in ("made", "_attended")}

    def counted(one):
        def call(*args, **kwargs):
            count[one] += 1
            return kept[one](*args, **kwargs)

        return call

    try:
        DescribedMask.made, DescribedMask._attended = counted("made"), staticmethod(counted("_attended"))
        check(name, plan, "ring", steps=2)
    finally:
        DescribedMask.made, DescribedMask._attended = kept["made"], staticmethod(kept["_attended"])
    return count["_attended"], count["made"]


@pytest.mark.parametrize("name", ["llama, padding", "llama, documents", "mistral", "gemma 3", "gpt-neox", "bert"])
def test_no_rank_makes_its_rows_of_a_mask(name):
    for described, made in run_ranks(2, check_described, name, "cp 2"):
        assert described in (2, 4) and not made, (described, made)


@in_turns(3)
def test_on_a_device_with_nccls_manners():
    """No tags, both directions at once, messages in the order of posting, results only after their wait."""
    run_ranks(2, check, "llama, padding", "cp 2", "ring", 4, device="second")


def test_a_dry_run_counts_a_ring():
    model, _ = build("llama")
    plan = PLANS["cp 2"]("llama").override(context="ring")
    found = str(vescale.dry_run(plan, model, {"input_ids": tokens(0), "labels": tokens(0)}))
    assert "ring_gradient" in found


def test_a_dry_run_of_each_rank():
    """What it counts of rings is what a rank of a real world receives, contiguous and dealt out."""

    def received(events):
        return sum(event.received for event in events if event.kind.startswith("ring"))

    def real(plan):
        return received(train("llama", plan, steps=2)[3])

    for layout in ("contiguous", "zigzag"):
        plan = PLANS["cp 2"]("llama").override(context="ring", context_layout=layout)
        batch = {"input_ids": tokens(0), "labels": tokens(0)}
        found = [received(vescale.dry_run(plan, build("llama")[0], batch, rank=rank).collectives) for rank in (0, 1)]
        assert found == run_ranks(2, real, plan) and all(found), layout
    with pytest.raises(vescale.PlanError, match="rank 2 of a plan for 2"):
        vescale.dry_run(plan, build("llama")[0], batch, rank=2)

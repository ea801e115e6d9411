"""HuggingFace's `attn_implementation`: eager, sdpa and flex_attention train on TP 2 and DP 2 x TP 2 as on one device.

torch refuses flex_attention's gradients on a CPU, where its formula has them, and has no compiled kernel with them:
that check is taken away, and what transformers compiles is compiled by the backend "eager", here and on one device.
"""

import copy
from dataclasses import replace

import pytest
import torch

import vescale
from vescale_dtensor import comm_trace
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "torch.nn.attention.flex_attention", "vescale", "transformers.models.llama.modeling_llama")

VOCABULARY, BATCH, POSITIONS, STEPS = 61, 4, 24, 3
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {"grouped queries": ("Llama", {}), "sliding window": ("Mistral", {"sliding_window": 6})}
PLANS = {
    "tp 2": ({"tp": 2}, {}),
    "dp 2 x tp 2, zero 3": ({"dp": 2, "tp": 2}, {"zero": 3}),
}
BESIDE = {
    "a context axis": ({"cp": 2, "tp": 2}, {"context_axis": "cp"}),
    "a pipeline": ({"pp": 2, "tp": 2}, {"pipeline": vescale.Pipeline("pp", ("model.layers.1",), microbatches=2)}),
}


def trains_on_cpus():
    from torch.nn.attention import flex_attention as torchs
    from transformers import masking_utils
    from transformers.integrations.flex_attention import WrappedFlexAttention

    torchs._validate_device = lambda *operands: None
    compiled = torch.compile(torchs.flex_attention, backend="eager")
    WrappedFlexAttention.__init__ = lambda self, training: None
    WrappedFlexAttention.__call__ = lambda self: compiled
    made = torchs.create_block_mask
    masking_utils.create_block_mask = lambda *args, _compile, **kwargs: made(*args, **kwargs)


def built(implementation, name):
    import transformers

    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **more, attn_implementation=implementation)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batches(padded):
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (BATCH, POSITIONS), generator=generator)
        if not padded:
            yield {"input_ids": ids, "labels": ids}
            continue
        mask = torch.ones_like(ids)
        mask[1, 15:], mask[2, :5], mask[3, 9:] = 0, 0, 0  # on either rank of dp, on both sides
        yield {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model, optimizer, padded):
    losses = []
    for batch in batches(padded):
        with comm_trace() as trace:
            loss = model(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in model.named_parameters()}
    return losses, whole, trace


def compared(implementation, name, plan, padded):
    """The worst relative error of a loss and of a parameter, and who communicated in the last step."""
    trains_on_cpus()
    model = built(implementation, name)
    mesh, fields = (PLANS | BESIDE)[plan]
    plan = vescale.Plan.from_huggingface(model, mesh={name: mesh[name] for name in mesh if name in ("dp", "tp")})
    plan = replace(plan, mesh=mesh, **fields)
    step = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    parallel, optimizer = vescale.parallelize(plan, copy.deepcopy(model), step)
    found, weights, trace = trained(parallel, optimizer, padded)
    wanted, others, _ = trained(model, step(model.parameters()), padded)
    loss = max(abs(a - b) / abs(b) for a, b in zip(found, wanted))
    assert weights.keys() <= others.keys()  # a stage has its own
    apart = max(((weight - others[n]).norm() / others[n].norm()).item() for n, weight in weights.items())
    return loss, apart, sorted({event.cause.function for event in trace.events})


IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")
CASES = [
    (implementation, name, plan, padded)
    for implementation in IMPLEMENTATIONS
    for name in MODELS
    for plan in PLANS
    for padded in (False, True)
]


@in_turns(4)
@pytest.mark.parametrize(("implementation", "name", "plan", "padded"), CASES)
def test_trains_as_on_one_device(implementation, name, plan, padded):
    ranks = 2 if plan == "tp 2" else 4
    for loss, weights, functions in run_ranks(ranks, compared, implementation, name, plan, padded, timeout=300):
        assert loss <= 1e-5 and weights <= 1e-4
        assert not {"flex_attention", "scaled_dot_product_attention"} & set(functions)  # heads stay


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("beside", BESIDE)
def test_flex_attention_beside(beside, padded):
    given = ("flex_attention", "grouped queries", beside, padded)
    for loss, weights, _ in run_ranks(4, compared, *given, timeout=400):
        assert loss <= 1e-5 and weights <= 1e-4


def split(implementation, name, sample):
    from vescale_plans.search import sample_of, structure_of

    model = built(implementation, name)
    found = structure_of(model, sample_of(model, sample))
    return [(group.sink, group.sources, group.degrees) for group in found.groups]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_is_planned_as_sdpa_is(name, padded):
    sample = {key: value[:1] for key, value in next(batches(padded)).items() if key != "labels"}
    flexible, alike = (split(implementation, name, sample) for implementation in ("flex_attention", "sdpa"))
    assert flexible == alike and any("o_proj" in sink for sink, *_ in flexible)


def test_a_dry_run_sends_and_keeps_what_sdpas_does():
    def run(implementation):
        model = built(implementation, "grouped queries")
        plan = vescale.Plan.from_huggingface(model, mesh={"dp": 2, "tp": 2}, zero=3)
        found = vescale.dry_run(plan, model, next(batches(padded=False)))
        return [(event.kind, event.axes, event.received) for event in found.collectives], found.flops, found.peak

    (sent, flops, peak), (wanted, others, most) = run("flex_attention"), run("sdpa")
    assert sent == wanted and flops == others and abs(peak - most) <= 0.02 * most

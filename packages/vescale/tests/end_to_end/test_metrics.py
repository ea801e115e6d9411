"""What `vescale.metrics` tells of a training: one device's loss, gradient norm and tokens, under every kind of plan."""

import json

import pytest
import torch
import torch.distributed as dist

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "transformers.models.llama.modeling_llama")

CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PLANS = {
    "dp": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, data_axis="dp"),
    "zero 3": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, data_axis="dp", zero=3),
    "tp": lambda: library.llama({"tp": 2}, sequence_parallel=True),
    "pp": lambda: vescale.Plan(
        mesh={"pp": 2},
        parameters={"*": {}},
        pipeline=vescale.Pipeline(axis="pp", cuts=("model.layers.1",), schedule="1f1b", microbatches=2),
    ),
}
STEPS, EVERY, PEAK = 4, 2, 1e12


def _watched(plan, folder):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, tie_word_embeddings=False))
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    optimizer = adamw(model.parameters())
    if plan is not None:
        model, optimizer = vescale.parallelize(PLANS[plan](), model, optimizer)
    told, called = [], []
    lines = vescale.JSONLines(f"{folder}/{plan}/run.jsonl")
    with vescale.metrics(
        model, optimizer, writers=[lines, vescale.Values(lambda v, s: called.append((s, v)))], every=EVERY,
        peak_flops=PEAK,
    ) as meter:  # fmt: skip
        for step in range(STEPS):
            tokens = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found = meter.step(loss)
            assert (found is None) == ((step + 1) % EVERY != 0)
            told += [found] if found is not None else []
    return told, called


# All parameters but the embedding's: 61 rows less of 32.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
FLOPS = 6 * (2 * LAYER + 32 + 61 * 32)


def _against_one_device(plan, folder):
    (found, called), (wanted, _) = _watched(plan, folder), _watched(None, f"{folder}/{dist.get_rank()}")
    for one, other in zip(found, wanted, strict=True):
        assert (one.step, one.tokens) == (other.step, other.tokens) and one.tokens == EVERY * 4 * 8
        assert abs(one.loss - other.loss) <= 1e-5 * other.loss
        assert abs(one.gradient_norm - other.gradient_norm) <= 1e-4 * other.gradient_norm
        assert 0 <= one.communication <= 1 and one.memory > 0
        for each, devices in ((one, 2), (other, 2)):  # a script outside of torchrun has one
            assert each.mfu == pytest.approx(each.tokens_per_second * FLOPS / (PEAK * devices))
        assert f"step {one.step}  loss {one.loss:.4f}" in str(one)
    if dist.get_rank():
        assert not called
    else:
        assert [step for step, _ in called] == [2, 4] and called[0][1]["loss"] == found[0].loss
        with open(f"{folder}/{plan}/run.jsonl") as file:
            assert [json.loads(line) for line in file] == [one.as_dict() for one in found]
    return found[-1].communication


@pytest.mark.parametrize("plan", PLANS)
def test_one_devices_numbers(plan, tmp_path):
    assert max(run_ranks(2, _against_one_device, plan, str(tmp_path), timeout=120)) > 0 or plan == "pp"


def test_a_line_for_a_terminal():
    import io

    from rich.console import Console

    model = torch.nn.Linear(4, 4)
    console = Console(file=io.StringIO(), width=200)
    with vescale.metrics(model, writers=[vescale.ProgressLine(console)]) as meter:
        model(torch.ones(3, 4))
        meter.step(1.5)
    assert "step 1  loss 1.5000" in console.file.getvalue() and "tokens/s" in console.file.getvalue()


def test_no_steps_is_no_number():
    with pytest.raises(vescale.VescaleError, match="every=0"), vescale.metrics(torch.nn.Linear(1, 1), every=0):
        pass

"""What a step holds on to, counted from one step without values, against dry runs of whole plans."""

import pytest
import torch

from vescale_plans import Precision, dry_run
from vescale_plans.search import Candidate, hardware_of, memory_of, plan_of, sample_of, sizes_of, structure_of

ROWS, POSITIONS = 4, 64
MARGIN = 0.10
PLANS = {
    "one device": {},
    "accumulated": {"microbatches": 2},
    "recomputed": {"checkpointing": True},
    "data": {"dp": 2},
    "tensor": {"tp": 2},
    "a split loss": {"tp": 4, "checkpointing": True},
    "summed shards": {"dp": 2, "zero": 2, "microbatches": 2, "checkpointing": True},
}


def built(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **more))
    ids = torch.randint(512, (ROWS, POSITIONS))
    return model, {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def llama():
    model, batch = built()
    return model, batch, structure_of(model, sample_of(model, batch))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def off(llama, candidate, narrow=False, rows=ROWS):
    model, batch, structure = llama
    plan = plan_of(structure, candidate).override(precision=Precision(torch.bfloat16) if narrow else None)
    hardware = hardware_of("cpu").computing(2 if narrow else 4)
    closed = memory_of(sizes_of(structure, candidate.tp), candidate, hardware, rows, POSITIONS)
    return closed.total / dry_run(plan, model, batch, adamw, backend="gloo").peak - 1


@pytest.mark.parametrize("plan", PLANS)
def test_the_closed_form_is_near_the_dry_run(llama, plan):
    assert abs(off(llama, Candidate(**PLANS[plan]))) <= MARGIN


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("more", ({}, {"dp": 2, "zero": 3}), ids=["", "zero 3"])
def test_what_is_gathered_from_positions_for_a_split_product_is_kept_whole(llama, tp, more):
    positions, full = (off(llama, Candidate(tp=tp, sp=sp, **more)) for sp in (True, False))
    assert abs(positions - full) <= 0.02


@pytest.mark.parametrize("zero", (0, 1, 2))
def test_narrow_copies_are_whole_and_wide_ones_sharded(llama, zero):
    assert abs(off(llama, Candidate(dp=4, zero=zero), narrow=True)) <= MARGIN


@pytest.mark.parametrize("tp", (1, 4))
def test_a_forward_is_fullest_where_the_loss_is_small(tp):
    """At the sum over the tensor axis that ends the last block."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=8, use_cache=False))
    ids = torch.randint(128, (16, POSITIONS))
    batch = {"input_ids": ids, "labels": ids}
    found = model, batch, structure_of(model, sample_of(model, batch))
    assert abs(off(found, Candidate(tp=tp), rows=16)) <= MARGIN


def test_keys_that_heads_share_are_repeated_for_a_cpu_alone(llama):
    model, batch, structure = llama
    kept = sizes_of(structure, 1).held_back[4].kept
    more = kept.at(64, 64, 1) - kept.at(64, 64, 1, repeats=False)
    config = model.config
    each = 2 * config.hidden_size * 4 * (1 - config.num_key_value_heads / config.num_attention_heads)
    assert more == pytest.approx(64 * config.num_hidden_layers * each)
    cpu, gpu = (dry_run(plan_of(structure, Candidate()), model, batch, backend=name).peak for name in ("gloo", "nccl"))
    assert cpu - gpu >= ROWS * POSITIONS * config.num_hidden_layers * each


@pytest.mark.parametrize("degrees", ({}, {"tp": 2}))
def test_values_narrower_than_queries_have_a_kernel_on_a_gpu_alone(degrees):
    """Multi-head latent attention: a CPU keeps the scores of all heads, a GPU none."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
        "first_k_dense_replace": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model, ids = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)), torch.randint(128, (ROWS, 256))
    batch, candidate = {"input_ids": ids, "labels": ids}, Candidate(**degrees)
    structure = structure_of(model, sample_of(model, batch))
    counted, peaks = sizes_of(structure, candidate.tp), {}
    for backend, hardware in (("gloo", "cpu"), ("nccl", "h100")):
        closed = memory_of(counted, candidate, hardware_of(hardware).computing(4), ROWS, 256).total
        peaks[backend] = dry_run(plan_of(structure, candidate), model, batch, adamw, backend=backend).peak
        assert abs(closed / peaks[backend] - 1) <= MARGIN, (backend, closed, peaks)
    scores = ROWS * 8 * 256**2 * 4 * 3 / candidate.tp
    assert peaks["gloo"] - peaks["nccl"] >= 0.9 * scores


def mixtral(width, words):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=words, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model, ids = MixtralForCausalLM(config), torch.randint(words, (ROWS, POSITIONS))
    batch = {"input_ids": ids, "labels": ids}
    return model, batch, structure_of(model, sample_of(model, batch))


@pytest.mark.parametrize("sp", (False, True))
def test_rows_of_experts_are_whole_where_positions_are_split(sp):
    assert abs(off(mixtral(128, 128), Candidate(tp=4, sp=sp))) <= MARGIN


@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("degrees", ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}))
def test_experts_that_are_spread_are_neither_gathered_nor_summed(degrees, narrow):
    spread = mixtral(256, 1024)
    for zero in (2, 3):
        assert abs(off(spread, Candidate(**degrees, zero=zero), narrow)) <= MARGIN


def test_the_gradients_of_the_first_block_are_not_there_when_its_backward_begins():
    """Recomputed, its activations come then, which are most of what a step of few rows holds."""
    assert abs(off(mixtral(64, 1024), Candidate(tp=2, checkpointing=True))) <= 0.08


def test_a_model_that_did_not_run_without_values_is_priced_all_the_same():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x if x.sum().item() != 0 else -x

    model = Reads()
    structure = structure_of(model, sample_of(model, torch.ones(1, 4, 8)))
    assert not structure.holding
    assert memory_of(sizes_of(structure, 1), Candidate(), hardware_of("cpu"), 2, 4).total >= 16 * structure.parameters


def test_what_meets_every_position_grows_with_its_square():
    """Scores of attention in elementary steps; of a fused kernel there are none."""
    held = {}
    for way in ("eager", "sdpa"):
        model, _ = built(attn_implementation=way)
        kept = sizes_of(structure_of(model, sample_of(model)), 1).held_back[4].kept
        held[way] = kept.at(4096, 4096, 1) / kept.at(512, 512, 1)
    assert held["eager"] > 20
    assert held["sdpa"] == pytest.approx(8, rel=0.02)

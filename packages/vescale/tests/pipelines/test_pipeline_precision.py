"""Stages under a precision: code between stages (rotary tables, masks) sees the dtype that is computed in."""

import pytest
import torch

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

STEPS, ROWS, POSITIONS, VOCABULARY, MICROBATCHES = 3, 4, 10, 96, 2
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8))


def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**SIZES, **HEADS, head_dim=8, pad_token_id=0))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=4))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, **none)
    )


CUTS = {llama: "model.layers.2", qwen3: "model.layers.2", gemma: "model.layers.1", mixtral: "model.layers.3",
        gpt2: "transformer.h.2"}  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16)
WITHIN = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of gradients, relative: sums of microbatches round otherwise


def trained(build, dtype, cut, zero):
    """Losses, and the gradients of the first step, by name; of one device where there is no cut."""
    torch.manual_seed(0)
    staged = {"pipeline": vescale.Pipeline(cuts=[cut], microbatches=MICROBATCHES), "zero": zero} if cut else {}
    plan = vescale.Plan(
        mesh={"pp": 2, "dp": 2} if cut else {"dp": 1},
        parameters={"*": {}},
        precision=vescale.Precision(dtype),
        **staged,
    )
    model, optimizer = vescale.parallelize(plan, build(), lambda p: torch.optim.SGD(p, lr=0.1))
    losses, gradients = [], {}
    for step in range(STEPS):
        words = torch.randint(VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        if not step:
            own = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
            gradients = {name: p.grad.full_tensor().float() for name, p in own}
        assert all(p.dtype is torch.float32 for p in model.parameters())  # of all stages
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients


GRID = [(build, dtype, zero) for build in CUTS for dtype in DTYPES for zero in (1, 3)]


@pytest.mark.parametrize("build, dtype, zero", slice_of(GRID, fraction=10))
def test_stages_compute_in_the_dtype_of_one_device(build, dtype, zero):
    (wanted, whole), *_ = run_ranks(1, trained, build, dtype, None, 0)
    found = run_ranks(4, trained, build, dtype, CUTS[build], zero)
    for losses, _ in found:
        assert losses == pytest.approx(wanted, rel=WITHIN[dtype] / 4)
    parts = {name: gradient for _, gradients in found for name, gradient in gradients.items()}
    assert parts.keys() == whole.keys()
    off = {name: ((parts[name] - one).norm() / one.norm().clamp_min(1e-6)).item() for name, one in whole.items()}
    assert {name: error for name, error in off.items() if not error <= WITHIN[dtype]} == {}

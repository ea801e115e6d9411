"""Models of transformers as their configurations have them, which ask for a cache: none is filled while they train."""

import copy

import pytest
import torch

import vescale
from vescale_plans import PlanError
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
T5 = {"vocab_size": 61, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
MODELS = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER | {"head_dim": 8}),
    "Gemma2": ("Gemma2Config", "Gemma2ForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 4}),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", DECODER | {"num_local_experts": 4}),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
}
BLOCKS = {"GPT2": "transformer.h.0", "T5": "decoder.block.0"}


def made(name):
    import transformers

    config, kind, sizes = MODELS[name] if isinstance(name, str) else name
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    assert model.config.use_cache, "this is about what configurations say by default"
    return model.train()


def tokens(seed=1):
    return torch.randint(3, 61, (4, 8), generator=torch.Generator().manual_seed(seed))


def trained(model, optimizer, steps=3):
    losses = []
    for step in range(steps):
        out = model(input_ids=tokens(step), labels=tokens(step))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return losses


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def parallel(model, **mesh):
    plan = vescale.Plan(mesh=mesh or {"dp": 2}, parameters={"*": {}}, zero=2)
    return vescale.parallelize(plan, model, sgd)


@in_turns(3)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_device_that_fills_it(name):
    def run():
        alone = made(name)
        wanted = trained(alone, sgd(alone.parameters()))
        model, optimizer = parallel(made(name))
        found = trained(model, optimizer)
        off = max(
            float((mine.full_tensor() - theirs).norm() / theirs.norm().clamp(min=1e-6))
            for (_, mine), (_, theirs) in zip(model.named_parameters(), alone.named_parameters())
        )
        return max(abs(a / b - 1) for a, b in zip(found, wanted)), off

    for loss, parameter in run_ranks(2, run):
        assert loss < 1e-5 and parameter < 1e-4


def test_what_asks_the_cache_is_told_how_to_have_it():
    def run():
        model, _ = parallel(made("Llama"))
        out = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True)
        assert list(out.keys()) == ["loss", "logits", "past_key_values", "hidden_states"]  # as on one device
        assert out[0] is out.loss and copy.copy(out.past_key_values) is not None and repr(out.past_key_values)
        for ask in (len, list, lambda cache: cache[0], lambda cache: cache.get_seq_length(), bool):
            with pytest.raises(PlanError, match="use_cache=True in the call"):
                ask(out.past_key_values)
        with pytest.raises(PlanError, match="use_cache=True in the call"):
            model(input_ids=tokens(), past_key_values=out.past_key_values)

    run_ranks(2, run)


def test_it_is_filled_where_it_is_asked_for_or_nothing_trains():
    def run():
        model, _ = parallel(made("Llama"))
        filled = [
            model(input_ids=tokens(), use_cache=True).past_key_values,
            model(tokens(), None, None, None, None, None, True).past_key_values,  # by place
        ]
        with torch.no_grad():
            filled.append(model(input_ids=tokens()).past_key_values)
            again = model(input_ids=tokens()[:, :1], past_key_values=filled[-1])
        model.eval()
        filled.append(model(input_ids=tokens()).past_key_values)
        model.train()
        assert [cache.get_seq_length() for cache in filled] == [8, 8, 9, 8]
        assert again.past_key_values is filled[2]
        assert model(input_ids=tokens(), use_cache=False).past_key_values is None
        assert len(model(input_ids=tokens(), return_dict=False)) == 2  # logits, and the cache
        model.config.use_cache = False
        assert model(input_ids=tokens()).past_key_values is None

    run_ranks(2, run)


def test_a_copy_and_a_model_inside_of_another_leave_it_out_too():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = made("Llama")

        def forward(self, words):
            out = self.inner(input_ids=words, labels=words)
            return out.loss, out.past_key_values

    def run():
        model, _ = parallel(Outer())
        for one in (model, copy.deepcopy(model)):
            loss, cache = one(tokens())
            loss.backward()
            with pytest.raises(PlanError):
                len(cache)

    run_ranks(2, run)


ENCODER = SIZES | {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
}  # fmt: skip
LABELS = {"labels": tokens()}
OUTPUTS = {  # as its configuration has it, then what it is called with beside tokens, and what is done to it before
    "decoder": ("Llama", LABELS, None),
    "in a tuple by its configuration": ("T5", LABELS, lambda model: setattr(model.config, "return_dict", False)),
    "recomputes by itself": ("Llama", LABELS, lambda model: model.gradient_checkpointing_enable()),
    "encoder": (("BertConfig", "BertModel", ENCODER), {}, None),
    "labels beside a decoder": (("BertConfig", "BertLMHeadModel", ENCODER | {"is_decoder": True}), LABELS, None),
    "labels beside a translation": (("BartConfig", "BartForConditionalGeneration", BART), LABELS, None),
    "translation": (("BartConfig", "BartForConditionalGeneration", BART), {}, None),
    "states of another kind": (("MambaConfig", "MambaForCausalLM", SIZES | {"state_size": 4}), LABELS, None),
}


def outline(output):
    """What stands in it, and in which order."""
    found = output.items() if hasattr(output, "items") else enumerate(output)
    return [(key, tuple(value.shape) if torch.is_tensor(value) else "no tensor") for key, value in found]


def test_what_stands_in_an_output_is_what_one_device_has_there():
    def run():
        for case, (name, more, before) in OUTPUTS.items():
            alone, inner = made(name), made(name)
            if before is not None:
                before(alone), before(inner)
            model, _ = parallel(inner)
            found, wanted = (outline(one(input_ids=tokens(), **more)) for one in (model, alone))
            assert found == wanted, case

    run_ranks(2, run)


@in_turns(2)
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_positions_that_begin_again_count_as_on_one_device(name):
    """Without a mask: transformers takes them for several sequences in a row where there is no cache, only there."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(4, 8)

    def run():
        alone = made(name)
        model, _ = parallel(copy.deepcopy(alone))
        for more in ({}, {"use_cache": False}, {"attention_mask": torch.ones(4, 8, dtype=torch.long)}):
            losses = []
            for one in (alone, model, model):
                one.zero_grad()
                loss = one(input_ids=tokens(), labels=tokens(), position_ids=positions, **more).loss
                loss.backward()
                losses.append(loss.item())
            assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5), more
            for (_, mine), (_, theirs) in zip(model.named_parameters(), alone.named_parameters()):
                assert (mine.grad.full_tensor() - theirs.grad).norm() <= 1e-4 * theirs.grad.norm() + 1e-7, more
        cut = alone(input_ids=tokens(), labels=tokens(), position_ids=positions, use_cache=False).loss
        whole = alone(input_ids=tokens(), labels=tokens(), position_ids=positions).loss
        assert abs(cut / whole - 1) > 1e-5, "the case is one where it matters"

    run_ranks(2, run)

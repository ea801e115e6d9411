"""Wrong use of a plan with a context axis: typed errors, the same on all ranks, and remedies that work."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vescale
from vescale_dtensor import OperatorError, Replicate, ShapeError, VescaleError
from vescale_plans import Boundary, Plan
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

VOCABULARY, BATCH, POSITIONS, WIDTH = 61, 2, 24, 16
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
MAMBA = SMALL | {"state_size": 4, "conv_kernel": 4}
UNMODIFIED = {
    "MambaForCausalLM": MAMBA | {"expand": 2, "time_step_rank": 4},
    "FalconMambaForCausalLM": MAMBA | {"expand": 2, "time_step_rank": 4},
    "Mamba2ForCausalLM": MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "RwkvForCausalLM": SMALL | {"attention_hidden_size": 32, "intermediate_size": 64},
    "RecurrentGemmaForCausalLM": SMALL | HEADS | {
        "lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 8, "num_key_value_heads": 1
    },
    "Lfm2ForCausalLM": SMALL | HEADS | {"layer_types": ["conv", "full_attention"]},
    "Qwen3NextForCausalLM": SMALL | HEADS | {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


def tokens():
    return torch.randint(3, VOCABULARY, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(0))


def plan_of(**more):
    return Plan(mesh={"cp": 2}, parameters={"*": {}}, context_axis="cp", **more)


def unmodified(kind):
    import transformers

    kind = getattr(transformers, kind)
    config = kind.config_class(**UNMODIFIED[kind.__name__])
    torch.manual_seed(0)
    return kind(config)


def boundaries_of(error):
    """Of the first remedy that an error names."""
    text = error.remedies[0][0].removeprefix("Plan(..., boundaries=").removesuffix(")")
    return eval(text, {"Boundary": Boundary, "Replicate": Replicate})


def refused(kind, is_padded):
    """The text of the first refusal, and that the model trains as on one device once all remedies are in the plan."""
    mask = torch.ones_like(tokens())
    mask[0, -5:] = 0
    batch = {"input_ids": tokens(), "labels": tokens(), **({"attention_mask": mask} if is_padded else {})}
    alone = unmodified(kind)
    expected = alone(**batch).loss
    expected.backward()
    texts, boundaries = [], {}
    while len(texts) < 4:
        model, _ = vescale.parallelize(plan_of(boundaries=boundaries), unmodified(kind))
        try:
            loss = model(**batch).loss
            break
        except OperatorError as error:
            texts.append(str(error))
            found = boundaries_of(error)
            assert not found.keys() & boundaries.keys(), error
            boundaries |= found
    loss.backward()
    assert abs(loss.item() - expected.item()) <= 1e-5 * expected.item()
    for (name, one), parameter in zip(alone.named_parameters(), model.parameters()):
        if one.grad is not None:
            least = 1e-4 * float(one.grad.abs().max()) + 1e-7
            torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, rtol=1e-3, atol=least, msg=name)
    return texts[0]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", UNMODIFIED)
def test_unmodified_models(kind, is_padded):
    (text, other) = run_ranks(2, refused, kind, is_padded)
    assert text == other and "module '" in text and "that 'cp' shards" in text and "Boundary(" in text, text


# --- modules of one's own ----------------------------------------------------------


def read_one_by_one(x):
    state, found = torch.zeros_like(x[:, 0]), []
    for at in range(x.shape[1]):
        state = 0.9 * state + x[:, at]
        found.append(state)
    return torch.stack(found, 1)


def convolved(x):
    return F.conv1d(x.mT, torch.ones(WIDTH, 1, 3), padding=1, groups=WIDTH).mT


def windowed(x):
    return x.unfold(1, 3, 1).sum(-1)


def linear_attention(x):
    state = (x.unsqueeze(-1) * x.unsqueeze(-2)).cumsum(1)
    return (x.unsqueeze(-2) @ state).squeeze(-2)


MIXERS = {
    "running extremes": lambda x: x.cummax(1).values,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "sort": lambda x: x.sort(1).values,
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "rfft of two dims": lambda x: torch.fft.fft2(x, dim=(1, 2)).real,
    "convolution": convolved,
    "window": windowed,
    "running sum from behind": lambda x: x.flip(1).cumsum(1).flip(1),
    "one by one": read_one_by_one,
    "unbind": lambda x: torch.stack(x.unbind(1), 1),
    "recurrent": None,  # a GRU, made for each model
}


WITH_A_RULE = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.sigmoid().cumprod(1),
    "linear attention": linear_attention,
    "shift by a pad": lambda x: F.pad(x, (0, 0, 1, -1)),
    "shift by a slice": lambda x: torch.cat([x[:, :1] * 2, x[:, :-1]], 1)[:, 1:],
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "softmax over positions": lambda x: x.softmax(1) * x,
}


class Mixing(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.mixes(x * self.scale)
        return y[0] if isinstance(y, tuple) else y


class Model(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mixer = nn.Embedding(VOCABULARY, WIDTH), Mixing(mixes)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.head(self.mixer(self.embed(input_ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels[:, : logits.shape[1]].flatten())


def gradients(model):
    loss = model(tokens(), tokens())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if not name.startswith("mixer.mixes")}


def agree(expected, found, name):
    assert abs(expected[0] - found[0]) <= 1e-6 * abs(expected[0]), name
    for parameter, gradient in found[1].items():
        torch.testing.assert_close(gradient.full_tensor(), expected[1][parameter], rtol=1e-4, atol=1e-6, msg=name)


def test_modules_of_ones_own():
    """Refused by name; and under the plan that the error gives, what one device computes."""

    def check():
        texts = {}
        for name, mixes in MIXERS.items():

            def made(mixes=mixes):
                return Model(nn.GRU(WIDTH, WIDTH, batch_first=True) if mixes is None else mixes)

            model, _ = vescale.parallelize(plan_of(), made())
            with pytest.raises(OperatorError) as caught:
                gradients(model)
            texts[name] = str(caught.value)
            assert "module 'mixer' (Mixing)" in texts[name], texts[name]
            whole = plan_of(boundaries={"mixer": Boundary(input={"cp": Replicate()})})
            model, _ = vescale.parallelize(whole, made())
            agree(gradients(made()), gradients(model), name)
        return texts

    one, other = run_ranks(2, check)
    assert one == other


class Masked(nn.Module):
    """Mixes positions of what it is given together with a mask of places, which the plan cuts too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, mask=None, **others):
        for one in (mask, *others.values(), *others.get("pair", ())):
            if isinstance(one, torch.Tensor):
                x = x * one.unsqueeze(-1)
        return convolved(x * self.scale)


class ModelWithMasks(Model):
    """`call`: how its mixer is called."""

    def __init__(self, call):
        super().__init__(None)
        self.mixer, self.call = Masked(), call

    def forward(self, input_ids, labels):
        keep = (input_ids > 10).float()
        logits = self.head(self.call(self.mixer, self.embed(input_ids), keep))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


CALLS = {
    "positional": lambda mixer, x, keep: mixer(x, keep),
    "keywords": lambda mixer, x, keep: mixer(x=x, mask=keep),
    "mask first": lambda mixer, x, keep: mixer(mask=keep, x=x),
    "of no name in its signature": lambda mixer, x, keep: mixer(x, padding=keep, mask=None),
    "two of them, one in a tuple": lambda mixer, x, keep: mixer(x, keep, pair=(keep, 2 * keep)),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_remedy_names_every_argument_that_is_cut(call):
    def check():
        model, _ = vescale.parallelize(plan_of(), ModelWithMasks(CALLS[call]))
        with pytest.raises(OperatorError) as caught:
            gradients(model)
        model, _ = vescale.parallelize(plan_of(boundaries=boundaries_of(caught.value)), ModelWithMasks(CALLS[call]))
        agree(gradients(ModelWithMasks(CALLS[call])), gradients(model), call)

    run_ranks(2, check)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_what_has_a_rule(layout):
    def check():
        for name, mixes in WITH_A_RULE.items():
            if layout == "zigzag" and name in ("cumsum", "cumprod", "linear attention"):
                continue  # of parts in one piece only
            model, _ = vescale.parallelize(plan_of(context_layout=layout), Model(mixes))
            agree(gradients(Model(mixes)), gradients(model), name)

    run_ranks(2, check)


def test_what_does_not_mix_positions_stays():
    """Along other dims, of places and labels, and outside of the model's forward."""

    class Fine(Model):
        def forward(self, input_ids, labels):
            places = torch.ones_like(input_ids).cumsum(1).flip(1).sort(1).values
            x = self.embed(input_ids) + places.unsqueeze(-1) / 10
            x = (x.cumsum(-1).flip(-1).roll(1, -1)).sort(-1).values + x.mean(1, keepdim=True)
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.roll(-1, 1).flatten()), x

    def check():
        model, _ = vescale.parallelize(plan_of(), Fine(None))
        loss, x = model(tokens(), tokens())
        expected, y = Fine(None)(tokens(), tokens())
        assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item()
        torch.testing.assert_close(x.cumsum(1).full_tensor(), y.cumsum(1), rtol=1e-5, atol=1e-5)

    run_ranks(2, check)


# --- sizes -------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, mask):
        x = self.embed(input_ids).unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(x, x, x, mask)).squeeze(1)


WRONG_MASKS = {
    "a rank's rows": (POSITIONS // 2, POSITIONS),
    "a rank's columns": (POSITIONS, POSITIONS // 2),
    "a rank's part of both": (POSITIONS // 2, POSITIONS // 2),
    "a longer one": (BATCH, 1, POSITIONS + 1, POSITIONS + 1),
    "of another batch": (BATCH + 1, 1, POSITIONS, POSITIONS),
    "of more heads": (BATCH, 3, POSITIONS, POSITIONS),
}


@pytest.mark.parametrize("way", ["ring", "all-to-all", "gather", "auto"])
def test_masks_of_a_wrong_size(way):
    def check():
        texts = []
        model, _ = vescale.parallelize(plan_of(context=way), Attending())
        for shape in WRONG_MASKS.values():
            with pytest.raises(ShapeError) as caught:
                model(tokens(), torch.ones(shape, dtype=torch.bool))
            texts.append(str(caught.value))
            assert str(list(shape)) in texts[-1], texts[-1]
        for fits in ((POSITIONS, POSITIONS), (1, POSITIONS), (BATCH, 1, 1, POSITIONS), (BATCH, 1, POSITIONS, 1)):
            mask = torch.ones(fits, dtype=torch.bool)
            found = model(tokens(), mask).full_tensor()
            torch.testing.assert_close(found, Attending()(tokens(), mask), rtol=1e-5, atol=1e-6)
        return texts

    one, other = run_ranks(2, check)
    assert one == other


def test_sequences_that_do_not_divide():
    """Any length is right, of fewer positions than ranks too; parts that are not those of the cut are refused."""

    def check():
        plan = plan_of(context="ring")
        model, _ = vescale.parallelize(plan, Attending())
        for length in (23, 5, 3, 1):
            ids = tokens()[:, :length]
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            found = model(ids, mask).full_tensor()
            torch.testing.assert_close(found, Attending()(ids, mask), rtol=1e-5, atol=1e-6)
        texts = []
        for length in (7, 12):  # every rank gives as many, or the wrong one more
            mine = length + torch.distributed.get_rank()
            with pytest.raises(VescaleError) as caught:
                plan.local_batch({"input_ids": tokens()[:, :mine]}, whole_sequences=False)
            texts.append(str(caught.value))
        return texts

    one, other = run_ranks(2, check)
    assert one == other

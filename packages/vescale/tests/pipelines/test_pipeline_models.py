"""Unmodified models in two stages: loss and gradients are those of one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

ROWS, POSITIONS, VOCABULARY = 4, 10, 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**SIZES, **HEADS, pad_token_id=0))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


class UNet(nn.Module):
    """Two levels down and up; both skip connections cross the cut, one by a cat and one by a sum."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, image, target):
        first = F.relu(self.first(image))
        down = F.relu(self.down(first))
        middle = F.relu(self.middle(down)) + down
        up = self.up(middle)
        return F.mse_loss(self.last(torch.cat([up, first], 1)), target)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.shift = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.product(x), self.shift


class Lender(nn.Module):
    """Its parts return a weight of theirs, for their caller to add."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, image, target):
        for part in self.parts:
            image, shift = part(image)
            image = F.relu(image + shift)
        return F.mse_loss(image, target)


def tokens(generator):
    return torch.randint(1, VOCABULARY, (ROWS, POSITIONS), generator=generator)


def language(generator):
    inputs, mask = tokens(generator), torch.ones(ROWS, POSITIONS, dtype=torch.int64)
    mask[1, :3] = mask[2, :5] = 0  # padded on the left, as for generation
    return {"input_ids": inputs, "attention_mask": mask, "labels": inputs.masked_fill(mask == 0, -100)}


def translation(generator):
    return {"input_ids": tokens(generator), "labels": tokens(generator)[:, :7].contiguous()}


def images(generator):
    return {"image": torch.randn(ROWS, 3, 8, 8, generator=generator), "target": torch.randn(ROWS, 3, 8, 8)}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x):
        return {"x": self.product(x)}


class Annotator(nn.Module):
    """Writes to what its parts return."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Named() for _ in range(3))

    def forward(self, image, target):
        for part in self.parts:
            out = part(image)
            out["x"] = F.relu(out["x"] + image)
            image = out["x"]
        return F.mse_loss(image, target)


class Depths(nn.Module):
    """Adds what layers of both stages return, which the library collects by its hooks."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        if inside:  # of a part that lies in one stage, and collects
            from transformers import CLIPVisionConfig, CLIPVisionModel

            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
            self.tower = CLIPVisionModel(CLIPVisionConfig(image_size=8, patch_size=4, **sizes))
            for layer in self.tower.encoder.layers:  # moves all scores of a query alike: its gradient is rounding
                layer.self_attn.k_proj.bias.requires_grad_(False)
        self.decoder = gemma()
        if inside:
            self.last = nn.Linear(32, VOCABULARY)

    def forward(self, image, target):
        ids = target[:, 0, 0, 0].round().long().abs()[:, None].expand(-1, 3) % VOCABULARY
        if not self.inside:
            out = self.decoder(ids, output_hidden_states=True)
            return sum(one.float().square().mean() for one in out.hidden_states) + out.logits.square().mean()
        states = self.tower(image, output_hidden_states=True).hidden_states
        x = self.decoder(inputs_embeds=states[-2] + states[1]).logits
        return F.mse_loss(x, torch.tanh(self.last(states[0])))


class Looks(nn.Module):
    """Adds what modules inside the layers of both stages return, which the library collects by its hooks."""

    def __init__(self):
        super().__init__()
        self.decoder = qwen3()
        self.decoder.set_attn_implementation("eager")

    def forward(self, input_ids, attention_mask, labels):
        out = self.decoder(input_ids, output_attentions=True)
        return sum(one.square().mean() for one in out.attentions) + out.logits.square().mean()


# name -> (model, inputs, the module that begins stage 1; None where costs say)
MODELS = {
    "gemma": (gemma, language, "model.layers.1"),
    "qwen3": (qwen3, language, "model.layers.1"),
    "qwen3, cut at the head": (qwen3, language, "lm_head"),
    "gpt2": (gpt2, language, "transformer.h.1"),
    "t5, cut in the encoder": (t5, translation, "encoder.block.1"),
    "t5, cut between": (t5, translation, "decoder"),
    "t5, cut in the decoder": (t5, translation, "decoder.block.1"),
    "t5, cut by cost": (t5, translation, None),
    "gpt2, cut by cost": (gpt2, language, None),
    "lender": (Lender, images, "parts.1"),
    "annotator": (Annotator, images, "parts.1"),
    "hidden states of a tower": (lambda: Depths(True), images, "decoder.model.layers.1"),
    "hidden states of both stages": (lambda: Depths(False), images, "decoder.model.layers.1"),
    "hidden weights of attention": (Looks, language, "decoder.model.layers.1"),
    "unet": (UNet, images, "middle"),
    "unet, cut later": (UNet, images, "up"),
}


def loss_and_gradients(name, plan=None):
    build, inputs_of, _ = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    if plan is not None:
        model, _ = vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    torch.manual_seed(2)
    inputs = inputs_of(torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    out = model(**inputs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if plan is not None:
        gradients = {n: g.full_tensor() for n, g in gradients.items()}
    return loss.detach(), gradients


def compared(name, count):
    """Per rank: the loss's relative error, the gradients' errors, and which parameters have one."""
    build, inputs_of, cut = MODELS[name]
    cuts = vescale.balanced_cuts(build(), 2, inputs_of(torch.Generator())) if cut is None else (cut,)
    pipeline = vescale.Pipeline(cuts=cuts, microbatches=count)
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    loss, gradients = loss_and_gradients(name, plan)
    wanted_loss, wanted = loss_and_gradients(name)
    errors = {n: ((g - wanted[n]).norm() / wanted[n].norm()).item() for n, g in gradients.items()}
    return ((loss - wanted_loss) / wanted_loss).abs().item(), errors, sorted(wanted)


@in_turns(3)
@pytest.mark.parametrize("name", list(MODELS))
def test_loss_and_gradients_in_one_microbatch_are_those_of_one_device(name):
    outcomes = run_ranks(2, compared, name, 1, timeout=120)
    for loss, errors, _ in outcomes:
        assert loss == 0
        assert {n: e for n, e in errors.items() if not e <= 1e-6} == {}
    assert {n for _, errors, _ in outcomes for n in errors} == set(outcomes[0][2])


@pytest.mark.parametrize(
    "name", ["gemma", "qwen3", "lender", "annotator", "unet", *(name for name in MODELS if "hidden" in name)]
)
def test_loss_and_gradients_of_a_whole_batch_in_microbatches(name):
    for loss, errors, _ in run_ranks(2, compared, name, 2, timeout=120):
        assert loss <= 1e-6
        assert {n: e for n, e in errors.items() if not e <= 1e-5} == {}


ROUTED = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""Their loss has a term of the logits of every layer's router, which lies inside of the layer."""


def routed(kind, axes):
    """Relative errors of losses and parameters of three steps, against one device that accumulates."""
    import transformers

    def build():
        config = getattr(transformers, f"{kind}Config")
        sizes = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2} | ROUTED[kind]
        torch.manual_seed(0)
        found = config(**sizes, output_router_logits=True, router_aux_loss_coef=0.5)
        return getattr(transformers, f"{kind}ForCausalLM")(found).train()

    def optimize(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    def steps(model, optimizer, parts):
        losses = []
        for step in range(3):
            ids = tokens(torch.Generator().manual_seed(step))
            for part in ids.chunk(parts):
                loss = model(input_ids=part, labels=part).loss / parts
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return [sum(losses[i : i + parts]) for i in range(0, len(losses), parts)]

    alone = build()
    expected = steps(alone, optimize(alone.parameters()), 2)
    pipeline = vescale.Pipeline(cuts=("model.layers.1",), microbatches=2, loss="mean")
    spread = {"data_axis": "ep", "expert_axis": "ep"} if "ep" in axes else {}
    plan = vescale.Plan(mesh={"pp": 2, **axes}, parameters={"*": {}}, pipeline=pipeline, **spread)
    model, optimizer = vescale.parallelize(plan, build(), optimize)
    losses = steps(model, optimizer, 1)
    wanted = dict(alone.named_parameters())
    errors = {n: ((p.detach().full_tensor() - wanted[n]).norm() / wanted[n].norm()).item()
              for n, p in model.named_parameters()}  # fmt: skip
    return [abs(a - b) / b for a, b in zip(losses, expected)], errors


@pytest.mark.parametrize("axes", [{}, {"ep": 2}])
@pytest.mark.parametrize("kind", ROUTED)
def test_losses_of_routers_reach_the_last_stage(kind, axes):
    for losses, errors in run_ranks(4 if axes else 2, routed, kind, axes, timeout=120):
        assert max(losses) <= 1e-5
        assert errors and {n: e for n, e in errors.items() if not e <= 1e-5} == {}


class Counted(nn.Module):
    """Between its blocks it counts what a router of the first stage chose, as losses of routers do."""

    def __init__(self):
        super().__init__()
        self.router, self.blocks = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.most = 4

    def forward(self, x, y):
        logits = self.router(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        chosen = logits.topk(2).indices.flatten()
        share = torch.bincount(chosen, minlength=self.most).float() / chosen.numel()
        share = share + chosen.bincount(None, self.most) * 0.1
        return F.mse_loss(x, y) + (share * logits.softmax(-1).mean(0)[: share.shape[0]]).sum()


def counted():
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 8)
    alone, model = Counted(), Counted()
    model.load_state_dict(alone.state_dict())
    for part in zip(x.chunk(2), y.chunk(2)):
        (alone(*part) / 2).backward()
    pipeline = vescale.Pipeline(cuts=("blocks.2",), microbatches=2, loss="mean")
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=pipeline)
    model, _ = vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    model(x, y).backward()
    wanted = dict(alone.named_parameters())
    same = {n: torch.equal(p.grad.full_tensor(), wanted[n].grad) for n, p in model.named_parameters()}
    model.most = 1
    try:
        model(x[:4], y[:4])
    except RuntimeError as error:
        return same, str(error)


def test_counts_of_at_least_so_many_cross_cuts():
    """And where a value is not below that, a shape that all stages have read would be another."""
    (first, told), (second, other) = run_ranks(2, counted, timeout=60)
    assert all((first | second).values()) and len(first | second) == 10
    for text in (told, other):
        assert "and minlength=1 promises values below 1" in text


class Collected(nn.Module):
    """What a hook keeps of a block is read after them all, as libraries collect hidden states."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.seen = {}
        self.blocks[0].register_forward_hook(lambda module, args, out: self.seen.update(first=out))

    def forward(self, x):
        self.seen = {}
        for block in self.blocks:
            x = block(x)
        return (x + self.seen["first"]).square().mean()


def read_from_a_hook():
    plan = vescale.Plan(mesh={"pp": 2}, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=("blocks.2",)))
    model, _ = vescale.parallelize(plan, Collected(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    try:
        model(torch.ones(2, 4))
    except RuntimeError as error:
        return type(error).__name__, str(error)


def test_a_forward_that_reads_what_a_hook_left_is_told_so():
    for kind, text in run_ranks(2, read_from_a_hook, timeout=60):
        assert kind == "PipelineError"
        assert "raised KeyError: 'first'; hooks of 1 modules, such as 'blocks.0'" in text
        assert "return the value from the module's forward" in text


def generated():
    """Words without a cache, under the pipeline and on one device; and what a call with one says."""
    torch.manual_seed(0)
    whole = qwen3().eval()
    words = torch.randint(1, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = whole.generate(words, use_cache=False, **settings)
    plan = vescale.Plan(
        mesh={"pp": 2}, parameters={"*": {}}, pipeline=vescale.Pipeline(cuts=("model.layers.1",), microbatches=2)
    )
    model, _ = vescale.parallelize(plan, whole, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    found = model.generate(words, use_cache=False, **settings)
    try:
        model.generate(words, **settings)
    except RuntimeError as error:
        return found.tolist(), wanted.tolist(), str(error)


def test_words_are_generated_without_a_cache_and_one_with_it_is_told_so():
    for found, wanted, text in run_ranks(2, generated, timeout=120):
        assert found == wanted
        assert "on a value of 'model.layers.0.self_attn' that an object has kept from an earlier call" in text
        assert "use_cache=False" in text

"""Compile mode on a mesh of one rank: a model is one graph, as under `torch.compile`, or module by module.

Against one device without veScale: numbers of each step, what programs keep beside, and how often their code ran.
"""

import functools
import importlib
import itertools
import logging
import math
import os
import random
import shutil
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import vescale
from vescale_dtensor.testing import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers")

STEPS, WORDS, VOCABULARY, CLOSE = 5, (2, 12), 64, 1e-5
needs_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor makes C++ on a CPU")


# --- HuggingFace's models ------------------------------------------------------------


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes, **more))


def gpt2(rate=0.0):
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **rates, **special))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **sizes)
    )


FAMILIES = {"llama": llama, "llama, tied": partial(llama, tie_word_embeddings=True), "gpt2": gpt2, "qwen3": qwen3}


def words_of(step):
    return torch.randint(VOCABULARY, WORDS, generator=torch.Generator().manual_seed(step))


def parallelized(build, mode, backend="aot_eager", plan_of=None):
    """The model and its optimizer; "plain": without veScale."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = build()
    make = partial(torch.optim.AdamW, lr=1e-3)
    if mode == "plain":
        return model, make(model.parameters())
    plan = plan_of(model) if plan_of else vescale.Plan(mesh={"dp": 1}, parameters={"*": {}})
    model, optimizer = vescale.parallelize(plan, model, make, mode="compile" if backend == "inductor" else "eager")
    if backend != "inductor":
        vescale.static(model, compiler=backend)
    return model, optimizer


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def whole(model):
    """Whether the last call that was recorded is compiled whole."""
    regions = [region for found in model._vescale.static.root.regions.values() for region in found]
    return bool(regions) and type(regions[-1]).__name__ == "WholeModel"


def trained(build, mode, **how):
    model, optimizer = parallelized(build, mode, **how)
    losses = []
    for step in range(STEPS):
        loss = model(input_ids=words_of(step), labels=words_of(step)).loss
        loss.backward()
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, whole(model) if mode != "plain" else None


def assert_alike(found, wanted):
    losses, gradients, _ = found
    assert losses == pytest.approx(wanted[0], rel=CLOSE)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


def both(function, *args, **how):
    return function(*args, "plain"), function(*args, "compile", **how)


def of_a_library(function, *args, **how):
    """`both`, where this file is of a library whose code a compiler may read."""
    one_rank = importlib.import_module("vescale_plans._static.compiling.one_rank")
    known = one_rank.LIBRARIES
    one_rank.LIBRARIES = known | {Base.forward.__globals__["__name__"].partition(".")[0]}
    try:
        return both(function, *args, **how)
    finally:
        one_rank.LIBRARIES = known  # ranks are kept for other tests


def tensor_parallel(model):
    return vescale.Plan.from_huggingface(model, mesh={"dp": 1, "tp": 1})


@pytest.mark.parametrize("family, plan_of", [*((name, None) for name in FAMILIES), ("llama", tensor_parallel)])
def test_a_model_is_one_graph(family, plan_of):
    wanted, found = run_ranks(1, both, trained, FAMILIES[family], plan_of=plan_of, timeout=300)[0]
    assert_alike(found, wanted)
    assert found[2]


@needs_a_compiler
@pytest.mark.parametrize("family", slice_of(["llama", "gpt2"], fraction=2))
def test_inductor_trains_a_whole_model(family):
    wanted, found = run_ranks(1, both, trained, FAMILIES[family], backend="inductor", timeout=500)[0]
    assert_alike(found, wanted)
    assert found[2]


def logged_by_an_older_torch():
    """What torch logs of its metrics where it sorts all sets of its settings, as 2.11 does."""
    from torch._dynamo import config, utils

    records, asked, newer = [], itertools.count(), utils._get_dynamo_config_for_logging
    metrics = logging.getLogger("torch._dynamo.metrics_context")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(str(record.exc_info[1]))

    def older():
        if next(asked) % 2:
            raise ValueError("of another cause")
        sorted(config.ignore_logging_functions)

    utils._get_dynamo_config_for_logging = older
    metrics.addHandler(handler)
    try:
        trained(llama, "compile")
    finally:
        utils._get_dynamo_config_for_logging = newer
        metrics.removeHandler(handler)
    return records


def test_an_older_torch_does_not_log_that_it_cannot_sort_what_is_passed_over():
    (records,) = run_ranks(1, logged_by_an_older_torch, timeout=300)
    assert set(records) == {"of another cause"}


def test_random_numbers_stay_those_of_one_device():
    """A graph of inductor's draws its own: what draws is no part of one."""
    wanted, found = run_ranks(1, both, trained, partial(gpt2, 0.1), timeout=300)[0]
    assert_alike(found, wanted)
    assert not found[2]


class Long(nn.Module):
    """Drops of what it is given, where that is long."""

    def __init__(self):
        super().__init__()
        self.embedded, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids):
        type(self).forward.__code__.co_varnames  # noqa: B018  which answers in its own way
        x = self.embedded(input_ids).tanh()
        x = nn.functional.dropout(x, 0.5) if input_ids.shape[1] > 12 else x
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), input_ids.flatten())


LENGTHS = (6, 6, 9, 9, 7, 12, 5, 10, 6, 8, 11, 4)


def at_lengths(family, lengths, mode):
    """Losses, gradients, how often the model was recorded, and how often its last regions were compiled."""
    model, optimizer = parallelized(FAMILIES.get(family, Long), mode)
    losses = []
    for step, length in enumerate(lengths):
        words = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=words, labels=words).loss if family in FAMILIES else model(words)
        loss.backward()
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    recorded = len(model._vescale.static.root.regions) if mode != "plain" else 0
    return losses, gradients, recorded, whole(model) if mode != "plain" else None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_graph_takes_other_lengths(family):
    """The second makes it dynamic, and no other is recorded: each was, and the ninth ended compilation. torch remembers
    on disk what was dynamic, and then the first is."""
    wanted, found = run_ranks(1, both, at_lengths, family, LENGTHS, timeout=500)[0]
    assert_alike(found[:3], wanted[:3])
    assert found[2] <= 2 and found[3]


def test_a_length_at_which_it_draws_is_recorded():
    lengths = (6, 6, 9, 9, 7, 16, 16, 14, 8, 16, 5)
    wanted, found = run_ranks(1, of_a_library, at_lengths, "long", lengths, timeout=500)[0]
    assert_alike(found[:3], wanted[:3])


def generated(mode):
    model, _ = parallelized(llama, mode)
    model.eval()
    found = []
    with torch.no_grad():
        for _ in range(3):
            out = model(input_ids=words_of(0), use_cache=True)
            more = model(input_ids=words_of(1)[:, :1], past_key_values=out.past_key_values, use_cache=True)
            found.append((full(out.logits), full(more.logits), full(out.past_key_values.layers[0].keys)))
            kinds = {type(out.logits).__name__, type(out.past_key_values.layers[1].values).__name__}
    return found, kinds, whole(model) if mode != "plain" else None


def test_a_cache_that_a_model_returns_holds_distributed_tensors():
    (wanted, _, _), (found, kinds, _) = run_ranks(1, both, generated, timeout=300)[0]
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert kinds == {"DTensor"}


def through_the_cache(mode):
    model, _ = parallelized(llama, mode)
    found = []
    for step in range(4):
        out = model(input_ids=words_of(step), use_cache=True)
        keys = out.past_key_values.layers[1].keys
        (keys.square().sum() if step % 2 else out.logits.square().mean()).backward()
        found.append({n: None if p.grad is None else full(p.grad).clone() for n, p in model.named_parameters()})
        model.zero_grad()
    return found, whole(model) if mode != "plain" else None


def test_a_backward_may_begin_in_a_cache():
    (wanted, _), (found, is_whole) = run_ranks(1, both, through_the_cache, timeout=300)[0]
    assert not is_whole
    for mine, theirs in zip(found, wanted, strict=True):
        for name, gradient in theirs.items():
            if gradient is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)


# --- programs --------------------------------------------------------------------------


KEPT = []


class Base(nn.Module):
    """Reads a value of what it is given, by code that no scan looks through: no region as others are."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 8)
        self.calls, self.scale, self.seen = 0, 1.0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        type(self).forward.__code__.co_varnames  # noqa: B018  which answers in its own way
        return self.more(self.down(self.norm(self.up(x)).tanh()))

    def more(self, x):
        return x.square().mean()


class AddsInPlace(Base):
    def more(self, x):
        self.count.add_(1)
        return x.square().mean() * self.count


class WritesToItsArgument(Base):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class Replaces(Base):
    def more(self, x):
        self.count = self.count + 1
        return x.square().mean() * self.count


class Counts(Base):
    def more(self, x):
        self.calls += 1
        return x.square().mean()


class CountsInADict(Base):
    def __init__(self):
        super().__init__()
        self.table = {"calls": 0}

    def more(self, x):
        self.table["calls"] += 1
        self.calls = self.table["calls"]
        return x.square().mean()


class KeepsInAList(Base):
    def more(self, x):
        KEPT.append(x)
        return x.square().mean()


class KeepsInAnAttribute(Base):
    def more(self, x):
        self.last = x
        return x.square().mean()


class KeepsInItsOwnList(Base):
    def more(self, x):
        self.seen.append(x)
        return x.square().mean()


class DrawsAMask(Base):
    def more(self, x):
        return (x * torch.rand_like(x)).square().mean()


class DrawsByPython(Base):
    def more(self, x):
        return x.square().mean() * random.random()


class DrawsByNumpy(Base):
    def more(self, x):
        return x.square().mean() * float(numpy.random.rand())


class DrawsNormalsByNumpy(Base):
    """Every second is kept from the first."""

    def more(self, x):
        return x.square().mean() * (2 + float(numpy.random.normal()))


class ReadsAValue(Base):
    def more(self, x):
        return x.square().mean() if x.sum().item() > 0 else x.abs().mean()


class Prints(Base):
    def more(self, x):
        print(end="")
        return x.square().mean()


class IsScaled(Base):
    """Its loop changes an attribute."""

    def more(self, x):
        return x.square().mean() * self.scale


def rescaled(model, step):
    model.scale = 1.0 if step % 2 else 3.0


def evaluated(model, step):
    model.train(step % 3 != 2)


def frozen(model, step):
    model.up.weight.requires_grad_(step % 2 == 0)


def replaced(model, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def hooked(model, step):
    if step == 2:
        model.norm.register_forward_hook(lambda module, args, out: KEPT.append(out) or out * 2)


def loaded(model, step):
    if step == 2:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def nothing(model, step):
    pass


PROGRAMS = {  # the model, what the loop does before each step, and whether the last call is compiled whole
    "a model": (Base, nothing, True),
    "a buffer is added to": (AddsInPlace, nothing, False),
    "an argument is written to": (WritesToItsArgument, nothing, False),
    "a buffer is replaced": (Replaces, nothing, False),
    "a counter": (Counts, nothing, False),
    "a counter in a dict": (CountsInADict, nothing, False),
    "kept in a list of the program's": (KeepsInAList, nothing, False),
    "kept in an attribute": (KeepsInAnAttribute, nothing, False),
    "kept in a list of its own": (KeepsInItsOwnList, nothing, False),
    "torch's random numbers": (DrawsAMask, nothing, False),
    "Python's random numbers": (DrawsByPython, nothing, False),
    "numpy's random numbers": (DrawsByNumpy, nothing, False),
    "numpy's normals": (DrawsNormalsByNumpy, nothing, False),
    "a value is read": (ReadsAValue, nothing, False),
    "it prints": (Prints, nothing, False),
    "an attribute is set": (IsScaled, rescaled, True),
    "trains and evaluates": (Base, evaluated, True),
    "frozen now and then": (Base, frozen, True),
    "new memory of parameters": (Base, replaced, True),
    "a hook, later": (Base, hooked, False),
    "a state is loaded": (Base, loaded, True),
}


class WritesToAnAttribute(Base):
    """A running mean that is no buffer."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(8)

    def more(self, x):
        out = (x - self.mean).square().mean()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(full(x).mean(0), alpha=0.1)
        return out


class WritesToData(Base):
    def more(self, x):
        out = (x * (self.count + 1)).square().mean()
        self.count.data.add_(1)
        return out


class ReadsStatistics(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def more(self, x):
        return (x * self.norm.running_var.mean()).square().mean()


class DrawsFromItsOwn(Base):
    def __init__(self):
        super().__init__()
        self.drawn = random.Random(3)

    def more(self, x):
        return x.square().mean() * self.drawn.random()


class AsksTheCompiler(Base):
    def more(self, x):
        return x.square().mean() * (2 if torch.compiler.is_compiling() else 1)


class AsksTheSystem(Base):
    def more(self, x):
        return x.square().mean() * float(os.getenv("ONE_RANK", "1"))


class AsksTheSign(Base):
    def more(self, x):
        return x.square().mean() * math.copysign(1.0, self.scale)


FACTOR = [1.0]


class Remembers(Base):
    def __init__(self):
        super().__init__()
        self.remembered = functools.lru_cache(lambda at: FACTOR[at])

    def more(self, x):
        return x.square().mean() * self.remembered(0)


def set_outside(model, step):
    os.environ.pop("ONE_RANK", None)
    if step > 3:
        os.environ["ONE_RANK"] = "3"
    model.scale = -0.0 if step > 3 else 0.0
    FACTOR[0] = 1.0 if step < 3 else 5.0


UNSEEN = {  # what a compiler's guards, or its backwards, miss
    "a running mean in an attribute": (WritesToAnAttribute, nothing, False),
    "a write to data": (WritesToData, nothing, False),
    "another's statistics": (ReadsStatistics, nothing, False),
    "a generator of its own": (DrawsFromItsOwn, nothing, False),
    "whether it is compiled": (AsksTheCompiler, nothing, False),
    "the environment": (AsksTheSystem, set_outside, False),
    "a zero's sign": (AsksTheSign, set_outside, False),
    "a function that remembers": (Remembers, set_outside, False),
}


def ran(name, mode):
    build, before, _ = {**PROGRAMS, **UNSEEN}[name]
    KEPT.clear()
    model, optimizer = parallelized(build, mode)
    losses = []
    for step in range(8):
        before(model, step)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        optimizer.step()
        gradients = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        losses.append(loss.item())
    kept = [*KEPT, *model.seen, *([model.last] if hasattr(model, "last") else [])]
    state = {name: full(value).clone() for name, value in model.state_dict().items()}
    facts = model.calls, len(kept), torch.get_rng_state(), random.random(), numpy.random.rand()
    kinds = {type(value).__name__ for value in kept}
    return (losses, gradients, whole(model) if mode != "plain" else None), state, facts, [full(v) for v in kept], kinds


def assert_as_on_one_device(found, wanted):
    assert_alike(found[0], wanted[0])
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(found[2], wanted[2], strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
    for mine, theirs in zip(found[3], wanted[3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert found[4] <= {"DTensor"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_library_does_what_it_does_on_one_device(name):
    wanted, found = run_ranks(1, of_a_library, ran, name, timeout=300)[0]
    assert_as_on_one_device(found, wanted)
    assert found[0][2] is PROGRAMS[name][2]


@pytest.mark.parametrize("name", [*PROGRAMS, *UNSEEN])
def test_a_program_is_never_compiled_whole_unseen(name):
    """A compiler's guards do not see all that Python code may ask."""
    wanted, found = run_ranks(1, both, ran, name, timeout=300)[0]
    assert_as_on_one_device(found, wanted)
    assert not found[0][2]

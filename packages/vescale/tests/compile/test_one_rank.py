"""Compile mode on a mesh of one rank: a model is one graph, as under `torch.compile`, or it is eager.

Against one device without veScale: numbers of each step, what programs keep beside, and how often their code ran.
"""

import functools
import itertools
import logging
import os
import random
import shutil
import sys
import types
from functools import partial

import numpy
import pytest
import torch
from torch import nn

import vescale
from vescale_plans._capture.explain import compiled
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._inductor.compile_fx", "vescale", "transformers.models.llama.modeling_llama")

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


def named():
    """A compiler imports the module of a forward's globals; a rank has these by value, and the module perhaps not."""
    sys.modules.setdefault(__name__, types.ModuleType(__name__)).__dict__.update(globals())


def parallelized(build, mode, backend="aot_eager", plan_of=None):
    """The model and its optimizer; "plain": without veScale."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = build()
    make = partial(torch.optim.AdamW, lr=1e-3)
    named()
    torch.compiler.reset()
    if mode == "plain":
        return model, make(model.parameters())
    plan = plan_of(model) if plan_of else vescale.Plan(mesh={"dp": 1}, parameters={"*": {}})
    model, optimizer = vescale.parallelize(plan, model, make, mode="compile" if backend == "inductor" else "eager")
    if mode == "compile" and backend != "inductor":
        compiled(model, backend)
    return model, optimizer


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor


def whole(model):
    """Whether the last call was compiled."""
    captured = model._vescale.captured
    return captured.graphs > 0 and not captured.last


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


def tensor_parallel(model):
    return vescale.Plan.from_huggingface(model, mesh={"dp": 1, "tp": 1})


@pytest.mark.parametrize("family, plan_of", [*((name, None) for name in FAMILIES), ("llama", tensor_parallel)])
def test_a_model_is_one_graph(family, plan_of):
    wanted, found = run_ranks(1, both, trained, FAMILIES[family], plan_of=plan_of, timeout=300)[0]
    assert_alike(found, wanted)
    assert found[2]


@pytest.mark.core
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


@needs_a_compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_random_numbers_are_those_of_one_device(backend):
    """inductor's own would be others."""
    (losses, gradients, _), found = run_ranks(1, both, trained, partial(gpt2, 0.1), backend=backend, timeout=500)[0]
    assert found[0] == pytest.approx(losses, rel=1e-6)
    for name, gradient in gradients.items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    assert found[2]


class Long(nn.Module):
    """Drops of what it is given, where that is long."""

    def __init__(self):
        super().__init__()
        self.embedded, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids):
        x = self.embedded(input_ids).tanh()
        x = nn.functional.dropout(x, 0.5) if input_ids.shape[1] > 12 else x
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), input_ids.flatten())


LENGTHS = (6, 6, 9, 9, 7, 12, 5, 10, 6, 8, 11, 4)


def at_lengths(family, lengths, mode):
    """Losses, gradients, how many graphs were made, and whether the last call was compiled."""
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
    graphs = model._vescale.captured.graphs if mode != "plain" else 0
    return losses, gradients, graphs, whole(model) if mode != "plain" else None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_graph_takes_other_lengths(family):
    """The second makes it dynamic; torch remembers on disk what was dynamic, and then the first is."""
    wanted, found = run_ranks(1, both, at_lengths, family, LENGTHS, timeout=500)[0]
    assert_alike(found[:3], wanted[:3])
    assert found[2] <= 2 and found[3]


def test_a_length_at_which_it_draws_has_a_graph_of_its_own():
    lengths = (6, 6, 9, 9, 7, 16, 16, 14, 8, 16, 5)
    wanted, found = run_ranks(1, both, at_lengths, "long", lengths, timeout=500)[0]
    assert_alike(found[:3], wanted[:3])
    assert found[2] <= 4 and found[3]


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
    (wanted, _), (found, _) = run_ranks(1, both, through_the_cache, timeout=300)[0]
    for mine, theirs in zip(found, wanted, strict=True):
        for name, gradient in theirs.items():
            if gradient is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)


# --- programs --------------------------------------------------------------------------


KEPT = []


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 8)
        self.calls, self.scale, self.seen = 0, 1.0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
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


PROGRAMS = {  # the model, what the loop does before each step, and whether the last call is compiled
    "a model": (Base, nothing, True),
    "a buffer is added to": (AddsInPlace, nothing, False),
    "an argument is written to": (WritesToItsArgument, nothing, False),
    "a buffer is replaced": (Replaces, nothing, False),
    "a counter": (Counts, nothing, False),
    "kept in a list of the program's": (KeepsInAList, nothing, False),
    "kept in an attribute": (KeepsInAnAttribute, nothing, False),
    "kept in a list of its own": (KeepsInItsOwnList, nothing, False),
    "torch's random numbers": (DrawsAMask, nothing, True),
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


class AsksTheSystem(Base):
    def more(self, x):
        return x.square().mean() * float(os.getenv("ONE_RANK", "1"))


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
    FACTOR[0] = 1.0 if step < 3 else 5.0


PROGRAMS |= {  # what a compiler's guards, or its backwards, miss
    "a running mean in an attribute": (WritesToAnAttribute, nothing, False),
    "a write to data": (WritesToData, nothing, False),
    "another's statistics": (ReadsStatistics, nothing, False),
    "a generator of its own": (DrawsFromItsOwn, nothing, False),
    "the environment": (AsksTheSystem, set_outside, True),
    "a function that remembers": (Remembers, set_outside, False),
}


def ran(name, mode):
    build, before, _ = PROGRAMS[name]
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


def ran_both(names):
    return {name: both(ran, name) for name in names}


@pytest.mark.parametrize("part", range(2))
def test_a_program_does_what_it_does_on_one_device(part):
    """Compiled or not: a compiler's guards do not see all that Python code may ask."""
    names = list(PROGRAMS)[part::2]
    for name, (wanted, found) in run_ranks(1, ran_both, names, timeout=500)[0].items():
        assert_as_on_one_device(found, wanted)
        assert found[0][2] is PROGRAMS[name][2], name


# --- gradients of graphs ---------------------------------------------------------------


class Heads(nn.Module):
    """Three outputs, which reach parameters of their own, parameters of others, and what it is given."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.both = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        shared = self.both(x).tanh()
        return self.first(shared), {"second": self.second(shared + y)}, y * 2


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.heads = nn.Linear(8, 8), nn.Linear(8, 8), Heads()

    def forward(self, x):
        return self.heads(self.left(x), self.right(x))


USES = [("first",), ("second",), ("last",), ("first", "last"), ("second", "last"), ("first", "second", "last")]


def chosen(mode):
    """The losses and which gradients there are after each step, the weights in the end."""
    model, optimizer = parallelized(Chooses, mode)
    found = []
    for step, uses in enumerate([USES[-1], *USES, *USES]):
        one, more, last = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        parts = {"first": one, "second": more["second"], "last": last}
        loss = sum(parts[name].square().mean() for name in uses)
        loss.backward()
        found.append((loss.item(), {name for name, p in model.named_parameters() if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: full(p).detach().clone() for n, p in model.named_parameters()}
    return found, weights, whole(model) if mode != "plain" else None


def test_what_no_output_in_use_needs_has_no_gradient():
    """A graph gives zeros, by which an optimizer steps: it decays the weight."""
    (wanted, weights, _), (found, after, is_whole) = run_ranks(1, both, chosen, timeout=300)[0]
    assert is_whole
    assert [used for _, used in found] == [used for _, used in wanted]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-6)


def twice():
    model, _ = parallelized(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), "compile")
    x, said = torch.randn(4, 8), []
    for ask in (
        lambda: torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x, torch.ones(4, 8)),
        lambda: model(x).square().sum().backward(create_graph=True),
    ):
        try:
            ask()
        except vescale.PlanError as error:
            said.append(str(error))
    return said


def test_a_gradient_of_a_gradient_is_refused():
    """torch's graphs have none: Hessian-vector products were zero."""
    (said,) = run_ranks(1, twice, timeout=300)
    assert len(said) == 2
    assert all("is compiled" in text and 'mode="eager"' in text for text in said)


class Block(nn.Module):
    """What it saves for its backward the backward may write into, where it is the last."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down((self.up(x) * 2).sin().exp().cos())


def retained(mode):
    from torch.compiler import config  # which functions of a pickled test cannot name

    with config.patch(force_disable_caches=True):  # what is on disk may know of retained graphs
        model, _ = parallelized(lambda: nn.Sequential(Block(), Block()), mode, backend="inductor")
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        for keep in (0, 0, 0, 2):
            loss = model(x).square().mean()
            for _ in range(keep):
                loss.backward(retain_graph=True)
            loss.backward()
    return full(model[0].up.weight.grad).clone(), whole(model) if mode != "plain" else None


@needs_a_compiler
def test_a_graph_may_be_retained():
    """By a step after others that did not."""
    (wanted, _), (found, is_whole) = run_ranks(1, both, retained, timeout=300)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert is_whole


# --- where nothing is compiled -----------------------------------------------------------


def without_a_compiler():
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "/nonexistent/c++")}):
        try:
            vescale.parallelize(vescale.Plan(mesh={"dp": 1}, parameters={"*": {}}), Base(), mode="compile")
        except vescale.PlanError as error:
            return str(error)
    return ""


@needs_a_compiler
def test_a_missing_compiler_is_a_sentence():
    """Else inductor ends the training in the first backward, on the rank that lacks it."""
    (text,) = run_ranks(1, without_a_compiler)
    assert text.startswith("parallelize: inductor generates code for cpu, and finds no C++ compiler here\n")
    assert "install a C++ compiler" in text and 'mode="eager"' in text

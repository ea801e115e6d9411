"""`vescale.explain_calls`: what calls of modules do, in order, with users' hooks in their places."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import vescale
import vescale_dtensor
import vescale_pipeline
import vescale_plans
from vescale_plans import library
from vescale_plans._calls.chain import Chain
from vescale_plans._calls.phases import (
    INNER_AFTER,
    INNER_BEFORE,
    OUTER_AFTER,
    OUTER_BEFORE,
    PHASES,
    STANDS_APART,
)
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "transformers.models.llama.modeling_llama")

PACKAGES = (vescale_dtensor, vescale_pipeline, vescale_plans, vescale)
REGISTERS = {
    "register_forward_pre_hook", "register_forward_hook",
    "register_module_forward_pre_hook", "register_module_forward_hook",
}  # fmt: skip
SAID = {text for phase in PHASES.values() for text in (phase.before, phase.after)}
SAID |= {text for table in STANDS_APART.values() for text in table.values()}
# Hooks on models of a probe, which `generate_plan` makes and throws away.
PROBES = "vescale_plans.search."


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=16, use_cache=False,
        )
    )  # fmt: skip


def early(module, args):
    """A user's hook of before `parallelize`."""


def late(module, args, output):
    """One of after it."""


def parallelized():
    model = llama()
    model.model.layers[0].register_forward_pre_hook(early)
    plan = library.llama({"dp": 2, "tp": 2}).override(zero=3, checkpointing={"model.layers.*": True})
    model, _ = vescale.parallelize(plan, model, torch.optim.SGD)
    model.model.layers[0].register_forward_hook(late)
    return model


def rows_of(calls):
    return {name: [(one.when, one.owner, one.what) for one in steps] for name, steps in calls.steps.items()}


def count(hooks):
    """Steps of ours, and everybody's hooks."""
    found = 0
    for hook in hooks.values():
        order = getattr(getattr(hook, "__self__", None), "order", None)
        part = {"_enter": "outer_before", "_enter_inside": "inner_before", "_leave_inside": "inner_after",
                "_leave": "outer_after"}.get(hook.__name__)  # fmt: skip
        found += 1 if order is None else len(getattr(order, part)) if part else 0
    return found


def explained():
    model, ids = parallelized(), torch.ones(2, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()  # the first call's own watch is gone after it
    calls = vescale.explain_calls(model)
    copied = rows_of(vescale.explain_calls(copy.deepcopy(model)))
    named = model.named_modules()
    counts = {name: (count(one._forward_pre_hooks), count(one._forward_hooks)) for name, one in named}
    model(input_ids=ids, labels=ids).loss.backward()  # explaining has changed nothing that a call needs
    return str(calls), copied, counts, rows_of(calls)


def test_a_llama_with_a_plan_zero_and_recompute():
    text, copied, counts, steps = run_ranks(4, explained)[0]
    layer = steps["model.layers.0"]
    assert [owner for _, owner, _ in layer if owner not in ("vescale", "model")] == [__name__.partition(".")[0]] * 2
    what = [said for _, _, said in layer]
    assert what.index("early") < what.index("LlamaDecoderLayer.forward") < what.index("late")
    for of_ours in (PHASES["parameters"].before, PHASES["checkpoint"].before):
        assert what.index(of_ours) < what.index("LlamaDecoderLayer.forward")
    for of_ours in (PHASES["parameters"].after, PHASES["checkpoint"].after):
        assert what.index(of_ours) > what.index("LlamaDecoderLayer.forward")
    for name, found in steps.items():  # every hook has its row, and each of ours says what it does
        assert tuple(sum(when == one for when, _, _ in found) for one in ("before", "after")) == counts[name], name
        assert [when for when, _, _ in found].count("forward") == 1
        for _, owner, said in found:
            assert owner != "vescale" or said in SAID, said
    assert "model.layers.0\n" in text and "early" in text
    assert copied == steps  # a copy's hooks run in the same order, users' among them


def test_compile_mode_stands_before_the_forward():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plan = vescale.Plan(mesh={}, parameters={"*": {}})
    model, _ = vescale.parallelize(plan, model, mode="compile")
    root = [step for step in vescale.explain_calls(model).steps[""] if step.when == "forward"]
    assert [step.owner for step in root] == ["vescale", "model"]
    assert root[0].what == STANDS_APART["vescale_plans._capture.front"]["Captured"]
    assert root[1].what == "Sequential.forward"


def test_a_forward_put_over_another_and_hooks_on_every_module():
    import functools

    model = nn.Linear(2, 2)
    before = model.forward

    @functools.wraps(before)
    def mine(x):
        return before(x)

    model.forward = mine
    handle = nn.modules.module.register_module_forward_hook(late)
    try:
        steps = vescale.explain_calls(model).steps[""]
    finally:
        handle.remove()
    assert [(step.when, step.what.rpartition(".")[2]) for step in steps] == [
        ("forward", "mine"), ("forward", "forward"), ("after", "late"),
    ]  # fmt: skip
    assert steps[0].place.startswith(__file__) and steps[1].owner == "model"
    assert steps[-1].place.startswith(__file__)
    assert str(vescale.explain_calls(nn.Linear(2, 2))) == "1 modules more: their own forward, and nothing else"


def registering():
    """(module, names of what it registers as hooks), of all that veScale puts on modules."""
    for package in PACKAGES:
        top = Path(package.__file__).parent
        for path in sorted(top.rglob("*.py")):
            name = ".".join([package.__name__, *path.relative_to(top).with_suffix("").parts])
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            hooks = [
                node.args[0]
                for node in calls
                if isinstance(node.func, ast.Attribute) and node.func.attr in REGISTERS and node.args
            ]
            if hooks and not name.startswith(PROBES):
                yield pytest.param(name, hooks, id=name)


@pytest.mark.parametrize(("name", "hooks"), list(registering()))
def test_every_hook_of_ours_says_what_it_does(name, hooks):
    for hook in hooks:
        if isinstance(hook, ast.Call):  # a function that makes the hook
            continue
        leaf = hook.attr if isinstance(hook, ast.Attribute) else hook.id
        assert name == Chain.__module__ or leaf in STANDS_APART.get(name, ()), (name, leaf)


def test_every_phase_has_one_place_and_says_what_it_does_there():
    for orders, side in (((OUTER_BEFORE, INNER_BEFORE), "before"), ((INNER_AFTER, OUTER_AFTER), "after")):
        names = [name for order in orders for name in order]
        assert len(set(names)) == len(names)
        assert set(names) == {name for name, phase in PHASES.items() if getattr(phase, side)}

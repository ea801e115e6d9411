"""What a call of each module of a model does, in order: hooks and forwards, this library's and everybody's.

The modules of a parallelized model stay the user's. Whatever veScale does in their calls stands on them in one of three
ways: as a hook, as a `forward` of the object's own, or, under a pipeline, as a call of the object's own. `STEPS` is the
table of all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ._static.site import Site
from ._torch_private import global_backward_hooks, global_forward_hooks

STEPS: dict[str, dict[str, str]] = {
    "vescale_plans._apply.inputs": {
        "_enter": "plain tensors become DTensors: the batch is sharded over the data axes",
        "_leave": "a loss that is a sum of the ranks' parts is reduced",
    },
    "vescale_plans._apply.loss": {
        "_enter": "arguments of loss_fn alone are put aside",
        "_leave": "loss_fn takes the output",
    },
    "vescale_plans._apply.masks": {
        "_enter": "attention masks are made of this rank's rows from here on",
        "_leave": "attention masks are made whole again",
    },
    "vescale_plans._apply.boundary": {
        "enter": "the first input is redistributed, as the plan's boundary says",
        "enter_named": "arguments are redistributed, as the plan's boundary says",
        "leave": "the output is redistributed, as the plan's boundary says",
        "_open": "conversions are kept from here on, for all modules inside",
        "_close": "the conversions that were kept are dropped",
    },
    "vescale_plans._zero.zero": {
        "_begin": "parameters that were given other memory are taken back into their flat buffers",
        "_cast": "floating inputs are cast to the precision's dtype",
        "enter": "ZeRO: the block's parameters are gathered, and those of the next block start to be",
        "leave": "ZeRO: parameters are freed, and gathered again when a gradient comes",
    },
    "vescale_plans._recompute.checkpoint": {
        "_enter": "activation checkpointing: what is computed from here on is not kept",
        "_leave": "activation checkpointing: what is computed from here on is kept",
    },
    "vescale_plans._recompute.recompute": {
        "_without_cache": "a cache of keys and values is left out while gradients are recorded",
        "enter": "activations are gathered again in backward, or wait on the host, from here on",
        "leave": "activations are kept on the device from here on",
    },
    "vescale_plans._experts.experts": {
        "_enter": "tokens travel to the ranks that hold their experts",
        "_leave": "what the experts gave travels back",
    },
    "vescale_plans._experts.lists": {
        "_enter": "experts in a list: a first pass finds the rows of each, which are computed together",
        "_leave": "the block's result becomes DTensors",
    },
    "vescale_plans._experts.beside": {
        "_enter": "what does not need the experts may run while tokens travel",
        "_leave": "the block's modules are its own again",
    },
    "vescale_plans._static.site": {
        "Site": "static mode: runs what was recorded, on local tensors, where it is known to hold; else the forward",
        "_Covered": "the forward that static mode stood before when another was put over it",
    },
    "vescale_plans.installed._traffic": {
        "_enter": "counts the collectives of this call",
        "_leave": "the counting of this call ends",
        "_count": "counts the calls of modules",
    },
    "vescale_pipeline._runtime.runtime": {
        "Runtime": "the pipeline: splits the batch, and runs this rank's actions of the schedule",
        "_reveal": "hooks behind this one see the real output, on the stage that has it",
    },
    "vescale_pipeline._runtime.skeleton": {
        "Station": "the pipeline: runs the module on the stage that has it, elsewhere its record",
    },
    "vescale_pipeline.balance": {
        "_enter": "what the module computes is measured from here on",
        "_leave": "the measurement of the module ends",
    },
    "vescale_dtensor.debug": {
        "enter": "communication is counted as this module's",
        "leave": "communication is counted as the module's around it",
    },
    "vescale.record": {
        "after_forward": "vescale.record notes the outputs",
        "_note_inputs": "vescale.record notes the inputs",
    },
    "vescale.metrics": {
        "_entered": "metrics count the call's tokens",
        "counted": "metrics count the call's tokens; then the pipeline",
    },
    "vescale.timeline": {
        "enter": "the timeline's span of the module begins",
        "leave": "the timeline's span of the module ends",
    },
}
"""Module of ours -> function or class in it -> what it does in a call."""


@dataclass(frozen=True)
class Step:
    """One thing that a call of a module does.

    Arguments:
        when: "instead" of the whole call, "before" the forward, the "forward", "after" it, or in "backward".
        owner: "vescale", or the top-level package of whoever put it there; "model" for the forward of the class.
        what: for ours, what it does; else the function's name.
        place: where it is written, file and line; of ours the file alone.
    """

    when: str
    owner: str
    what: str
    place: str


class Calls:
    """What the calls of a model's modules do. `str` is a table of those in which more happens than their own forward.

    Attributes:
        steps: module name, "" for the root -> what its call does, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._type = type(model).__name__
        self.steps = {name: tuple(_steps(module)) for name, module in model.named_modules()}

    def __str__(self) -> str:
        lines, bare = [], 0
        for name, steps in self.steps.items():
            if len(steps) == 1 and steps[0].owner == "model":
                bare += 1
                continue
            lines.append(name or f"{self._type} (the root)")
            wide = max(len(step.owner) for step in steps)
            lines += [f"    {step.when:<8}  {step.owner:<{wide}}  {step.what}  ({step.place})" for step in steps]
        return "\n".join([*lines, f"{bare} modules more: their own forward, and nothing else"])


def explain_calls(model: nn.Module) -> Calls:
    """Lists what happens, in order, when each module of `model` is called: whose hooks and forwards run, and what
    ours do.

    Works on any model, parallelized or not, and changes nothing. Hooks that are registered for all modules at once
    (`register_module_forward_hook`) are in the row of each. What is put in place for the time of one call alone, such
    as the stand-ins for experts in a list, is not seen from outside of that call. No communication.

    Example:
        >>> print(explain_calls(model))
        >>> [step.what for step in explain_calls(model).steps["layers.0"] if step.owner == "vescale"]
    """
    return Calls(model)


def _steps(module: nn.Module) -> Iterator[Step]:
    """In the order of `nn.Module._call_impl`: global hooks come before a module's own, on both sides."""
    if (instead := module.__dict__.get("_call_impl")) is not None:
        yield _step("instead", instead)
    before, after = global_forward_hooks()
    for hook in (*before.values(), *module._forward_pre_hooks.values()):
        yield _step("before", hook)
    yield from _forwards(module)
    for hook in (*after.values(), *module._forward_hooks.values()):
        yield _step("after", hook)
    earlier, later = global_backward_hooks()
    for hook in (*earlier.values(), *module._backward_pre_hooks.values(), *later.values()):
        yield _step("backward", hook)
    for hook in module._backward_hooks.values():
        yield _step("backward", hook)


def _forwards(module: nn.Module) -> Iterator[Step]:
    """What stands before the forward of the module's class, outermost first, as far as it says what it calls, and that
    forward itself."""
    own = type(module).forward
    held = module.__dict__.get("forward")
    while held is not None and _function(held) is not own:
        yield _step("forward", held)
        held = held.own if isinstance(held, Site) else getattr(held, "__wrapped__", None)
    yield Step("forward", "model", f"{type(module).__qualname__}.forward", _place(own))


def _step(when: str, function: Callable[..., Any]) -> Step:
    written = _function(function)
    module, name = _names(written)
    if not module.startswith("vescale"):
        return Step(when, module.partition(".")[0] or "unknown", name, _place(written))
    what = STEPS.get(module, {}).get(name.rpartition(".")[2], name)
    return Step(when, "vescale", what, f"{module.replace('.', '/')}.py")


def _function(function: Any) -> Any:
    """What was written: the function of a method or of a partial call, the class of an object that is called."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function) if inspect.ismethod(function) else function
    return function if inspect.isroutine(function) or isinstance(function, type) else type(function)


def _names(written: Any) -> tuple[str, str]:
    """Module and name as they are written: what `functools.wraps` copies is another function's."""
    if inspect.isfunction(written):
        return written.__globals__.get("__name__", ""), written.__code__.co_qualname
    return getattr(written, "__module__", "") or "", getattr(written, "__qualname__", repr(written))


def _place(written: Any) -> str:
    code = getattr(written, "__code__", None)
    return ".".join(_names(written)) if code is None else f"{code.co_filename}:{code.co_firstlineno}"

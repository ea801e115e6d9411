"""Lists the steps of a call of each module of a model, in order: hooks and forwards, this library's and everybody's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ._calls.chain import Call, hooks_after, hooks_before
from ._calls.phases import STANDS_APART
from ._capture.front import Captured
from ._torch_private import global_backward_hooks, global_forward_hooks


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
    """The steps of the calls of a model's modules. `str` gives a table of those modules that do more than their own
    forward.

    Attributes:
        steps: module name, "" for the root -> the steps of its call, in order.
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
    """Lists what happens, in order, when each module of `model` is called: which hooks and forwards run, and what
    veScale's own do.

    Works on any model, parallelized or not, and changes nothing. Hooks that are registered for all modules at once
    (`register_module_forward_hook`) appear in the row of each. Anything installed for the time of one call, such as the
    stand-ins for experts in a list, is not visible from outside that call. No communication.

    Example:
        >>> print(explain_calls(model))
        >>> [step.what for step in explain_calls(model).steps["layers.0"] if step.owner == "vescale"]
    """
    return Calls(model)


def _steps(module: nn.Module) -> Iterator[Step]:
    """Yields steps in the order of `nn.Module._call_impl`: global hooks come before a module's own, on both sides."""
    instead = module.__dict__.get("_call_impl")
    if instead is not None and not isinstance(instead, Call):  # which is these hooks
        yield _step("instead", instead)
    before, after = global_forward_hooks()
    for hook in before.values():
        yield _step("before", hook)
    for hook in hooks_before(module):
        yield _step("before", hook.call, None if hook.step is None else hook.step.phase.before)
    yield from _forwards(module)
    for hook in after.values():
        yield _step("after", hook)
    for hook in hooks_after(module):
        yield _step("after", hook.call, None if hook.step is None else hook.step.phase.after)
    earlier, later = global_backward_hooks()
    for hooks in (earlier, module._backward_pre_hooks, later, module._backward_hooks):
        yield from (_step("backward", hook) for hook in hooks.values())


def _forwards(module: nn.Module) -> Iterator[Step]:
    """Yields the callables before the forward of the module's class, outermost first, as far as they name what they
    call, and that forward itself."""
    own = type(module).forward
    held = module.__dict__.get("forward")
    while held is not None and _function(held) is not own:
        yield _step("forward", held)
        held = held.forward if isinstance(held, Captured) else getattr(held, "__wrapped__", None)
    yield Step("forward", "model", f"{type(module).__qualname__}.forward", _place(own))


def _step(when: str, function: Callable[..., Any], what: str | None = None) -> Step:
    """`what`: of a chain's steps."""
    written = _function(function)
    module, name = _names(written)
    if what is None and not module.startswith("vescale"):
        return Step(when, module.partition(".")[0] or "unknown", name, _place(written))
    what = what or STANDS_APART.get(module, {}).get(name.rpartition(".")[2], name)
    return Step(when, "vescale", what, f"{module.replace('.', '/')}.py")


def _function(function: Any) -> Any:
    """Returns the written code: the function of a method or of a partial call, the class of an object that is
    called."""
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

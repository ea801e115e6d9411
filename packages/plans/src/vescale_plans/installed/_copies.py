"""`copy.deepcopy` of a parallelized model, or of one of its modules: a parallelized model of its own.

The modules are copied as they were without what `parallelize` put on them, the users' own hooks with them; the same is
then put on the copy. Its parameters lie in flat buckets of its own, filled from the memory of the original's: a rank's
shard from a rank's shard. As on one device a copied parameter has no gradient, and none of its hooks.

Cost: no communication, so that one rank alone may copy; but where the copy's buckets are cut otherwise than the
original's (under ZeRO-3, of modules whose parameters have been frozen or thawed since, or that shared a bucket), where
each parameter is converted, on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch import nn

from vescale_dtensor import OperatorError
from vescale_dtensor.engine import attach

from .._calls.alone import take_off
from .._calls.chain import is_ours
from .._capture.explain import Regions
from .._plan.promise import promise_copy
from .._zero.sharded_parameter import ShardedParameter
from ._recipe import install

_COPIER = "__deepcopy__"


class Copier:
    """Answers `copy.deepcopy` for a module of a parallelized model, as an attribute of the object."""

    def __init__(self, root: nn.Module, module: nn.Module) -> None:
        self.root, self._module = root, module

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        return _copied(self.root, self._module, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OperatorError(
            "pickle",
            f"{type(self._module).__name__} is parallelized: it names process groups of this process",
            (),
            [
                ('vescale.save(path, {"model": model})', "a checkpoint: any plan and number of ranks loads it"),
                ("{n: t.full_tensor() for n, t in model.state_dict().items()}", "on all ranks: plain, for torch.save"),
            ],
        )


def may_be_copied(model: nn.Module) -> None:
    """Lets `copy.deepcopy` of the model, and of its modules, give parallelized models from now on."""
    for module in model.modules():
        held = module.__dict__
        if _COPIER not in held:
            others = dict(held)
            held.clear()
            held[_COPIER] = Copier(model, module)  # first, so that it is the first thing that a pickle comes to
            held.update(others)


def _copied(root: nn.Module, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    held = root._vescale
    if held.runtime is not None:
        raise OperatorError(
            "deepcopy",
            "the model is a pipeline, and a stage's connections cannot be copied",
            (),
            [("copy.deepcopy(model) before parallelize", "then parallelize(plan, copied), with the same plan")],
        )
    if held.absent is not None:
        raise OperatorError(
            "deepcopy",
            "the plan leaves this rank out: it holds nothing of the model, and others cannot be asked alone",
            (),
            [("copy.deepcopy(model) under a plan for all ranks", "the copy has a reshape of its own")],
        )
    held.sync.take_in()
    for parameter in module.parameters():
        param = held.sync.param_of(parameter)
        if param is not None:
            memo.setdefault(id(parameter), _promised(param))
    names = {id(each): name for name, each in root.named_modules()}
    recipe = held.recipe.below(names[id(module)]) if id(module) in names else None
    modules = [each for each in module.modules() if getattr(each.__dict__.get(_COPIER), "root", None) is root]
    with _taken_off(modules):
        copied = copy.deepcopy(module, memo)
    if recipe is not None:
        install(copied, recipe.among(copied))
        for each in modules:
            if id(each) in memo:
                _put_behind(each, memo[id(each)])
        may_be_copied(copied)
        if held.captured is not None:
            copied._vescale.captured = Regions(copied, held.captured.mesh, held.captured.backend)
    return copied


def _promised(param: ShardedParameter) -> nn.Parameter:
    """The copy's parameter: no memory yet, its values are the original's at rest."""
    value, layout = param.at_rest
    made = promise_copy(attach(value.detach(), layout), param.full_layout, param.parameter.requires_grad)
    made._kind = param.parameter._kind
    return made


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def _put_behind(module: nn.Module, copied: nn.Module) -> None:
    """Keeps the order of hooks in the copy: those that users registered after `parallelize` run after this
    library's."""
    for name in _HOOKS:
        hooks = getattr(module, name)
        mine = [id_ for id_, hook in hooks.items() if is_ours(hook)]
        behind = list(hooks)[list(hooks).index(mine[-1]) + 1 :] if mine else []
        for id_ in behind:
            getattr(copied, name).move_to_end(id_)


@contextlib.contextmanager
def _taken_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The modules are for a while as they were before `parallelize`, but for their parameters."""
    kept: list[tuple[dict, dict]] = []
    for module in modules:
        held = module.__dict__
        mine = {name for name in ("_vescale", _COPIER) if name in held}
        hooks = {id_ for name in _HOOKS for id_, hook in held[name].items() if is_ours(hook)}
        kept.append((held, dict(held)))
        for name in mine:
            del held[name]
        take_off(held)
        for name in (*_HOOKS, *_MARKS):
            held[name] = OrderedDict((id_, value) for id_, value in held[name].items() if id_ not in hooks)
    try:
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)

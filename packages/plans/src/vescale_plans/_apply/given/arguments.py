"""Checks the arguments of `parallelize` before anything is done with them: a mistake is an error that says the line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_rng import is_deferred
from vescale_trace.text import shown

from ..._plan.parts import PlanError
from ..._torch_private import is_traceable_wrapper_subclass
from ...plan import Plan
from ..join import is_fake

_CALL = "parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=...))"
_SHOWN = 4


def check_plan(plan: Any) -> None:
    """Raises PlanError for a module or a class, which could be called as if it made a plan, and what was made so."""
    if isinstance(plan, (nn.Module, type)) or not (isinstance(plan, Plan) or callable(plan)):
        raise PlanError(
            "parallelize",
            f"its first argument is {shown(plan)}, not a plan",
            (),
            [
                ("vescale.generate_plan(model, world_size, batch=..., seq=...)", "chooses one"),
                ('vescale.Plan(mesh={"dp": 2}, parameters={"*": {}})', "makes a plan, here of two data-parallel ranks"),
            ],
        )


def check_made(optimizer: Any, model: nn.Module) -> None:
    """Raises PlanError where a factory made something that cannot train the model."""
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler) or groups is None:
        several = isinstance(optimizer, (list, tuple, dict))
        more = [("vescale.adopt(model, optimizer)", "for each further one, made of model.parameters() afterwards")]
        raise PlanError(
            "parallelize",
            f"the function that makes the optimizer returned {shown(optimizer)}, which has no parameters to train",
            (),
            [(_CALL, "returns the optimizer; a scheduler is made of it afterwards"), *(more if several else ())],
        )
    held = [parameter for group in groups for parameter in group["params"]]
    own = set(model.parameters())
    if held and own and not any(parameter in own for parameter in held):
        raise PlanError(
            "parallelize",
            f"the {type(optimizer).__name__} that was made holds none of the model's parameters: it trains nothing",
            [f"optimizer  {len(held)} parameters", f"model      {len(own)} parameters"],
            [(_CALL, "made of what it is called with")],
        )


def check_values(model: nn.Module) -> None:
    """Raises PlanError for tensors that no plan shards: of another library's type, another model's shards, or without
    values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if type(tensor) is DTensor and hasattr(tensor, "_owner"):
            raise PlanError(
                "parallelize",
                f"{name!r} is sharded by another parallelized model, which already trains it",
                (),
                [
                    ("parallelize(plan, nn.ModuleDict({'a': a, 'b': b}))", "both at once: what they share is one"),
                    ("parallelize(plan, the whole model)", "its parts are not parallelized apart"),
                ],
            )
        if is_traceable_wrapper_subclass(tensor):
            kind = f"{type(tensor).__module__.split('.')[0]}'s {type(tensor).__name__}"
            raise PlanError(
                "parallelize",
                f"{name!r} is {kind}: a plan shards plain tensors",
                (),
                [
                    ("build the model as for one device", "parallelize shards it"),
                    ("state = vescale.whole_state_dict(model)", "of the trained model, to quantise it on one device"),
                ],
            )
        if isinstance(tensor, nn.Parameter):
            _check_class(name, type(tensor))
    if is_fake():  # a dry run, which reads no values
        return
    missing = [name for name, tensor in tensors if tensor.is_meta and not is_deferred(tensor)]
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        raise PlanError(
            "parallelize",
            f"{len(missing)} of the model's {len(tensors)} tensors lie on meta and have no values",
            [f"on meta  {shown}"],
            [
                ("with vescale.deferred_init(): model = ...", "in place of torch.device('meta')"),
                ("model.to_empty(device='cpu'), then its values", "reset_parameters(), or load_state_dict(...)"),
            ],
        )


def _check_class(name: str, kind: type) -> None:
    """Raises PlanError for a parameter whose class changes what tensors do. What it adds to them stays; a constructor,
    and what `nn.Parameter` has of its own, are a matter of the object."""
    own = [one for one in kind.__mro__ if issubclass(one, nn.Parameter) and one is not nn.Parameter]
    found = {key: value for one in reversed(own) for key, value in vars(one).items()}
    of_tensors = {key for one in Tensor.__mro__[:-1] for key in vars(one)} - set(vars(nn.Parameter))
    changed = [
        key
        for key, value in found.items()
        if (key in of_tensors and (callable(value) or isinstance(value, property))) or getattr(value, "fset", None)
    ]
    if own and kind.__torch_function__ != nn.Parameter.__torch_function__:
        changed.append("__torch_function__")
    if changed:
        raise PlanError(
            "parallelize",
            f"{name!r} is of the class {kind.__name__}, which changes {changed[0]}: a shard has torch's",
            [f"changed  {', '.join(changed)}"],
            [
                ("a method of another name", "methods, properties without a setter and attributes that it adds stay"),
                ("a function of the parameter", "in place of a method"),
            ],
        )

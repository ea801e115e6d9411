"""The keys and values that a model of transformers keeps for decoding, which nothing reads while it trains.

Its configuration asks for them by default (`use_cache`), so that a step of training fills a cache and throws it away:
the keys and values of every layer are copied, and held until the output is gone. While gradients are recorded and the
model trains, a call that says nothing of a cache is made with `use_cache=False`. In the output stands an object that
says so to whoever asks it for something.

A call is left as it is wherever the output or the numbers could be others than on one device: where the model's own
code says when it fills none (an encoder, or labels beside a decoder: then it fills none without us), where it
recomputes by itself, and where positions come without a mask, which transformers takes for several sequences in a row
only if there is no cache.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from .._calls.chain import add_step
from .._plan.parts import PlanError

SWITCH, CACHE, RECOMPUTES = "use_cache", "past_key_values", "gradient_checkpointing"
READ = (SWITCH, CACHE, "return_dict", "position_ids", "attention_mask")


class UnfilledCache:
    """Stands in an output where the cache would be. Whatever it is asked raises PlanError."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> NoReturn:
        raise PlanError(
            CACHE,
            "a model that trains fills no cache of keys and values: it would hold those of every layer, and be eager",
            (),
            [
                (f"{SWITCH}=True in the call", "the cache is filled, as on one device"),
                ("model.eval(), or torch.no_grad()", "likewise: a call that does not train fills it"),
            ],
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for its protocols: copies and repr are as for any object
            raise AttributeError(name)
        self._refuse()

    __len__ = __iter__ = __getitem__ = __contains__ = _refuse  # type: ignore[assignment]


UNFILLED = UnfilledCache()


def leave_caches_out(model: nn.Module) -> None:
    """Puts a step on the model, or on those of its modules that are models of transformers, where they may fill one."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(not one or name.startswith(f"{one}.") for one in outer):
            continue
        if isinstance(module, library.PreTrainedModel) and SWITCH in inspect.signature(module.forward).parameters:
            outer.append(name)
            models = [one for one in module.modules() if isinstance(one, library.PreTrainedModel)]
            if CACHE in inspect.signature(module.forward).parameters and not any(map(_decides, map(type, models))):
                _Decoding(module, models)


def _decides(kind: type[nn.Module]) -> bool:
    """True if a model's own code turns the cache off, for another reason than that it recomputes."""
    forward: Callable = inspect.unwrap(kind.forward)
    if SWITCH not in forward.__code__.co_varnames:
        return False
    try:
        lines = inspect.getsource(forward)
    except OSError:  # nobody can say
        return True
    waiting: list[ast.AST] = [ast.parse(textwrap.dedent(lines))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assign) and ast.unparse(node) == f"{SWITCH} = False":
            return True
        if not isinstance(node, ast.If) or RECOMPUTES not in ast.unparse(node.test):
            waiting += ast.iter_child_nodes(node)
    return False


class _Decoding:
    """The step of one model of transformers, and of the models in it."""

    def __init__(self, module: nn.Module, models: list[nn.Module]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        self._places = {name: names.index(name) for name in READ if name in names}
        self._recomputing = [one for one in models if hasattr(one, RECOMPUTES)]
        self._left_out = False
        add_step(module, "decoding", self._enter, self._leave)

    def _given(self, name: str, args: tuple, kwargs: dict) -> Any:
        at = self._places.get(name, len(args))
        return args[at] if at < len(args) else kwargs.get(name)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self._left_out = module.training and torch.is_grad_enabled() and self._may_be_left_out(module, args, kwargs)
        if not self._left_out:
            return None
        at = self._places[SWITCH]
        if at < len(args):
            return (*args[:at], False, *args[at + 1 :]), kwargs
        return args, {**kwargs, SWITCH: False}

    def _may_be_left_out(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """True if a training call would fill a cache that nobody asked for, and gives the same without."""
        config = module.config
        asked = config if hasattr(config, SWITCH) else config.get_text_config(decoder=True)
        given = {name: self._given(name, args, kwargs) for name in READ}
        in_tuple = given["return_dict"] is False or (given["return_dict"] is None and not config.return_dict)
        return (
            bool(getattr(asked, SWITCH, False))
            and given[SWITCH] is None
            and given[CACHE] is None
            and not in_tuple  # where a cache has a place of its own
            and (given["position_ids"] is None or given["attention_mask"] is not None)
            and not any(getattr(one, RECOMPUTES) for one in self._recomputing)
        )

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if not self._left_out or not dataclasses.is_dataclass(output):
            return None
        values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        if values.get(CACHE, UNFILLED) is not None:
            return None
        return type(output)(**values | {CACHE: UNFILLED})  # type: ignore[operator]  # anew: keys stand in their order

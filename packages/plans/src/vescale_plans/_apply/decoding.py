"""The keys and values that a model of transformers keeps for decoding, which nothing reads while it trains.

Its configuration asks for them by default (`use_cache`), so that a step of training fills a cache and throws it away:
the keys and values of every layer are copied, and held until the output is gone. An attention that writes to a cache is
no function of its inputs, either, so that static mode leaves it eager. While gradients are recorded and the model
trains, a call that says nothing of a cache is made with `use_cache=False`. In the output stands an object that says so
to whoever asks it for something.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any, NoReturn

import torch
from torch import nn

from .._calls.chain import add_step
from .._plan.parts import PlanError

SWITCH, CACHE = "use_cache", "past_key_values"


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
            _Decoding(module)


class _Decoding:
    """The step of one model of transformers."""

    def __init__(self, module: nn.Module) -> None:
        names = list(inspect.signature(module.forward).parameters)
        self._places = {name: names.index(name) for name in (SWITCH, CACHE, "return_dict") if name in names}
        self._left_out = False
        add_step(module, "decoding", self._enter, self._leave)

    def _given(self, name: str, args: tuple, kwargs: dict) -> Any:
        at = self._places.get(name, len(args))
        return args[at] if at < len(args) else kwargs.get(name)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        config = module.config.get_text_config(decoder=True)
        self._left_out = (
            module.training
            and torch.is_grad_enabled()
            and bool(getattr(config, SWITCH, False))
            and all(self._given(name, args, kwargs) is None for name in (SWITCH, CACHE))
            and self._given("return_dict", args, kwargs) is not False  # a cache has a place of its own in a tuple
        )
        if not self._left_out:
            return None
        at = self._places[SWITCH]
        if at < len(args):
            return (*args[:at], False, *args[at + 1 :]), kwargs
        return args, {**kwargs, SWITCH: False}

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if not self._left_out or not dataclasses.is_dataclass(output):
            return None
        values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        if values.get(CACHE, UNFILLED) is not None:
            return None
        return type(output)(**values | {CACHE: UNFILLED})  # type: ignore[operator]  # anew: keys stand in their order

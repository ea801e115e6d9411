"""Compares a first step's traffic with what the plan's cut weights need: a word in the log, if it is too much.

Counted are the collectives of the first forward and those of its backward, but for gradient syncs and gathers of
sharded parameters; a loss outside of the model is not seen. After the first step nothing of this is left on the model.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from typing import Any

from torch import Tensor, nn

from vescale_dtensor.engine import ASKED, Event, cut_last, mesh_of, value_number, watched
from vescale_trace.values import tensors_in

from .._calls.chain import add_step
from .._plan.least import least_collectives, open_sums
from .._torch_private import DisableTorchFunction, queue_callback
from ..plan import Plan

MUCH, OPEN = 2.0, 1.25
"""Times the least that are worth a word: of any plan, and of one that leaves sums open."""

_log = logging.getLogger("vescale")


def watch_first_step(model: nn.Module, plan: Plan) -> None:
    """See the module. A plan whose cut weights need nothing is not watched, nor is a model without values."""
    if not any(parameter.is_meta for parameter in model.parameters()) and least_collectives(plan, model):
        FirstStep(model, plan)


class FirstStep:
    """A step of the root module for its first call, and of what that gives."""

    def __init__(self, root: nn.Module, plan: Plan) -> None:
        self._root, self._plan = root, plan
        self._names = {module: name for name, module in root.named_modules()}
        self._calls: Counter[str] = Counter()
        self._reads: dict[str, dict[int, tuple[str, ...]]] = {}
        self._sent = 0
        self._open = contextlib.ExitStack()
        self._hooks = [add_step(root, "traffic", self._enter, self._leave)]

    def _enter(self, root: nn.Module, args: tuple, kwargs: dict) -> None:
        self._hooks[0].remove()
        self._open.enter_context(watched(self._hear, lambda event: None))
        self._open.callback(nn.modules.module.register_module_forward_pre_hook(self._count).remove)

    def _leave(self, root: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self._open.close()
        tensors = tensors_in(output)
        with DisableTorchFunction():
            nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        self._hooks = [node.register_prehook(self._begin_backward) for node in nodes]
        if tensors and not nodes:
            self._say(backward=False)

    def _begin_backward(self, gradients: Any) -> None:
        """Begins at the first gradient of what the model gave."""
        for hook in self._hooks:
            hook.remove()
        self._open.enter_context(watched(self._hear, lambda event: None))
        queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._open.close()
        self._say(backward=True)

    def _count(self, module: nn.Module, args: tuple) -> None:
        if module in self._names:
            name = self._names[module]
            self._calls[name] += 1
            if args and isinstance(args[0], Tensor):
                self._reads.setdefault(name, {})[value_number(args[0])] = cut_last(args[0])

    def _hear(self, event: Event) -> None:
        if event.cause.function not in ASKED:
            self._sent += event.count

    def _say(self, backward: bool) -> None:
        least = least_collectives(self._plan, self._root, self._calls, self._reads, backward=backward)
        left = open_sums(self._plan, self._root)
        if any(mesh_of(self._root._vescale.device_mesh).coordinate) or self._sent <= (OPEN if left else MUCH) * least:
            return
        partial = ""
        if left:
            globs = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in left))
            more = f" and {len(globs) - 3} more" if len(globs) > 3 else ""
            partial = (
                f" What {', '.join(globs[:3])}{more} give stays a sum of parts, which each reader adds up: "
                f"parallelize(plan.complete(model, batch), ...) saves up to {self._sent - least}."
            )
        _log.warning(
            "the model's first %s sent %d collectives, and the plan's cut weights need %d.%s Each line and its cause: "
            "vescale.comm_trace(model) as trace, then print(trace.advice())",
            "step" if backward else "forward", self._sent, least, partial,
        )  # fmt: skip

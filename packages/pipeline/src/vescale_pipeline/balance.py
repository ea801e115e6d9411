"""balanced_cuts: where to cut a model so that its dearest stage is as cheap as can be.

The cost of each module that may begin a stage is found in one run of a batch, forward
and backward: by a dry run on fake tensors, which adds up what every operator computes
and moves, or by the clock. What lies between two such modules counts for the one before.
Then the cuts are the best that there are: the largest stage as small as possible, and
among those the most even.

Modules that may begin a stage are a model's blocks (the members of its lists) and what
stands beside them: embeddings, the last norm, the head. No cost is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from vescale_trace.meter import flops_of
from vescale_trace.values import map_tensors, tensors_in

from ._errors import PipelineError
from ._runtime.loss import loss_in
from ._torch_private import FakeTensorMode, TorchDispatchMode
from ._trace.memory import kept_as_it_was

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
FLOPS_PER_BYTE = 150.0
"""Operations that an accelerator computes while it moves a byte of its memory: an A100 in bfloat16, 312e12 / 2.0e12."""


def balanced_cuts(
    model: nn.Module, stages: int, batch: Any, *, measured: bool = False, flops_per_byte: float = FLOPS_PER_BYTE
) -> tuple[str, ...]:
    """Returns the names of the modules that begin stages 1, 2, ...: the `cuts` of a Pipeline.

    Call it before `parallelize`, either on every rank or on one. Dry runs compute no values, so all ranks find the same
    cuts. Measured times differ between ranks: measure on one rank and keep the names in the plan.

    Arguments:
        stages: the number of stages, including virtual ones.
        batch: of the size of one microbatch; a tuple of the model's arguments, a mapping of its keyword arguments, or
            its only argument.
        measured: time three steps on the model's own device, and use the fastest, instead of a dry run.
        flops_per_byte: in a dry run, an operator costs the larger of computing and of moving its operands.

    Gradients and buffers are left unchanged. Raises PipelineError if there are fewer modules than stages.

    Example:
        >>> cuts = balanced_cuts(model, 4, {"input_ids": ids, "labels": ids})
        >>> plan = plan.override(pipeline=Pipeline(cuts=cuts, microbatches=16))
    """
    costs = module_costs(model, batch, measured=measured, flops_per_byte=flops_per_byte)
    names = list(costs)
    if len(names) < stages:
        raise PipelineError(
            "balanced_cuts",
            f"{stages} stages of {len(names)} modules",
            [f"modules  {', '.join(names) or 'none'}"],
            [(f"stages={max(1, len(names))}", "a module per stage")],
        )
    return tuple(names[begin] for begin in best_cuts(list(costs.values()), stages))


def module_costs(
    model: nn.Module, batch: Any, *, measured: bool = False, flops_per_byte: float = FLOPS_PER_BYTE
) -> dict[str, float]:
    """Cost of every module that may begin a stage, forward and backward, in the order of the forward.

    In seconds if `measured`, otherwise in bytes. Arguments as of `balanced_cuts`.
    """
    names = candidates(model)
    if measured:
        with kept_as_it_was(model):
            steps = [_Clock(names).run(model, batch) for _ in range(3)]
        return {name: min(step[name] for step in steps) for name in steps[0]}
    with kept_as_it_was(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return _Counter(names, flops_per_byte).run(model, map_tensors(batch, mode.from_tensor))


def candidates(model: nn.Module) -> dict[nn.Module, str]:
    """The modules that may begin a stage, by registration, each with its name."""
    found = {module: name for name, module in _walk("", model, isinstance(model, _LISTS))}
    return {module: name for module, name in found.items() if next(module.parameters(), None) is not None}


def _walk(prefix: str, module: nn.Module, in_list: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_list = isinstance(child, _LISTS)
        if is_list or not in_list and any(isinstance(inner, _LISTS) for inner in child.modules()):
            yield from _walk(f"{path}.", child, is_list)
        else:
            yield path, child


def best_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the beginnings of stages 1, 2, ... begin: the dearest stage as cheap as possible, then the sum of squares
    as small."""
    sums = [0.0, *accumulate(costs)]
    # Per number of stages: end -> (dearest stage, sum of squares, where the last stage begins), of the first `end`.
    best = [{end: (sums[end], sums[end] ** 2, 0) for end in range(1, len(sums))}]
    for number in range(1, stages):
        before, following = best[-1], {}
        for end in range(number + 1, len(sums)):
            following[end] = min(
                (max(before[begin][0], cost), before[begin][1] + cost**2, begin)
                for begin in range(number, end)
                for cost in [sums[end] - sums[begin]]
            )
        best.append(following)
    begins, end = [], len(costs)
    for of_number in reversed(best[1:]):
        end = of_number[end][2]
        begins.append(end)
    return begins[::-1]


class _Meter:
    """Charges what happens to the module that began last; in the backward, to the one whose output got its gradient."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = names
        self.costs: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._current: str | None = None

    def run(self, model: nn.Module, batch: Any) -> dict[str, float]:
        """Costs by name. What cannot begin a stage counts for the one before: a module that runs twice, or that runs
        in another place than it was registered in."""
        hooks = [module.register_forward_pre_hook(self._enter) for module in self._names]
        hooks += [module.register_forward_hook(self._leave) for module in self._names]
        try:
            with torch.enable_grad():
                self._run_model(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        costs: dict[str, float] = {}
        places = {name: place for place, name in enumerate(self._names.values())}
        last = None
        for name, cost in self.costs.items():
            if last is None or self._calls[name] == 1 and places[name] > places[last]:
                last = name
                costs[name] = 0.0
            costs[last] += cost
        return costs

    def _run_model(self, model: nn.Module, batch: Any) -> None:
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, tuple) else model(batch)
        loss: Any = loss_in(output)
        if loss is None:
            loss = sum(tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if isinstance(loss, Tensor) and loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)
        self.switch(None)

    def switch(self, name: str | None) -> None:
        """Charges costs to the module `name` from here on."""
        if name is not None:
            self.costs.setdefault(name, 0.0)
        self._current = name

    def _enter(self, module: nn.Module, args: tuple) -> None:
        name = self._names[module]
        self._calls[name] = self._calls.get(name, 0) + 1
        self.switch(name)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        name = self._names[module]
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.switch(name))


class _Clock(_Meter):
    """Measures by the clock."""

    _since = 0.0

    def switch(self, name: str | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = perf_counter()
        if self._current is not None:
            self.costs[self._current] += now - self._since
        super().switch(name)
        self._since = perf_counter()


class _Counter(_Meter, TorchDispatchMode):
    """Measures by what operators compute and move."""

    def __init__(self, names: Mapping[nn.Module, str], flops_per_byte: float) -> None:
        _Meter.__init__(self, names)
        TorchDispatchMode.__init__(self)
        self._flops_per_byte = flops_per_byte

    def _run_model(self, model: nn.Module, batch: Any) -> None:
        with self:
            super()._run_model(model, batch)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self._current is not None and not function.is_view:
            computed = flops_of(function.overloadpacket, args, kwargs, out)
            moved = sum(tensor.nbytes for tensor in (*tensors_in((args, kwargs)), *tensors_in(out)))
            self.costs[self._current] += max(computed / self._flops_per_byte, moved)
        return out

"""Forwards of a copy of a model without weights, on rows that are all the same sample, each watched by a `Probe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor.engine import flex_formulas

from ..progress import Bar
from .blocks import Chain, hand_on
from .calls import Key
from .model import OnOneDevice, on_meta, paths, plain_kernels, values_kept
from .operands import Operands
from .run import Enough, Probe
from .sample import Sample


class Forwards:
    """Runs `model` as often as it is asked to; nothing of the model is changed.

    Arguments:
        chains: whose later blocks stand in for their like.
        note: sees what modules take and return in forwards in which a row is followed: name, arguments, output.

    Attributes:
        silent: calls that reach nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        chains: Sequence[Chain],
        note: Callable[[str, Any, Any], None],
        bar: Bar,
    ) -> None:
        self.sample, self.silent = sample, frozenset[Key]()
        self._note, self._bar = note, bar
        self._values: dict[tuple[int, ...], Tensor] = {}
        stand_ins = {name: like for chain in chains for name, like in chain.skipped.items()}
        self.model = on_meta(model, stand_ins).eval()
        self.operands = Operands(self.model.named_parameters(), _biases(self.model))
        self._recurrent = any(isinstance(one, nn.RNNBase) for one in self.model.modules())
        self._watched = [(name, one) for name, one in self.model.named_modules() if name not in stand_ins]
        hand_on(self.model, chains)

    def followed(self, rows: int) -> Probe:
        """The first forward. A sample of equal integers is made to differ in one tensor after the other, until some
        contraction shows which rows are row 1's."""
        first = self.run(rows, follow=True)
        for moved in range(self.sample.alike):
            if any(call.outer is not None or call.coupled for call in first.calls.values()):
                break
            first = self.run(rows, follow=True, moved=moved)
        return first

    def run(self, batch: int, *, follow: bool = False, moved: int | None = None, **settings: Any) -> Probe:
        """One forward of so many rows; `settings` are the probe's."""
        args, kwargs = self.sample.repeat(batch, follow=follow, moved=moved)
        probe = Probe(self.operands, batch, silent=self.silent, values=self._values, **settings)
        with ExitStack() as stack:
            if follow or probe.seed:  # else no call is new: none asks for the modules that are running
                stack.enter_context(paths(self._watched, probe.path, self._note if follow else None))
            stack.enter_context(plain_kernels())
            stack.enter_context(values_kept(self.model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(flex_formulas())
            stack.enter_context(probe)
            stack.enter_context(OnOneDevice(self.operands, self._recurrent))
            with suppress(Enough):
                self.model(*args, **kwargs)
        self._bar.tick("probing the model")
        return probe


def _biases(model: nn.Module) -> dict[str, str]:
    """Weight -> bias of modules that add it to their product, be it in one operator or in two: a linear layer's are two
    where its input does not lie in order."""
    linear = ((name, one) for name, one in model.named_modules() if type(one).forward is nn.Linear.forward)
    return {f"{name}.weight": f"{name}.bias" for name, one in linear if one.bias is not None}

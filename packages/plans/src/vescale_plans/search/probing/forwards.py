"""Forwards of a copy of a model without weights, on rows that are all the same sample, each watched by a `Probe`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from traceback import format_exception_only, walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import InternalError, VescaleError
from vescale_dtensor.engine import flex_formulas, user_line

from ..._apply.generators import seeded_for
from ..._plan.parts import PlanError
from ..progress import Bar
from ..structure import Blocks
from .blocks import hand_on, skipped
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
        chains: Sequence[Blocks],
        note: Callable[[str, Any, Any], None],
        bar: Bar,
    ) -> None:
        self.sample, self.silent = sample, frozenset[Key]()
        self._note, self._bar = note, bar
        self._values: dict[tuple[int, ...], Tensor] = {}
        stand_ins = skipped(chains)
        self.model = on_meta(model, stand_ins).eval()
        self.operands = Operands(self.model.named_parameters(), _biases(self.model))
        self._recurrent = any(isinstance(one, nn.RNNBase) for one in self.model.modules())
        self._watched = [(name, one) for name, one in self.model.named_modules() if name not in stand_ins]
        hand_on(self.model, chains)

    def followed(self, rows: int) -> Probe:
        """The first forward. Row 1's integers differ as far as the model runs so (`Sample.turnings`). A sample of equal
        integers is made to differ in one tensor after the other, until some contraction shows which rows are row
        1's."""
        first: Probe | None = None
        failed: Exception | None = None
        done: set[int] = set()
        for turned in self.sample.turnings:
            if first is not None and (_is_seen(first) or not set(turned) > done):
                continue
            try:
                first, done = self.run(rows, follow=True, turned=turned), set(turned)
            except Exception as error:
                failed = failed or error
                continue
            for moved in range(self.sample.alike):
                if _is_seen(first):
                    break
                first = self.run(rows, follow=True, turned=turned, moved=moved)
        if first is None:
            raise failed
        return first

    def run(
        self,
        batch: int,
        *,
        follow: bool = False,
        turned: Collection[int] = (),
        moved: int | None = None,
        **settings: Any,
    ) -> Probe:
        """One forward of so many rows; `settings` are the probe's."""
        args, kwargs = self.sample.repeat(batch, follow=follow, turned=turned, moved=moved)
        probe = Probe(self.operands, batch, silent=self.silent, values=self._values, **settings)
        with ExitStack() as stack:
            if follow or probe.seed:  # else no call is new: none asks for the modules that are running
                stack.enter_context(paths(self._watched, probe.path, self._note if follow else None))
            alike = seeded_for(0, 0)  # a plan, and each rank's, is one whatever was drawn before
            modes = flex_formulas(), probe, OnOneDevice(self.operands, self._recurrent)
            for one in (alike, plain_kernels(), values_kept(self.model), torch.no_grad(), *modes):
                stack.enter_context(one)
            with suppress(Enough):
                try:
                    self.model(*args, **kwargs)
                except (Enough, VescaleError, InternalError):
                    raise
                except Exception as error:  # the model's own code met what no call of the user's gives it
                    raise _failed(type(self.model).__name__, batch, error) from error
        self._bar.tick("probing the model")
        return probe


def _is_seen(first: Probe) -> bool:
    """True if some contraction shows which rows are row 1's."""
    return any(call.outer is not None or call.coupled for call in first.calls.values())


def raised(error: BaseException) -> str:
    """Type and text of an exception, in one line."""
    return format_exception_only(error)[0].strip().partition("\n")[0]


def _failed(name: str, rows: int, error: Exception) -> PlanError:
    """Builds the error for a forward that raised, whatever the exception."""
    place = next(filter(None, map(_users, reversed(list(walk_tb(error.__traceback__))))), None)
    return PlanError(
        "generate_plan",
        f"{name}.forward raised on a batch that the planner made: the sample's first row {rows} times, with NaN "
        "in some places, and numbers of the planner's for what products with parameters give",
        [f"raised  {raised(error)}", *([f"at      {place}"] if place else [])],
        [
            (
                "sample=...",
                "of one row, in which integers that name places (rows, nodes) name places of that row alone",
            ),
            ('vescale.Plan(mesh={"dp": 2}, parameters={"*": {}})', "a plan by hand: no forward is run for it"),
            ("model(...)", "of the same sample, on one device: what it raises there too is not the planner's"),
        ],
    )


def _users(step: tuple[FrameType, int]) -> str | None:
    """The line of one step of a traceback, if it is neither torch's nor ours."""
    frame, line = step
    file = frame.f_code.co_filename
    return f"{file}:{line}" if user_line(frame).rpartition(":")[0] == file else None


def _biases(model: nn.Module) -> dict[str, str]:
    """Weight -> bias of modules that add it to their product, be it in one operator or in two: a linear layer's are two
    where its input does not lie in order."""
    linear = ((name, one) for name, one in model.named_modules() if type(one).forward is nn.Linear.forward)
    return {f"{name}.weight": f"{name}.bias" for name, one in linear if one.bias is not None}

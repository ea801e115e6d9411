"""Explains the choice of a plan: the next best, what binds each of them, and why every block is as it is."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._plan.table import amount
from .decision import Against, against
from .explain_html import page
from .pricing.hardware import GIB
from .structure import Group as Split
from .weighed import Weighed

if TYPE_CHECKING:  # rich is imported where something is shown: `import vescale` is to be quick
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

WIDTH = 120


@dataclass(frozen=True)
class BlockReason:
    """Blocks in a row that are treated alike.

    Arguments:
        names: of the blocks.
        stage: of the pipeline.
        again: they are computed again in backward, or the modules of them that `Candidate.inside` names.
        reasons: one line for each of their groups.
    """

    names: tuple[str, ...]
    stage: int
    again: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Explanation(Weighed):
    """All that `generate_plan` weighed. Prints as tables, in a rich console too."""

    @cached_property
    def blocks(self) -> tuple[BlockReason, ...]:
        """Per run of blocks that are treated alike, why."""
        structure, again = self.request.structure, set(self.chosen.again)
        starts, stage = set(self.chosen.cuts), 0
        made: list[BlockReason] = []
        groups = _groups_by_block(structure.block_names, structure.groups)
        for name in structure.block_names:
            stage += name in starts
            reasons = tuple(dict.fromkeys(self._reason(group) for group in groups.get(name, ())))
            last = made[-1] if made else None
            if last is not None and (last.stage, last.again, last.reasons) == (stage, name in again, reasons):
                made[-1] = BlockReason((*last.names, name), stage, last.again, reasons)
            else:
                made.append(BlockReason((name,), stage, name in again, reasons))
        return tuple(made)

    def _reason(self, group: Split) -> str:
        tp = self.chosen.candidate.tp
        kind = "experts" if group.experts else "attention" if group.positions_meet else "feed-forward"
        if group.experts and self.chosen.candidate.ep > 1:
            kind = f"{group.experts} experts over {self.chosen.candidate.ep} ranks"
        if tp == 1:
            return f"{kind}: whole, there is no tensor axis"
        if placed := group.split(tp):
            whole = [one.parameter for one in group.sources if one.parameter not in placed and not one.companion]
            kept = f"; {', '.join(map(_leaf, whole))} whole: fewer atoms than {tp}" if whole else ""
            return f"{kind}: {group.features} features in {group.atoms} atoms, {tp} ways{kept}"
        if group.gathered(tp):
            return f"{kind}: weights {tp} ways, what they give is gathered: {group.atoms} atoms do not divide by {tp}"
        return f"{kind}: whole, {group.atoms} atoms do not divide by {tp}"

    # -------------------------------------------------------------------- text

    def against(self, pin: Mapping[str, Any]) -> Against:
        """Prices {"tp": 8}, or any other settings as in `pin`, and says where they lose; prints as lines.

        Raises InfeasibleError where no candidate has them, PlanError for a name that is none.
        """
        found = against(self.request, self.chosen, pin)
        return replace(found, peak=dict(self.demoted).get(found.other.candidate))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.console import Group
        from rich.text import Text

        yield Group(Text("\n".join(self.headline())), *self._tables())

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def _tables(self) -> Iterator[Table]:
        from rich.table import Table

        table = Table(title="the choice, and the next best, by formula", title_justify="left")
        for name in ("", "plan", "s/step", "GiB", "what binds", "loses"):
            justify = "right" if name in ("s/step", "GiB") else "left"
            most = 12 if name in ("what binds", "loses") else None  # so that plans have 25 of 80
            table.add_column(name, justify=justify, overflow="fold", max_width=most)  # no setting is cut off
        for place, one in enumerate(self.ranked):
            seconds, size = f"{one.cost.total:.4g}", _gib(one.memory.total, 2)
            plan = str(one.candidate).replace("+", "+ ").replace("checkpointing=", "checkpointing= ")  # parted there
            table.add_row(str(place + 1), plan, seconds, size, self.binds(one), self.loses(one))
        yield table
        table = Table(title="where the choice spends time and memory", title_justify="left")
        for name in ("s/step", "", "GiB", ""):
            table.add_column(name)
        times = [(name, f"{value:.4g}") for name, value in asdict(self.chosen.cost).items() if value]
        sizes = [(name, _gib(value, 3)) for name, value in asdict(self.chosen.memory).items() if value]
        for at in range(max(len(times), len(sizes))):
            left = times[at] if at < len(times) else ("", "")
            right = sizes[at] if at < len(sizes) else ("", "")
            table.add_row(*left, *right)
        yield table
        if self.blocks:
            table = Table(title="per block, why", title_justify="left")
            for name in ("blocks", "stage", "why"):
                table.add_column(name)
            for one in self.blocks:
                which = f", {', '.join(inside)} alone" if (inside := self.chosen.candidate.inside) else ""
                size = f"{amount(self.chosen.memory.total)} of {amount(self.request.limit)}"
                yes = f"computed again{which}: {size} so"
                why = (*one.reasons, yes) if one.again else one.reasons
                table.add_row(_range(one.names), str(one.stage), "\n".join(why) or "nothing to split")
            yield table

    def write_html(self, path: str | Path) -> Path:
        """A page that needs no other file: memory and time as bars, the front of time against memory, the mesh."""
        written = Path(path)
        written.write_text(page(self, str(self)))
        return written


def _groups_by_block(names: Sequence[str], groups: Sequence[Split]) -> dict[str, list[Split]]:
    known, found = set(names), {}
    for group in groups:
        pieces = group.sink.split(".")
        for size in range(1, len(pieces)):
            if (name := ".".join(pieces[:size])) in known:
                found.setdefault(name, []).append(group)
                break
    return found


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rpartition('.')[2]}"


def _leaf(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _gib(size: float, digits: int) -> str:
    """Formats GiB; small amounts by their first digits."""
    return f"{size / GIB:.{digits}f}" if size >= GIB / 20 else f"{size / GIB:.2g}"

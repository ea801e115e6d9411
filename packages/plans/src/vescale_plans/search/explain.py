"""Explains the choice of a plan: the next best, what binds each of them, and why every block is as it is."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._plan.table import amount
from .decision import Against, against
from .explain_html import page
from .pricing.hardware import GIB
from .pricing.sizes import inside_of
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
        names, inside = structure.block_names, inside_of(structure)
        starts = [names.index(cut) for cut in self.chosen.cuts]

        def treated(at: int) -> tuple[int, bool, tuple[str, ...]]:
            groups = (group for group in structure.groups if inside.get(group.sink) == at)
            return bisect_right(starts, at), names[at] in again, tuple(dict.fromkeys(map(self._reason, groups)))

        runs = groupby(range(len(names)), treated)
        return tuple(BlockReason(tuple(names[at] for at in run), *alike) for alike, run in runs)

    def _reason(self, group: Split) -> str:
        tp = self.chosen.candidate.tp
        kind = "experts" if group.experts else "attention" if group.positions_meet else "feed-forward"
        if group.experts and self.chosen.candidate.ep > 1:
            kind = f"{group.experts} experts over {self.chosen.candidate.ep} ranks"
        if tp == 1:
            return f"{kind}: whole, there is no tensor axis"
        if placed := group.split(tp):
            whole = [one.parameter for one in group.sources if one.parameter not in placed and not one.companion]
            leaves = ", ".join(".".join(name.split(".")[-2:]) for name in whole)
            kept = f"; {leaves} whole: fewer atoms than {tp}" if whole else ""
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
        for left, right in zip_longest(times, sizes, fillvalue=("", "")):
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


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rpartition('.')[2]}"


def _gib(size: float, digits: int) -> str:
    """Formats GiB; small amounts by their first digits."""
    return f"{size / GIB:.{digits}f}" if size >= GIB / 20 else f"{size / GIB:.2g}"

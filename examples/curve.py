"""The losses of a run, kept beside its checkpoint, and drawn beside those of another run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from comparison import Comparison
from flags import Flags


def read_losses(folder: Path | None) -> list[float]:
    """What `keep_losses` wrote; of no folder, none."""
    return [] if folder is None else json.loads((folder / "losses.json").read_text())["losses"]


def keep_losses(flags: Flags, name: str, losses: list[float]) -> None:
    """Writes losses.json, and losses.png where `--against` names a run; rank 0 alone does."""
    if int(os.environ.get("RANK", 0)):
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "losses.json").write_text(json.dumps({"layout": flags.layout, "losses": losses}) + "\n")
    print(f"{name}, {flags.layout}: loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps; {flags.out}")
    if flags.against is None:
        return
    from report import plot, verdict  # here: it takes matplotlib, which training does not

    one = read_losses(flags.against)
    common = min(len(one), len(losses))
    runs = Comparison(name, name, flags.layout, tuple(one[:common]), tuple(losses[:common]))
    plot(flags.out / "losses.png", [runs])
    print(verdict(runs))

"""(f) `vescale calibrate` on this machine's devices."""

from __future__ import annotations

import json
from typing import Any

from vescale.calibrate import calibrate

from .part import Part, run


def profile(ranks: int) -> dict[str, Any]:
    return json.loads(calibrate(ranks=ranks, rounds=3).to_json())


def ask(part: Part) -> None:
    ranks = max(1, min(part.devices, 8)) if part.device == "cuda" else 1
    part.each(f"{ranks} ranks", lambda: profile(ranks))


if __name__ == "__main__":
    run(ask)

"""`vescale calibrate`: measures this machine, and writes the profile that plans are made for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vescale_plans.search import Hardware
from vescale_plans.search.pricing.profiles import calibrated_path

from ..calibrate import calibrate as _calibrate


def calibrate(
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Processes that measure at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="How often each thing is measured.")] = 7,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help='The profile, .json; by default the one "auto" reads.')
    ] = None,
) -> None:
    """Measures matrix products, operators, memory and collectives of this machine for generate_plan and dry_run."""
    path = out or calibrated_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = _calibrate(ranks, rounds=rounds, progress=lambda text: typer.echo(text, err=True))
    path.write_text(profile.to_json())
    for line in _report(profile):
        typer.echo(line)
    typer.echo(f"{'written':<15}{path}")


def _report(profile: Hardware) -> list[str]:
    rows = [
        ("device", profile.device),
        ("products", f"{profile.flops / 1e9:,.0f} GFLOP/s for large ones"),
        ("memory", f"{profile.bandwidth / 1e9:,.1f} GB/s read and written, {profile.memory / 2**30:,.1f} GiB"),
        ("host", f"{profile.host * 1e6:,.1f} us per operator"),
        ("hidden", f"{profile.hidden:.0%} of a collective beside products"),
    ]
    if profile.waits is not None:
        computed, waited = profile.waits.points[-1]
        rows.append(("waits", f"{waited / computed:.1%} of {computed:.2f} s of computation, for the slowest rank"))
    for kind, curves in profile.collectives.items():
        for ranks, curve in curves.items():
            size, seconds = curve.points[-1]
            first = curve.points[0][1] * 1e6
            rows.append((kind, f"{ranks} ranks: {first:,.0f} us, {size / seconds / 1e9:,.2f} GB/s received at most"))
    return [f"{name:<15}{fact}" for name, fact in rows]

"""Points: a case on a mesh, predicted and measured; how well the two agree, and what the choice loses."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from planning.predicted_cases import MESHES, adamw, case_of, shape_of, structure_for
from planning.predicted_steps import Round, calm, settled, spread


def ranks_of(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [0.0] * len(values)
    for place, i in enumerate(order):
        places[i] = float(place)
    return places


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; no two values are equal here."""
    x, y = ranks_of(a), ranks_of(b)
    n = len(x)
    return 1 - 6 * sum((i - j) ** 2 for i, j in zip(x, y)) / (n * (n * n - 1))


def predicted(ranks: int, profile: Path, cases) -> dict:
    """(case, mesh) -> seconds by a dry run priced on the profile, and by the planner's closed form."""
    from vescale import predict
    from vescale_plans.search import Candidate, cost_of, hardware_of, plan_of, sizes_of

    hardware, found = hardware_of(profile), {}
    for case in cases:
        model, batch = case_of(case, ranks)
        structure = structure_for(model, batch)
        _, rows, positions = shape_of(case)
        for mesh, degrees in MESHES[ranks].items():
            candidate = Candidate(**degrees)
            prediction = predict(plan_of(structure, candidate), model, batch, hardware, adamw)
            closed = cost_of(sizes_of(structure, candidate.tp), candidate, hardware, rows, positions)
            found[case, mesh] = {
                "predicted": prediction.seconds, "closed form": closed.total,
                "spent": {name: round(value, 5) for name, value in prediction.spent.items()},
            }  # fmt: skip
    return found


def add_measured(points: dict, measured: dict[str, list[Round]]) -> dict:
    """The points of the cases that were measured."""
    for case, rounds in measured.items():
        seconds, undisturbed, off = settled(rounds), calm(rounds), round(spread(rounds), 4)
        for mesh in seconds:
            foreign = median(one[mesh][1] for one in undisturbed)
            point = {"measured": seconds[mesh], "rounds": len(undisturbed), "foreign": round(foreign, 2), "spread": off}
            points[case, mesh].update(point)
    return {key: point for key, point in points.items() if "measured" in point}


def judged(points: dict, cases, way: str) -> dict:
    """Over all points; and the worst case's loss by the choice."""
    errors = [abs(point[way] / point["measured"] - 1) for point in points.values()]
    regrets, within = {}, {}
    for case in cases:
        rows = {mesh: point for (one, mesh), point in points.items() if one == case}
        chosen = min(rows, key=lambda mesh: rows[mesh][way])
        best = min(point["measured"] for point in rows.values())
        regrets[case] = round(rows[chosen]["measured"] / best - 1, 4)
        within[case] = round(spearman([p[way] for p in rows.values()], [p["measured"] for p in rows.values()]), 3)
    return {
        "spearman": round(spearman([p[way] for p in points.values()], [p["measured"] for p in points.values()]), 4),
        "median error": round(median(errors), 4),
        "worst error": round(max(errors), 4),
        "regret": max(regrets.values()),
        "regrets": regrets,
        "spearman within cases": within,
    }


def draw(points: dict, ranks: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 5))
    meshes = sorted({mesh for _, mesh in points})
    for mesh in meshes:
        own_points = [point for (_, one), point in points.items() if one == mesh]
        axes.scatter([p["measured"] for p in own_points], [p["predicted"] for p in own_points], s=22, label=mesh)
    low = 0.8 * min(min(p["measured"], p["predicted"]) for p in points.values())
    high = 1.2 * max(max(p["measured"], p["predicted"]) for p in points.values())
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.fill_between([low, high], [0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high], color="0.9", zorder=0)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured seconds per step", ylabel="predicted", title=f"{ranks} gloo ranks, CPU; band: 15 %")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)

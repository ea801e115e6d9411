"""Peak memory of random plans: a dry run's against the live storage bytes of real runs; and whether the collectives
that it counts are those that the run issues, one by one."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median

import torch

from predicted_cases import MODELS, adamw, case_of, loss_of, shape_of, structure_for
from vescale_dtensor.testing import run_ranks, warm_up


def lived(case: str, text: str) -> tuple[int, list, int]:
    """Of the second step on this rank: peak of live storage bytes, collectives, floating point operations."""
    import vescale
    from vescale_plans._meter import Meter

    model, batch = case_of(case, torch.distributed.get_world_size())
    meter = Meter()
    model, optimizer = vescale.parallelize(vescale.Plan.from_json(text), model, adamw)
    meter.label([*model.parameters(), *model.buffers()], "parameters")
    with vescale.comm_trace(model) as trace, meter:
        for _ in range(2):
            trace.events.clear()
            meter.mark()
            meter.kind = "activations"
            loss = loss_of(model, batch)
            meter.kind = "gradients"
            loss.backward()
            del loss
            meter.kind = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak.total(), issued(trace.events), meter.flops


def issued(events) -> list[tuple]:
    return [
        (e.kind, e.axes, e.cause.function, e.cause.module, e.cause.direction)
        for e in events
        if e.count and e.cause.function != "check_agreement"
    ]


def random_plans(count: int, seed: int = 0):
    """(case, candidate), each once: any mesh of 2 or 4 ranks without a pipeline, any ZeRO stage, recomputation."""
    from vescale_plans.search import Candidate

    dice, found = random.Random(seed), {}
    while len(found) < count:
        tp, dp = dice.choice(((1, 2), (2, 1), (1, 4), (2, 2), (4, 1)))
        degrees = {
            "tp": tp, "dp": dp, "sp": tp > 1 and dice.random() < 0.5, "zero": dice.randrange(4) if dp > 1 else 0,
            "checkpointing": dice.random() < 0.5,
        }  # fmt: skip
        sizes = dice.choice((64, 128, 256)), dice.choice((4, 8)), dice.choice((32, 64, 128))
        case = " ".join((dice.choice(list(MODELS)), *map(str, sizes)))
        found[case, Candidate(**degrees)] = None
    return list(found)


def memory(folder: Path, count: int, limit: float) -> int:
    """Adds to memory.json in `folder` for `limit` seconds at most. The status: 1 if plans are missing, or bad."""
    from vescale_plans import dry_run
    from vescale_plans.search import hardware_of, memory_of, plan_of, sizes_of

    warm_up("torch._dynamo", "vescale", "transformers")
    path = folder / "memory.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text())["plans"] if path.exists() else []
    until, known = time.perf_counter() + limit, {(row["case"], row["plan"]) for row in rows}
    for case, candidate in random_plans(count):
        if (case, str(candidate)) in known or time.perf_counter() > until:
            continue
        model, batch = case_of(case, 2)
        structure = structure_for(model, batch)
        plan = plan_of(structure, candidate)
        dry = dry_run(plan, model, batch, adamw, backend="gloo")
        given = (case, plan.to_json())
        real = run_ranks(plan.world_size, lived, *given, timeout=120)
        peak = max(one[0] for one in real)
        _, batch_rows, positions = shape_of(case)
        closed = memory_of(sizes_of(structure, candidate.tp), candidate, hardware_of("cpu"), batch_rows, positions)
        rows.append(
            {
                "case": case, "plan": str(candidate), "measured": peak, "dry run": dry.peak,
                "error": round(dry.peak / peak - 1, 5), "closed form": round(closed.total / peak - 1, 4),
                "collectives agree": issued(dry.collectives) == real[0][1], "operations agree": dry.flops == real[0][2],
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        record = summed(rows)
        path.write_text(json.dumps({**record, "plans": rows}, indent=1) + "\n")
    record = summed(rows)
    print(json.dumps(record))
    met = record["mean error"] <= 0.03 and record["most under"] <= 0.02 and record["collectives agree"] == len(rows)
    return int(not met or len(rows) < count)


def summed(rows: list[dict]) -> dict:
    errors = [row["error"] for row in rows]
    return {
        "plans of": len(rows), "mean error": round(sum(map(abs, errors)) / len(rows), 5),
        "most under": round(max(0.0, -min(errors)), 5), "most over": round(max(0.0, max(errors)), 5),
        "closed form, median error": round(median(abs(row["closed form"]) for row in rows), 3),
        "collectives agree": sum(row["collectives agree"] for row in rows),
        "operations agree": sum(row["operations agree"] for row in rows),
    }  # fmt: skip

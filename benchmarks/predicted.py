"""Predicted against measured: a training step of every mesh of data, tensor, sequence and pipeline parallelism on gloo.

    vescale calibrate --ranks 2 --out PROFILE.json
    python benchmarks/predicted.py measure --ranks 2 --case NAME --out RAW.json [--clean N] [--only MESH ...]
    python benchmarks/predicted.py all --ranks 2 --folder FOLDER             # calibrate, measure and report, one by one
    python benchmarks/predicted.py report --ranks 2 --raw RAW.json --profile PROFILE.json [--png FILE] [--json FILE]
    python benchmarks/predicted.py memory --folder FOLDER [--count 100] [--seconds N]

`measure` adds samples to a file, so that it can be run in parts and again: three models at two shapes, each on every
mesh, steps with AdamW, one thread a rank. A sample is the slowest rank's wall time between two barriers. What the
machine did beside it is noted, and steps beside which it did anything else do not count. `report` prices a dry run of
each plan on the profile and prints, and closes with a line of JSON: rank correlation over all points, the median error,
and what the plan that is predicted fastest loses to the measured best. Nothing is fitted to what was measured.

`memory` is the peak that a dry run predicts against the live storage bytes of real runs, of random plans; and whether
the collectives that it counts are those that the run issues, one by one.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch

from vescale_dtensor.testing import run_ranks, warm_up

BUDGETS = {
    2: {"spearman": 0.9, "regret": 0.05, "median error": 0.15},
    4: {"spearman": 0.9, "regret": 0.10, "median error": None},
}
WORDS = 1024
WARM = 5
"""Steps before the first sample: the first calls compare the inputs of the ranks."""
QUIET = 0.15
"""Cores that others may have kept busy during a step that counts."""
GLANCE = 0.08
"""Seconds that the machine is watched before a step."""
SHAPES = {"short": (512, 4, 256), "wide": (640, 4, 256)}
"""Hidden size, rows of the batch, positions. There are as many layers as ranks, so that each may be a stage."""


def gpt(hidden: int, layers: int, positions: int):
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=WORDS, block_size=positions, n_layer=layers, n_head=8, n_embd=hidden))


def llama(hidden: int, layers: int, positions: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=positions,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def neox(hidden: int, layers: int, positions: int):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=positions,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


MODELS = {"gpt": gpt, "llama": llama, "neox": neox}
CASES = [f"{model} {shape}" for model in MODELS for shape in SHAPES]
# Degrees of each mesh, as `Candidate` has them. ZeRO-3 is fsdp.
MESHES = {
    2: {
        "tp2": {"tp": 2}, "tp2 sp": {"tp": 2, "sp": True}, "fsdp2": {"dp": 2, "zero": 3}, "dp2": {"dp": 2},
        "pp2": {"pp": 2, "microbatches": 4},
    },
    4: {
        "tp4": {"tp": 4}, "tp4 sp": {"tp": 4, "sp": True}, "fsdp4": {"dp": 4, "zero": 3}, "dp4": {"dp": 4},
        "pp4": {"pp": 4, "microbatches": 4}, "dp2 tp2": {"dp": 2, "tp": 2},
        "dp2 tp2 sp": {"dp": 2, "tp": 2, "sp": True}, "fsdp2 tp2": {"dp": 2, "tp": 2, "zero": 3},
        "fsdp2 tp2 sp": {"dp": 2, "tp": 2, "zero": 3, "sp": True}, "pp2 tp2": {"pp": 2, "tp": 2, "microbatches": 4},
        "pp2 tp2 sp": {"pp": 2, "tp": 2, "sp": True, "microbatches": 4},
        "pp2 dp2": {"pp": 2, "dp": 2, "microbatches": 2},
    },
}  # fmt: skip


def case_of(name: str, ranks: int):
    """(model, batch) of a case, the same on every rank."""
    kind, shape = name.split()
    hidden, rows, positions = SHAPES[shape]
    torch.manual_seed(0)
    model = MODELS[kind](hidden, ranks, positions)
    ids = torch.randint(WORDS, (rows, positions), generator=torch.Generator().manual_seed(1))
    return model, (ids, ids) if kind == "gpt" else {"input_ids": ids, "labels": ids}


def plan_for(model, batch, degrees):
    from vescale_plans.search import Candidate, plan_of, sample_of, structure_of

    rows = batch if isinstance(batch, dict) else tuple(batch)
    return plan_of(structure_of(model, sample_of(model, rows)), Candidate(**degrees))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


# --- measuring ----------------------------------------------------------------------------


def steps(case: str, texts: dict[str, str], clean: int, limit: float) -> dict[str, list[list[float]]]:
    """Per mesh and step: seconds of the slowest rank, and cores that others kept busy. Runs on every rank, meshes in
    turn, each step when the machine is calm, until each has `clean` undisturbed steps or `limit` seconds are over."""
    import vescale

    torch.set_num_threads(1)
    built = {}
    for mesh, text in texts.items():
        model, batch = case_of(case, torch.distributed.get_world_size())
        built[mesh] = vescale.parallelize(vescale.Plan.from_json(text), model, adamw)
    samples: dict[str, list[list[float]]] = {mesh: [] for mesh in texts}
    for _ in range(WARM):
        for model, optimizer in built.values():
            train(model, optimizer, batch)
    gc.collect()
    gc.disable()
    until = time.perf_counter() + limit
    while True:
        for mesh, (model, optimizer) in built.items():
            if undisturbed(samples[mesh]) < clean:
                rest(until)
                samples[mesh].append(timed(model, optimizer, batch))
        if all(undisturbed(one) >= clean for one in samples.values()) or sum_over_ranks(time.perf_counter() > until):
            return samples


def train(model, optimizer, batch) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model, batch) -> torch.Tensor:
    """Alone: what else the model returns does not outlive the call."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def timed(model, optimizer, batch) -> list[float]:
    from vescale._devices import busy_seconds, own_seconds

    torch.distributed.barrier()
    own, busy = own_seconds(), busy_seconds()
    began = time.perf_counter()
    train(model, optimizer, batch)
    torch.distributed.barrier()
    seconds, busy = time.perf_counter() - began, busy_seconds() - busy
    everyone = [torch.empty(2) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, torch.tensor([seconds, own_seconds() - own]))
    seconds, own = torch.stack(everyone).double().unbind(1)
    return [round(seconds.max().item(), 5), round(max(0.0, busy - own.sum().item()) / seconds.max().item(), 3)]


def rest(until: float) -> None:
    """Until others leave the machine alone, or `until`."""
    from vescale._devices import busy_seconds

    while True:
        busy = busy_seconds()
        time.sleep(GLANCE)
        calm = busy_seconds() - busy <= QUIET * GLANCE or time.perf_counter() > until
        if sum_over_ranks(calm):
            return


def sum_over_ranks(truth: bool) -> float:
    """How many ranks say so."""
    total = torch.tensor(float(truth))
    torch.distributed.all_reduce(total)
    return total.item()


def undisturbed(samples: list[list[float]]) -> int:
    return sum(foreign <= QUIET for _, foreign in samples)


def measure(arguments) -> int:
    warm_up("vescale", "transformers")
    path = Path(arguments.out)
    known = json.loads(path.read_text()) if path.exists() else {}
    model, batch = case_of(arguments.case, arguments.ranks)
    here = known.setdefault(arguments.case, {})
    wanted = {
        mesh: plan_for(model, batch, degrees).to_json()
        for mesh, degrees in MESHES[arguments.ranks].items()
        if undisturbed(here.get(mesh, [])) < arguments.clean and (not arguments.only or mesh in arguments.only)
    }
    if wanted:
        given = (arguments.case, wanted, arguments.clean, arguments.seconds)
        for mesh, samples in run_ranks(arguments.ranks, steps, *given, timeout=arguments.seconds + 150)[0].items():
            here.setdefault(mesh, []).extend(samples)
        path.write_text(json.dumps(known))
    for mesh, samples in here.items():
        found = " ".join(f"{seconds:.3f}({foreign:.1f})" for seconds, foreign in samples)
        print(f"{arguments.case:<12} {mesh:<14} {undisturbed(samples)} undisturbed: {found}", flush=True)
    return 0


def everything(arguments) -> int:
    """Calibrates, measures what has not been, and reports."""
    from vescale.calibrate import calibrate

    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{arguments.ranks}.json"
    profile, raw = folder / f"profile{name}", folder / f"raw{name}"
    if not profile.exists():
        profile.write_text(calibrate(arguments.ranks).to_json())
    for case in CASES:
        part = {"case": case, "out": raw, "clean": 5, "seconds": 150, "only": None}
        measure(argparse.Namespace(ranks=arguments.ranks, **part))
    outputs = {"png": folder / f"predicted{arguments.ranks}.png", "json": folder / f"predicted{name}"}
    return report(argparse.Namespace(ranks=arguments.ranks, raw=raw, profile=profile, **outputs))


def settled(samples: list[list[float]]) -> float:
    """Median of the undisturbed samples, or of the three that were least disturbed."""
    return median(seconds for seconds, _ in calm(samples))


def calm(samples: list[list[float]]) -> list[list[float]]:
    found = [one for one in samples if one[1] <= QUIET]
    return found if len(found) >= 3 else sorted(samples, key=lambda one: one[1])[:3]


# --- predicting ---------------------------------------------------------------------------


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


def predicted(ranks: int, profile: str, cases) -> dict:
    from vescale import predict
    from vescale_plans.search import Candidate, cost_of, hardware_of, sample_of, sizes_of, structure_of

    hardware, found = hardware_of(Path(profile)), {}
    for case in cases:
        model, batch = case_of(case, ranks)
        structure = structure_of(model, sample_of(model, batch))
        _, rows, positions = SHAPES[case.split()[1]]
        for mesh, degrees in MESHES[ranks].items():
            candidate = Candidate(**degrees)
            prediction = predict(plan_for(model, batch, degrees), model, batch, hardware, adamw)
            closed = cost_of(sizes_of(structure, candidate.tp), candidate, hardware, rows, positions)
            found[case, mesh] = {
                "predicted": prediction.seconds, "closed form": closed.total,
                "spent": {name: round(value, 5) for name, value in prediction.spent.items()},
            }  # fmt: skip
    return found


def report(arguments) -> int:
    raw = json.loads(Path(arguments.raw).read_text())
    cases = [case for case in CASES if case in raw]
    points = predicted(arguments.ranks, arguments.profile, cases)
    points = {key: value for key, value in points.items() if key[1] in raw[key[0]]}
    for (case, mesh), point in points.items():
        samples = raw[case][mesh]
        point.update(measured=settled(samples), samples=len(samples))
        point["foreign"] = round(median(one[1] for one in calm(samples)), 2)
    budgets = BUDGETS[arguments.ranks]
    record: dict = {"ranks": arguments.ranks}
    for way in ("predicted", "closed form"):
        record[way] = judged(points, cases, way)
    for (case, mesh), point in points.items():
        error = point["predicted"] / point["measured"] - 1
        print(
            f"{case:<12} {mesh:<14} measured {point['measured']:.3f} s  predicted {point['predicted']:.3f}"
            f" ({error:+.0%})  closed form {point['closed form']:.3f}  others {point['foreign']:.1f}  {point['spent']}"
        )
    met = True
    for name, budget in budgets.items():
        value = record["predicted"][name]
        if budget is not None:
            met &= value >= budget if name == "spearman" else value <= budget
        print(f"{name:<14} {value:.3f}  budget {budget}   closed form {record['closed form'][name]:.3f}")
    record["points"] = [
        {"case": case, "mesh": mesh, **{k: round(v, 5) if isinstance(v, float) else v for k, v in point.items()}}
        for (case, mesh), point in points.items()
    ]
    if arguments.png:
        draw(points, arguments.ranks, Path(arguments.png))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "points"}))
    return int(not met)


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


# --- memory -------------------------------------------------------------------------------


def lived(case: str, text: str) -> tuple[int, list, int]:
    """Of the second step on this rank: peak of live storage bytes, collectives, floating point operations."""
    import vescale
    from vescale_plans._meter import Meter

    torch.manual_seed(0)
    model, batch = small(case)
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


def small(case: str):
    """(model, batch): "llama 96 8 32" is hidden size, rows and positions."""
    kind, *sizes = case.split()
    hidden, rows, positions = map(int, sizes)
    torch.manual_seed(0)
    model = MODELS[kind](hidden, 2, positions)
    ids = torch.randint(WORDS, (rows, positions), generator=torch.Generator().manual_seed(1))
    return model, (ids, ids) if kind == "gpt" else {"input_ids": ids, "labels": ids}


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


def memory(arguments) -> int:
    from vescale_plans import dry_run
    from vescale_plans.search import hardware_of, memory_of, plan_of, sample_of, sizes_of, structure_of

    warm_up("torch._dynamo", "vescale", "transformers")
    path = Path(arguments.folder) / "memory.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text())["plans"] if path.exists() else []
    until, known = time.perf_counter() + arguments.seconds, {(row["case"], row["plan"]) for row in rows}
    for case, candidate in random_plans(arguments.count):
        if (case, str(candidate)) in known or time.perf_counter() > until:
            continue
        model, batch = small(case)
        structure = structure_of(model, sample_of(model, batch))
        plan = plan_of(structure, candidate)
        dry = dry_run(plan, model, batch, adamw, backend="gloo")
        given = (case, plan.to_json())
        real = run_ranks(plan.world_size, lived, *given, timeout=120)
        peak = max(one[0] for one in real)
        _, batch_rows, positions = map(int, case.split()[1:])
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
    return int(not met or len(rows) < arguments.count)


def summed(rows: list[dict]) -> dict:
    errors = [row["error"] for row in rows]
    return {
        "plans of": len(rows), "mean error": round(sum(map(abs, errors)) / len(rows), 5),
        "most under": round(max(0.0, -min(errors)), 5), "most over": round(max(0.0, max(errors)), 5),
        "closed form, median error": round(median(abs(row["closed form"]) for row in rows), 3),
        "collectives agree": sum(row["collectives agree"] for row in rows),
        "operations agree": sum(row["operations agree"] for row in rows),
    }  # fmt: skip


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


COMMANDS = {"measure": measure, "all": everything, "report": report, "memory": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--ranks", type=int, default=2, choices=list(MESHES))
    one.add_argument("--case", choices=CASES, required=True)
    one.add_argument("--out", required=True)
    one.add_argument("--clean", type=int, default=5, help="undisturbed steps of each mesh")
    one.add_argument("--seconds", type=float, default=150, help="after which the meshes are left with what they have")
    one.add_argument("--only", nargs="*")
    two = commands.add_parser("report")
    two.add_argument("--ranks", type=int, default=2, choices=list(MESHES))
    two.add_argument("--raw", required=True)
    two.add_argument("--profile", required=True)
    two.add_argument("--png")
    two.add_argument("--json")
    four = commands.add_parser("all")
    four.add_argument("--ranks", type=int, default=2, choices=list(MESHES))
    four.add_argument("--folder", required=True)
    three = commands.add_parser("memory")
    three.add_argument("--count", type=int, default=100)
    three.add_argument("--folder", required=True, help="memory.json in it is added to: it can be run in parts")
    three.add_argument("--seconds", type=float, default=1e9)
    arguments = parser.parse_args()
    return COMMANDS[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())

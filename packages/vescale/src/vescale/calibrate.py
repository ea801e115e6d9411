"""calibrate: what this machine takes for products, operators, attention and collectives, as a hardware profile.

All ranks measure at once, in step, since that is how they will train: memory and links are shared then as now. Probes
take turns over several rounds, so that what else runs on the machine meets them alike, and the lower quartile of the
rounds is kept, of collectives the median. A collective is timed from when all are there, with caches full of other
things; how long ranks wait for the slowest grows with what they computed since they last met, and is a curve of its
own, of means. What one thread computes on a CPU is timed in its own CPU seconds, which no neighbour lengthens; ranks
that outnumber the cores share them, which the profile says by `at_once`. A matrix product's time is fitted by its terms
(operations, and elements of operands and result), everything else is a curve. What a training step of a small block
takes beyond its operators is the host's.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from vescale_plans import PlanError
from vescale_plans.search import Curve, Hardware, Link, Product, hardware_of

from ._machine import probes as _probes
from ._machine.devices import Device, busy_seconds, device_of, own_seconds

LEAST = 1e-3
"""Seconds that a probe is repeated for within a round."""
AMID = 2e-2
"""The same of a collective, each after a computation."""
BESIDE = 5
"""Times as many rounds tell what of a collective is hidden."""
QUIET = 0.1
"""Cores that others may keep busy in a round that counts, if there are enough such rounds."""
MORE = 3
"""Times as many rounds are taken, at most, to find quiet ones."""
LONGEST = 1800
"""Seconds after which the ranks are given up."""


def calibrate(ranks: int = 1, *, rounds: int = 7, progress: Callable[[str], None] | None = None) -> Hardware:
    """Measures this machine with the given number of busy ranks: GPUs over NCCL if there are enough, otherwise the CPU
    over gloo.

    Arguments:
        ranks: processes that measure at once, one thread each on a CPU; collectives are measured over every divisor.
        rounds: how often each probe is measured.
        progress: is called with what is measured next.

    Returns a profile; `Hardware.to_json` writes it. Takes about a minute.

    Raises PlanError in a process that has joined a world, and if a rank fails.
    """
    if dist.is_initialized():
        remedies = [("call it before the world is joined", "calibration starts ranks of its own")]
        raise PlanError("calibrate", "this process is in a world already", (), remedies)
    if ranks < 1 or rounds < 1:
        raise PlanError("calibrate", f"{ranks} ranks and {rounds} rounds measure nothing", (), [("ranks=2", "")])
    device = device_of(ranks)
    with tempfile.TemporaryDirectory() as folder:
        if progress is not None:
            progress(f"{ranks} ranks on {device.words}, {rounds} rounds")
        told = multiprocessing.get_context("spawn").SimpleQueue()
        arguments = (ranks, folder, device, rounds, told)
        try:
            started = multiprocessing.start_processes(_measure, arguments, ranks, join=False, start_method="spawn")
            _followed(started, told, progress)
        except Exception as error:
            last = str(error).strip().splitlines()[-1]
            raise PlanError("calibrate", f"a rank failed: {last}", (), [("ranks=1", "")]) from error
        return Hardware.from_json((Path(folder) / "profile").read_text())


def _followed(ranks: multiprocessing.ProcessContext, told, progress: Callable[[str], None] | None) -> None:
    """Until all ranks are done; one that fails ends the others."""
    until, doing = time.monotonic() + LONGEST, "starting"
    while not ranks.join(0.2):
        while not told.empty():
            doing = told.get()
            if progress is not None:
                progress(doing)
        if time.monotonic() > until:
            for process in ranks.processes:
                process.kill()
                process.join()
            raise TimeoutError(f"not done after {LONGEST} s, at {doing}")


def _measure(rank: int, ranks: int, folder: str, device: Device, rounds: int, told) -> None:
    """One rank; the first writes the times."""
    torch.set_num_threads(1)
    here = torch.device(device.kind, rank) if device.kind == "cuda" else torch.device("cpu")
    if device.kind == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device.kind == "cuda" else "gloo",
        store=dist.FileStore(str(Path(folder) / "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LONGEST),
        device_id=here if device.kind == "cuda" else None,
    )
    tell = told.put if rank == 0 else (lambda text: None)
    try:
        stop = torch.cuda.synchronize if device.kind == "cuda" else (lambda: None)
        times: dict[str, list[float]] = defaultdict(list)
        with torch.no_grad():
            families = {"matrix products": _probes.products(device.dtype, here, device.base)}
            families["operators"] = _probes.operators(device.dtype, here)
            for size in range(2, ranks + 1):
                if ranks % size == 0:
                    mesh = init_device_mesh(device.kind, (ranks // size, size))
                    families[f"collectives of {size} ranks"] = _probes.collectives(mesh, device.dtype, here)
            if ranks > 1:
                families["transfers"] = _probes.sends(device.dtype, here)
                families["waiting"] = _probes.waits(device.dtype, here, device.base)
            for name, family in families.items():
                tell(name)
                _rounds(list(family), rounds, here, stop, times)
        tell("attention")
        _rounds(list(_probes.attention(device.dtype, here)), rounds, here, stop, times)
        overlap = 0.0
        if ranks > 1:
            tell("what of a collective products hide")
            overlap = _overlap(here, device, rounds, stop)
        tell("a small training step")
        run, operations = _probes.step(init_device_mesh(device.kind, (1, ranks)), here)
        whole = _probes.Probe("step", "step", None, run)
        took = _quartile([_timed(whole, 1, stop, time.thread_time) for _ in range(rounds + 1)])
        if rank == 0:
            profile = profile_of(times, overlap, ranks, device)
            # What the operators alone do not explain: Python, dispatch, autograd, and caches that are cold by then.
            explained = sum(count * operation.seconds(profile) for operation, count in operations.items())
            host = max(0.0, took - explained) / operations.total()
            (Path(folder) / "profile").write_text(replace(profile, host=host).to_json())
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rounds(
    probes: list[_probes.Probe], rounds: int, here: torch.device, stop: Callable, times: dict[str, list[float]]
) -> None:
    """Each probe in turn, all ranks in step; of all rounds the `rounds` beside which the machine did least count."""
    repeats = []
    for probe in probes:
        _timed(probe, 1, stop)
        took = torch.tensor([_timed(probe, 1, stop)])
        took = took.to(here)
        dist.all_reduce(took, dist.ReduceOp.MAX)  # ranks must repeat a collective equally often
        least, most = (0.0, 1) if probe.kind == "wait" else (LEAST, 50) if probe.before is None else (AMID, 4)
        repeats.append(max(1, min(most, int(least / max(took.item(), 1e-6)))))
    taken: list[tuple[float, list[float]]] = []
    for _ in range(MORE * rounds):
        before = (own_seconds(), busy_seconds(), time.perf_counter())
        seconds = [_timed(probe, repeat, stop) for probe, repeat in zip(probes, repeats)]
        passed_here = [own_seconds() - before[0], busy_seconds() - before[1], time.perf_counter() - before[2]]
        facts = torch.tensor([*passed_here, *seconds], device=here)
        dist.all_reduce(facts)
        own, busy, passed, *seconds = facts.tolist()
        seconds = [one / dist.get_world_size() for one in seconds]
        taken.append(((busy / dist.get_world_size() - own) * dist.get_world_size() / passed, seconds))
        if sum(foreign <= QUIET for foreign, _ in taken) >= rounds:
            break
    for _, seconds in sorted(taken, key=lambda one: one[0])[:rounds]:
        for probe, time_ in zip(probes, seconds):
            times[json.dumps([probe.kind, probe.name, probe.ranks, probe.size])].append(time_)


def _timed(probe: _probes.Probe, repeat: int, stop: Callable, clock: Callable | None = None) -> float:
    dist.barrier()
    stop()
    if probe.before is not None:
        return _after(probe, repeat, stop)
    if probe.kind == "wait":
        return _waited(probe, stop)
    alone = probe.kind != "collective" and dist.get_backend() == "gloo"
    clock = clock or (time.thread_time if alone else time.perf_counter)
    began = clock()
    for _ in range(repeat):
        probe.run()
    stop()
    return (clock() - began) / repeat


def _after(probe: _probes.Probe, repeat: int, stop: Callable) -> float:
    """Times a collective that all ranks come to at once, each after it computed."""
    seconds = 0.0
    for _ in range(repeat):
        given = None if probe.before is None else probe.before()
        stop()
        dist.barrier()
        began = time.perf_counter()
        probe.run(given)
        stop()
        seconds += time.perf_counter() - began
    return seconds / repeat


def _waited(probe: _probes.Probe, stop: Callable) -> float:
    """Seconds that this rank waits for the others after a computation: what passes until they meet, less the
    computation as it is priced (CPU seconds, times the ranks that share a core)."""
    shared = dist.get_backend() == "gloo"
    clock = time.thread_time if shared else time.perf_counter
    crowded = max(1.0, dist.get_world_size() / (os.cpu_count() or 1)) if shared else 1.0
    began, computed = time.perf_counter(), clock()
    probe.run()
    stop()
    computed = clock() - computed
    dist.barrier()
    return time.perf_counter() - began - crowded * computed


def _overlap(here: torch.device, device: Device, rounds: int, stop: Callable) -> float:
    """Share of an all-gather that products beside it hide; negative where the two are slower at once than in turn."""
    part = torch.ones(1 << 21, dtype=device.dtype, device=here)
    whole = part.new_empty(part.numel() * dist.get_world_size())
    square = torch.randn(device.base * 2, device.base * 2, dtype=device.dtype, device=here)

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.11 has the latter only

    def compute(count: int) -> None:
        for _ in range(count):
            square @ square

    def timed(function: Callable, *given) -> float:
        dist.barrier()
        stop()
        began = time.perf_counter()
        function(*given)
        stop()
        return time.perf_counter() - began

    def both(count: int) -> None:
        work = gather(whole, part, async_op=True)
        compute(count)
        work.wait()

    both(1)
    agreed = torch.tensor([max(1, round(timed(both, 0) / max(1e-6, timed(compute, 1))))], device=here)
    dist.broadcast(agreed, 0)
    count = int(agreed.item())
    taken = [(timed(both, 0), timed(compute, count), timed(both, count)) for _ in range(BESIDE * rounds)]
    communication, computation, together = (median(times) for times in zip(*taken))
    share = (communication + computation - together) / min(communication, computation)
    return min(1.0, max(-1.0, share))


def profile_of(times: dict[str, list[float]], overlap: float, ranks: int, device: Device) -> Hardware:
    """The profile that measured times give; `times` by JSON of (kind, name, ranks, size)."""
    curves: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    multiplied, waited = [], []
    for key, rounds in times.items():
        kind, name, over, size = json.loads(key)
        seconds = median(rounds) if kind == "collective" else _quartile(rounds)
        if kind == "product":
            multiplied.append((tuple(size), seconds))
        elif kind == "wait":
            waited.append((size, fmean(rounds)))
        else:
            curves[kind, name, over].append((size, seconds))
    operators = {name: _rising(points) for (kind, name, _), points in curves.items() if kind == "operator"}
    collectives: dict[str, dict[int, Curve]] = defaultdict(dict)
    for (kind, name, over), points in curves.items():
        if kind == "collective":
            collectives[name][over] = _rising(points)
    product = fitted(multiplied)
    start = hardware_of(device.profile)
    gather = collectives.get("all_gather", {}).get(ranks)
    link = _link(gather) if gather is not None else start.inside
    add = operators["aten.add"].points[-1]
    return Hardware(
        name=device.profile if device.kind == "cpu" else device.name,
        flops=1 / max(product.flop, 1e-18),
        small=start.small,
        bandwidth=add[0] / add[1],
        memory=device.memory // (ranks if device.kind == "cpu" else 1),
        launch=operators["aten.add"].points[0][1] if device.kind == "cuda" else start.launch,
        node=device.count if device.kind == "cuda" else start.node,
        inside=link,
        across=start.across if device.kind == "cuda" else link,
        itemsize=device.dtype.itemsize,
        at_once=os.cpu_count() if device.kind == "cpu" else None,
        hidden=overlap,
        wide=start.wide,
        backend="nccl" if device.kind == "cuda" else "gloo",
        product=product,
        waits=_waits(waited, product) if waited else None,
        operators=operators,
        collectives=dict(collectives),
        device=f"{device.words}; {ranks} ranks; torch {torch.__version__}, {platform.system()}",
    )


def _waits(measured: list[tuple[list[int], float]], product: Product) -> Curve:
    """Fits waiting to computation, less what meeting takes without any."""
    meeting = next(seconds for (count, *_), seconds in measured if not count)
    points = [(count * product.seconds(*size), max(0.0, seconds - meeting)) for (count, *size), seconds in measured]
    return _rising(points)


def fitted(measured: Iterable[tuple[tuple[int, int, int], float]]) -> Product:
    """Terms of `Product` by least squares of relative errors; a term that came out negative is none."""
    measured = list(measured)
    rows = [[1, 2 * m * n * k, m * k, k * n, m * n] for (m, n, k), _ in measured]
    seconds = torch.tensor([time for _, time in measured], dtype=torch.float64)[:, None]
    table = torch.tensor(rows, dtype=torch.float64) / seconds
    scale = table.norm(dim=0)
    used = list(range(5))
    while True:
        solution = torch.linalg.lstsq(table[:, used] / scale[used], torch.ones_like(seconds)).solution[:, 0]
        negative = [at for at, value in zip(used, solution) if value < 0 and at != _FLOP]
        if not negative:
            break
        used.remove(min(negative, key=lambda at: solution[used.index(at)]))
    terms = [0.0] * 5
    for at, value in zip(used, solution / scale[used]):
        terms[at] = max(0.0, value.item())
    return Product(*terms)


def _quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


_FLOP = 1  # the term that any product has


def _rising(points: list[tuple[float, float]]) -> Curve:
    """A smaller size takes no more: what disturbs a measurement only lengthens it."""
    rising: list[tuple[float, float]] = []
    for size, seconds in sorted(points, reverse=True):
        if rising and rising[-1][0] == size:
            continue  # of a size measured twice the longer counts
        rising.append((size, min(seconds, rising[-1][1]) if rising else seconds))
    return Curve(tuple(reversed(rising)))


def _link(curve: Curve) -> Link:
    (low, first), (high, last) = curve.points[0], curve.points[-1]
    return Link(first, (high - low) / max(1e-9, last - first))

"""generate_plan: the whole plan of an unmodified model."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from vescale_dtensor import Replicate
from vescale_dtensor.engine import unstopped
from vescale_trace.values import map_tensors, tensors_in

from .._apply.generators import generators_kept
from .._plan.match import decided, first_match
from ..plan import Pipeline, Placements, Plan, PlanError, Precision
from .candidates import PINNABLE, Candidate
from .explain import Explanation
from .pricer import Estimate, Request
from .pricing.hardware import Hardware
from .pricing.profiles import hardware_of
from .probing.find_structure import structure_of
from .probing.sample import POSITIONS, Sample, sample_of
from .progress import Bar
from .ranking import MARGIN, rank
from .refusals import InfeasibleError, over_memory_in_dry_run
from .structure import Structure
from .tensor_plan import patterns, tensor_parallel_plan

ASKED = (
    *("world_size", "batch", "seq", "hardware", "memory", "objective", "pin", "forbid", "overrides", "sample"),
    *("verify", "loss_fn", "optimizer_fn", "precision"),
)

NEEDED = ("world_size", "batch")
MOST = 2**24
"""Ranks, rows or positions: the search takes time for each divisor."""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST


def _is_bytes(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_forbidding(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return listed and all(isinstance(one, (str, Mapping)) for one in value)


Kind = tuple[Callable[[Any], bool], str, str]

KINDS: dict[str, Kind] = {
    "world_size": (_is_count, f"a number from 1 to {MOST:,}", "world_size=8"),
    "batch": (_is_count, f"a number from 1 to {MOST:,}", "batch=8"),
    "seq": (_is_count, f"a number from 1 to {MOST:,}", "seq=2048"),
    "hardware": (lambda value: isinstance(value, (str, os.PathLike, Hardware)), "a profile", 'hardware="h100"'),
    "memory": (_is_bytes, "a number of bytes", "memory=80 * 2**30"),
    "precision": (lambda value: isinstance(value, Precision), "a Precision", "precision=Precision(torch.bfloat16)"),
    "pin": (_is_mapping, "a mapping from names to degrees", 'pin={"tp": 8}'),
    "forbid": (_is_forbidding, "a list of names and combinations", 'forbid=["pp", {"tp": 4, "zero": 3}]'),
    "overrides": (_is_mapping, "a mapping from globs to placements", 'overrides={"*.bias": {}}'),
}


ROUNDS = 3
"""Rankings, each with a limit lowered by as much as the formula was short of the last one's dry runs."""


Runner = Callable[..., Any]
"""`dry_run`, of plans with a pipeline too: that of `vescale`."""


@generators_kept()
def generate_plan(
    model: nn.Module, constraints: Mapping[str, Any] | None = None, *, runner: Runner | None = None, **asked: Any
) -> Plan:
    """Returns the plan that a cost model considers fastest among all that fit. The model is not changed, and its code
    is not read.

    Give constraints as keywords, in one mapping `constraints`, or both.

    Arguments:
        world_size: the number of ranks.
        batch: rows of the global batch.
        seq: positions of a row; by default those of `sample`.
        hardware: a profile's name ("a100", "h100", "h200", "b200", "gb200", "v100", "l40s", "cpu"), a `Hardware`, or
            "auto".
        memory: usable bytes of one device; by default the profile's, less a margin.
        precision: of the plan, see `Precision`; without it, the plan computes in the parameters' dtype. Time and
            activations are priced accordingly.
        objective: "time", or "memory" for the smallest peak.
        pin: degrees and settings to fix, such as {"tp": 8}; see `Candidate` for their names.
        forbid: names that must not be used ("pp", "sp", "zero"), or combinations ({"tp": 4, "zero": 3}).
        overrides: parameter glob -> placements, before all others.
        sample: the arguments of a call of the model: a tensor, a tuple of arguments or a dict of keywords, with one row
            or more. Not needed for a model that takes `input_ids`. If the first dim of a tensor is not the batch, it is
            tried both as shared by all rows, and as holding the same number of entries for each row, one row after the
            other. How many rows a sample has is told by its most frequent first dim; where first dims are multiples of
            `batch`, or of the least of them, so many are tried too.
        verify: a global batch from which the model (with `loss_fn`, if given) computes a loss; only shapes count. The
            chosen plan is dry-run on it, with AdamW or `optimizer_fn`, and if its peak exceeds the memory, the next
            best is taken, so the returned plan fits. Every stage of a pipeline is run, with the largest number of
            microbatches in flight, from which the rest follows.
        loss_fn, optimizer_fn: for `verify`, as for `parallelize`.
        runner: runs `verify` for pipelines; `vescale.generate_plan` supplies it. Without it, pipelines are judged by
            formula.

    Deterministic; it needs no process group, GPU or weights. Torch's, Python's and numpy's random generators are
    afterwards as before. `explain()` of the plan gives the reasons.

    Raises InfeasibleError if nothing fits; PlanError for an invalid request, or overrides that do not fit.
    """
    request = {**(constraints or {}), **asked}
    _check_request(request)
    sample = sample_of(model, request.get("sample"), rows=request["batch"])
    with Bar() as bar, unstopped("generate_plan ran the model on samples"):
        return _generated(model, sample, request, bar, runner)


def _check_request(request: Mapping[str, Any]) -> None:
    """Raises PlanError for a name that is no constraint, one that is missing, and a value of another kind."""
    for name in request:
        if name not in ASKED:
            pinned = [(f"pin={{{name!r}: {request[name]!r}}}", "a degree or a setting that is given")]
            remedies = pinned if name in PINNABLE else [(f"one of {', '.join(ASKED)}", "")]
            raise PlanError("generate_plan", f"{name!r} is no constraint", (), remedies)
    for name, (fits, kind, example) in KINDS.items():
        value = request.get(name)
        if not fits(value) and (value is not None or name in NEEDED):
            raise PlanError("generate_plan", f"{name} is {value!r}, not {kind}", (), [(example, "")])


def _generated(model: nn.Module, sample: Sample, request: Mapping[str, Any], bar: Bar, runner: Runner | None) -> Plan:
    precision = request.get("precision")
    computed = precision.compute if precision is not None else _dtype(model)
    structure = structure_of(model, sample, bar, computed=computed)
    seq = request.get("seq") or sample.positions or POSITIONS
    hardware = hardware_of(request.get("hardware") or "auto").computing(computed.itemsize)
    memory = request.get("memory")
    wanted = Request(
        structure,
        request["world_size"],
        request["batch"],
        seq,
        hardware,
        MARGIN * hardware.memory if memory is None else memory,
        request.get("objective", "time"),
        request.get("pin"),
        tuple(request.get("forbid") or ()),
        computed,
    )
    demoted: dict[Candidate, int] = {}
    limit = wanted.limit
    for _ in range(ROUNDS):
        try:
            best = rank(replace(wanted, limit=limit), bar)
        except InfeasibleError:
            if not demoted:
                raise
            break
        for one in best:
            if one.candidate in demoted:
                continue
            plan = plan_of(structure, one, overrides=request.get("overrides")).override(precision=precision)
            if request.get("overrides"):
                plan.validate(model)
            peak, priced = _dry(plan, model, request, runner) if request.get("verify") is not None else (None, None)
            if peak is None or peak <= wanted.limit:
                chosen = [one, *(other for other in best if other is not one)]
                explained = Explanation(wanted, tuple(chosen), tuple(demoted.items()), peak, priced)
                object.__setattr__(plan, "_explanation", explained)
                return plan
            demoted[one.candidate] = peak
            limit = min(limit, wanted.limit * one.memory.total / peak)
            bar.tick("running plans dry", len(best))
    raise over_memory_in_dry_run(wanted, tuple(demoted.items()))


def _dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of most of the model's parameters; float32 without any."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    return max(counts, key=lambda dtype: (counts[dtype], dtype.itemsize), default=torch.float32)


def _dry(
    plan: Plan, model: nn.Module, request: Mapping[str, Any], runner: Runner | None
) -> tuple[int | None, float | None]:
    """Bytes of a rank at the worst moment of a dry run, None for a pipeline without a `runner`; and seconds of the
    step, None for any pipeline."""
    from ..dry_run import dry_run

    hardware = hardware_of(request.get("hardware", "auto"))
    run = partial(runner or dry_run, loss_fn=request.get("loss_fn"), backend=hardware.backend)
    optimizer, batch = request.get("optimizer_fn") or torch.optim.AdamW, request["verify"]
    if plan.pipeline is None:
        dry = run(plan, model, batch, optimizer)
        return dry.peak, dry.timeline.seconds(hardware).total
    return (None if runner is None else _peak_of_stages(plan, model, batch, optimizer, run)), None


def _peak_of_stages(plan: Plan, model: nn.Module, batch: Any, optimizer: Any, run: Runner) -> int:
    """Bytes of the fullest rank of a pipeline."""
    asked, ranks, lap = plan.pipeline.microbatches, plan.mesh[plan.pipeline.axis], 1
    enough = ranks + 2
    if plan.pipeline.virtual > 1:  # what is in flight repeats itself with every `ranks`, see `moments`
        enough, lap = 4 * ranks, ranks
    if asked <= enough:
        return run(plan, model, batch, optimizer).peak
    less, peak = (run(*_shortened(plan, model, batch, count), optimizer).peak for count in (enough - lap, enough))
    return peak + (asked - enough) // lap * max(0, peak - less)


def _shortened(plan: Plan, model: nn.Module, batch: Any, count: int) -> tuple[Plan, nn.Module, Any]:
    """Shortens a step to fewer microbatches of as many rows. With one more than there are stages 1F1B has as many in
    flight as ever, interleaved with three for each rank; each further one adds what is alike of all: what was sent is
    held to the end of the call."""
    rows = next((one.shape[0] for one in tensors_in(batch) if one.ndim), 0)
    kept = rows // plan.pipeline.microbatches * count

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:kept] if tensor.ndim and tensor.shape[0] == rows else tensor

    pipeline = replace(plan.pipeline, microbatches=count)
    return plan.override(pipeline=pipeline), model, map_tensors(batch, cut)


def plan_of(
    structure: Structure, chosen: Estimate | Candidate, *, overrides: Mapping[str, Placements] | None = None
) -> Plan:
    """The `Plan` of an estimate; of a candidate alone, with blocks dealt out evenly."""
    candidate = chosen if isinstance(chosen, Candidate) else chosen.candidate
    if isinstance(chosen, Candidate):
        cuts = _evenly(structure, candidate.pp * candidate.virtual)
        again = structure.block_names if candidate.checkpointing else ()
    else:
        cuts, again = chosen.cuts, chosen.again
    mesh = {name: size for name, size in candidate.mesh.items() if size > 1} or {"dp": 1}
    parameters: Mapping[str, Placements] = {"*": {}}
    boundaries: Mapping[str, Any] = {}
    if candidate.tp > 1:
        tensor = tensor_parallel_plan(structure, candidate.tp, sequence_parallel=candidate.sp)
        parameters, boundaries = tensor.parameters, tensor.boundaries
    expert_axis = "ep" if candidate.ep > 1 else None
    if expert_axis is None and "dp" in mesh and candidate.dp > 1 and structure.expert_degrees:
        expert_axis, kept = "dp", _kept_full(structure, parameters, "dp")
        parameters = _deciding(structure, kept | {glob: said for glob, said in parameters.items() if glob not in kept})
    pipeline = None
    if candidate.pp > 1:
        pipeline = Pipeline(
            cuts=cuts,
            schedule="interleaved" if candidate.virtual > 1 else "1f1b",
            microbatches=candidate.microbatches,
            virtual=candidate.virtual,
            owners=_owners(structure, cuts),
        )
    return Plan(
        mesh=mesh,
        parameters={**(overrides or {}), **{k: v for k, v in parameters.items() if k not in (overrides or {})}},
        boundaries=boundaries,
        data_axis=tuple(name for name in ("dp", "ep") if name in mesh) or None,
        expert_axis=expert_axis,
        context_axis="cp" if candidate.cp > 1 else None,
        zero=candidate.zero,
        pipeline=pipeline,
        checkpointing=dict.fromkeys(_again(structure, candidate.inside, again), True),
        accumulation=candidate.microbatches if candidate.pp == 1 else 1,
        offload=candidate.offload,
    )


def _again(structure: Structure, inside: Sequence[str], blocks: Sequence[str]) -> Sequence[str]:
    """Globs over what is computed again of these blocks: all of them, or the modules inside."""
    known, wanted = set(structure.modules), set(blocks)
    names = [one for block in blocks for name in inside if (one := f"{block}.{name}") in known] if inside else blocks
    if wanted != set(structure.block_names):
        return names
    patterns = [pattern for one in structure.blocks for pattern in one.patterns]
    globs = [f"{pattern}.{name}" for pattern in patterns for name in inside]
    if not inside:
        return patterns
    met = {glob: {one for one in structure.modules if fnmatchcase(one, glob)} for glob in globs}
    within = tuple(f"{name}." for name in names)
    others = (one for found in met.values() for one in found if one not in names and not one.startswith(within))
    return names if any(others) else [glob for glob in globs if met[glob]]


def _kept_full(structure: Structure, parameters: Mapping[str, Placements], axis: str) -> dict[str, Placements]:
    """Keeps experts whole on the data axes, so that rows stay where they are, and each rank computes its own. Of
    experts that no axis spreads, nobody knows which rows are whose, and all ranks compute all."""
    stacked = {name for one in structure.experts for name in one.parameters}
    said = {
        name: {**decided(parameters, name, {}), axis: Replicate()} if name in stacked else None
        for name in structure.shapes
    }
    return patterns(said, rest=None, last=False)


def _deciding(structure: Structure, parameters: Mapping[str, Placements]) -> dict[str, Placements]:
    """Without globs that decide nothing."""
    used = {first_match(parameters, name) for name in structure.shapes}
    return {glob: said for glob, said in parameters.items() if glob in used}


def _owners(structure: Structure, cuts: Sequence[str]) -> dict[str, int]:
    """The stages of modules that are not called where they are registered."""
    owners = {}
    for blocks in structure.blocks:
        starts = [blocks.names.index(cut) for cut in cuts if cut in blocks.names]
        first = structure.modules.index(blocks.names[0])
        before = sum(cut not in blocks.names and structure.modules.index(cut) < first for cut in cuts)
        for name, place in blocks.called if starts else ():
            owners[name] = before + bisect_right(starts, place)
    return owners


def _evenly(structure: Structure, stages: int) -> tuple[str, ...]:
    """Returns the beginnings of stages, with blocks dealt out evenly."""
    points = structure.cut_points
    blocks = len(points) + 1
    return tuple(points[(at * blocks) // stages - 1] for at in range(1, stages))

"""The plan of transformers' `DistributedConfig` or accelerate's `ParallelismConfig`. Neither library is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vescale_plans import Plan, PlanError, Precision
from vescale_plans.search import Candidate, Structure, plan_of, sample_of, structure_of

_SHARDED = ("fsdp_size", "dp_shard_size")
"""Names that transformers and accelerate have for the ranks over which FSDP shards."""
_BY_NAME = {
    "tp_plan": "model.tp_plan = {...}; vescale.Plan.from_huggingface(model, mesh=...)",
    "ep_plan": 'vescale.Plan(mesh=..., expert_axis="ep", experts={...})',
    "fsdp_plan": "vescale.Plan(mesh=..., zero=3)",
}
"""Arguments that name modules or parameters in a style of transformers', and their counterparts here."""


def is_config(plan: Any) -> bool:
    """True for what `plan_from_config` takes."""
    return not isinstance(plan, (Plan, nn.Module, type)) and any(hasattr(plan, name) for name in _SHARDED)


def as_plan(plan: Any, model: nn.Module) -> Plan:
    """Returns the plan of a config; anything else as it is."""
    return plan_from_config(plan, model) if is_config(plan) else plan


def plan_from_config(config: Any, model: nn.Module, sample: Any = None) -> Plan:
    """Returns the plan with as many ranks along each axis as transformers' `DistributedConfig` or accelerate's
    `ParallelismConfig` says. `parallelize`, `dry_run` and `predict` take such a config in place of a plan.

    What is split is found in the model itself, as by `generate_plan`, and not read from the `tp_plan` that it ships.

    Arguments:
        config: `fsdp_size` (`dp_shard_size`) is ZeRO 3, `dp_replicate_size` replicates that. `ep_size` spreads the
            experts over `ep_size / tp_size` of the data ranks, each of which splits its experts over `tp_size` ranks.
            If that is fewer than `fsdp_size`, ZeRO shards over these, and replicates over the rest. `pp_size` is 1F1B
            with as many microbatches. `cp_size` and `sp_size` shard sequences, the latter with attention over heads.
            `fsdp_cpu_offload` is the plan's `offload`.
        model: is probed on the meta device, and not changed.
        sample: as for `generate_plan`; a model that takes `input_ids` needs none, and no model does under
            data parallelism alone.

    Deterministic. Raises PlanError if the model cannot be split so, and for a `tp_plan`, `ep_plan` or `fsdp_plan` that
    names styles.
    """
    for name, remedy in _BY_NAME.items():
        if isinstance(getattr(config, name, None), dict):
            rule = f"{name} says how single modules are sharded, which a plan says by its own fields"
            raise _refusal(rule, [(f"leave {name} out", "the model is split as it allows"), (remedy, "")])

    def size(*names: str) -> int:
        return next((found for name in names if (found := getattr(config, name, None)) is not None), 1)

    replicas, sharded, tensor, experts = size("dp_replicate_size"), size(*_SHARDED), size("tp_size"), size("ep_size")
    data, spread, heads = replicas * sharded, max(experts // tensor, 1), size("sp_size")
    positions = bool(getattr(config, "enable_sequence_parallel", False)) and tensor > 1
    candidate = Candidate(
        dp=data, tp=tensor, ep=spread, sp=positions, cp=size("cp_size") * heads, zero=3 if sharded > 1 else 0,
        pp=size("pp_size"), microbatches=size("pp_size"), offload=bool(getattr(config, "fsdp_cpu_offload", False)),
    )  # fmt: skip
    splits, row = max(tensor, experts, candidate.cp, candidate.pp) > 1, None
    if splits or any(one.ndim == 3 for one in model.parameters()):  # stacks of experts, whose rows stay on their ranks
        try:
            row = sample_of(model, sample)
        except PlanError:
            if splits:
                raise
    if row is None:  # nothing of the model is split, and nothing of it need be known
        plan = Plan(mesh={"dp": data}, parameters={"*": {}}, zero=candidate.zero, offload=candidate.offload)
    else:
        structure = structure_of(model, row, priced=False)
        _check(structure, candidate, experts)
        plan = plan_of(structure, candidate)
    more: dict[str, Any] = {"context": "all-to-all"} if heads > 1 else {}
    if getattr(config, "fsdp_mixed_precision", False) and data > 1:
        more["precision"] = Precision(torch.bfloat16, torch.float32)
    if replicas > 1 and sharded > 1 and spread == 1:
        names = [name for one in plan.mesh for name in (("replicas", "dp") if one == "dp" else (one,))]
        sizes = {**plan.mesh, "replicas": replicas, "dp": sharded}
        more |= {"mesh": {name: sizes[name] for name in names}, "data_axis": ("replicas", "dp")}
    return plan.override(**more)


def _check(structure: Structure, candidate: Candidate, experts: int) -> None:
    """Raises PlanError where the model has too few blocks or experts."""
    known = list(structure.expert_degrees)
    if experts > 1 and (not structure.experts or candidate.ep not in (1, *known)):
        rule = f"ep_size={experts} spreads experts over {candidate.ep} data ranks, and this model's spread over {known}"
        raise _refusal(rule, [(f"ep_size={one * candidate.tp}", "") for one in known[:3]] or [("ep_size=1", "")])
    most = len(structure.cut_points) + 1
    if candidate.pp > most:
        rule = f"pp_size={candidate.pp} is more stages than the {most} that the model parts into"
        raise _refusal(rule, [(f"pp_size={most}", "")])


def _refusal(rule: str, remedies: list[tuple[str, str]]) -> PlanError:
    return PlanError("plan_from_config", rule, (), remedies)

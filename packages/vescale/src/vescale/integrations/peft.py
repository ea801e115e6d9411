"""PEFT: `adapted(plan, model)`, the plan of the base model for what `get_peft_model` made of it.

An adapter is placed by the layout of what it adapts, so that its output has its base's state and nothing is
communicated for it alone. Of a weight [out, in]:

    base's weight      lora_A [r, in]     lora_B [out, r]    magnitude [out] (DoRA)
    Shard(0), out      replicated         Shard(0)           Shard(0)
    Shard(1), in       Shard(1)           replicated         replicated
    replicated         replicated         replicated         replicated

An embedding's weight [rows, out] is the other way round: of Shard(0) lora_embedding_A [r, rows] is Shard(1), of
Shard(1) lora_embedding_B [out, r] is Shard(0). Every rank has the same adapter to train, a shard of it or the whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from vescale_dtensor import Placement, Shard
from vescale_plans import Plan, PlanError

PREFIX = "base_model."
"""Prefix of all names of the base model, in a PEFT model of prompts; otherwise a tuner stands between, which adds
"model."."""
_WRAPPER = re.compile(r"\.base_layer|\.original_module|\.modules_to_save\.[^.]+")
_ADAPTER = re.compile(
    r"(?P<base>.*)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)\."
)
_FOLLOWS: Mapping[str, Mapping[int, int]] = {
    "lora_A": {1: 1},
    "lora_B": {0: 0},
    "lora_magnitude_vector": {0: 0},
    "lora_embedding_A": {0: 1},
    "lora_embedding_B": {1: 0},
}
"""Part of an adapter -> dim that shards the base's weight -> dim that then shards the part."""


def adapted(plan: Plan, model: nn.Module) -> Plan:
    """Returns the plan for a PEFT model, given one for its base model: names get their prefix, and adapters the layout
    of their base layer. What else is trained (the embeddings of virtual tokens, an adapter that several layers share)
    lies as the plan says of its name, and whole if it says nothing.

    Arguments:
        plan: for the model that was passed to `get_peft_model`.
        model: the result of `get_peft_model`, before `parallelize`.

    The cuts of a pipeline get the prefix, too. Raises PlanError for a model that is not PEFT's.
    """
    if not hasattr(model, "peft_config") or not isinstance(getattr(model, "base_model", None), nn.Module):
        remedies = [("adapted(plan, get_peft_model(model, config))", "")]
        rule = f"{type(model).__name__} is not a PEFT model"
        raise PlanError("vescale.integrations.peft.adapted", rule, (), remedies)
    prefix = PREFIX if model.active_peft_config.is_prompt_learning else f"{PREFIX}model."
    tied = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in tied]
    placed, of_base = {}, {}
    for name, parameter in tied:
        if not _ADAPTER.match(name):
            old = _old_name(name, prefix)
            placed[old] = next((to for glob, to in plan.parameters.items() if fnmatchcase(old, glob)), {})
            if name.startswith(prefix):
                of_base.setdefault(parameter, placed[old])
    for name, parameter in tied:  # PEFT's own name of a weight of the base model (that of its word embeddings)
        if not name.startswith(prefix) and parameter in of_base:
            placed[_old_name(name, prefix)] = of_base[parameter]
    parameters = {}
    for name in names:
        found = _ADAPTER.match(name)
        if found is None:
            parameters[name] = placed[_old_name(name, prefix)]
        else:
            parameters[name] = _followed(found["part"], placed.get(f"{_old_name(found['base'], prefix)}.weight", {}))
    globs = {
        field: {glob if glob.startswith("*") else prefix + glob: value for glob, value in getattr(plan, field).items()}
        for field in ("boundaries", "checkpointing", "regather", "offload_activations", "blocks")
    }
    pipeline = plan.pipeline and replace(
        plan.pipeline,
        cuts=tuple(prefix + cut for cut in plan.pipeline.cuts),
        owners={prefix + name: stage for name, stage in plan.pipeline.owners.items()},
    )
    return replace(plan, parameters=parameters, pipeline=pipeline, **globs)


def _old_name(name: str, prefix: str) -> str:
    """Returns the name that a parameter of the base model had before it was adapted."""
    return _WRAPPER.sub("", name.removeprefix(prefix))


def _followed(part: str, weight: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placements of a part of the adapter of a weight."""
    dims = _FOLLOWS[part]
    return {axis: Shard(dims[one.dim]) for axis, one in weight.items() if type(one) is Shard and one.dim in dims}

"""HuggingFace `tp_plan`s as plans: each style that transformers ships, as placements and boundaries.

transformers describes a style by what a module does to its local tensors. Here the
layouts are enough: a style says how parameters lie and what the module takes and
gives, and the engine does the rest (gradients of replicated weights, a bias that is
added once, experts whose outputs are partial sums). Styles that exist only to
correct local arithmetic are therefore nothing here. Pure; transformers is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from vescale_dtensor import InterleavedShard, Placement, Replicate, Shard

from ._plan.match import nearest
from ._plan.parts import Boundary, PlanError

Place = Callable[[int], Placement | None]
"""Number of dims of a parameter -> its placement on the tensor axis; None replicates."""


class Style(NamedTuple):
    """Meaning of a style. Placements are those on the tensor axis; None leaves as it is."""

    weight: Place
    bias: Place
    takes: Placement | None = None
    gives: Placement | None = None


def _replicated(ndim: int) -> None:
    return None


def _rows(ndim: int) -> Placement:
    """Shards the outputs of [.., out, in]."""
    return Shard(max(ndim - 2, 0))


def _columns(ndim: int) -> Placement:
    """Shards the inputs of [.., out, in]."""
    return Shard(ndim - 1)


def _packed_rows(ndim: int) -> Placement:
    return InterleavedShard(max(ndim - 2, 0), 2)


def _packed_columns(ndim: int) -> Placement | None:
    return InterleavedShard(ndim - 1, 2) if ndim > 1 else None


FULL = Replicate()
POSITIONS = Shard(1)
STYLES: Mapping[str, Style] = {
    "colwise": Style(_rows, _rows, takes=FULL),
    "colwise_gather_output": Style(_rows, _rows, takes=FULL, gives=FULL),
    "colwise_rep": Style(_rows, _rows, takes=FULL, gives=FULL),
    "rowwise": Style(_columns, _replicated, gives=FULL),
    "rowwise_split_input": Style(_columns, _replicated, gives=FULL),
    "rowwise_rep": Style(_columns, _replicated, gives=FULL),
    "embedding_rowwise": Style(lambda ndim: Shard(0), _replicated, gives=FULL),
    "embedding_colwise": Style(lambda ndim: Shard(1), _replicated, gives=FULL),
    "packed_colwise": Style(_packed_rows, _packed_rows, takes=FULL),
    "packed_rowwise": Style(_packed_columns, _replicated),
    "grouped_gemm": Style(lambda ndim: Shard(0), lambda ndim: Shard(0)),
    "sequence_parallel": Style(_replicated, _replicated, takes=POSITIONS, gives=POSITIONS),
    "moe_tp_experts": Style(_replicated, _replicated, takes=FULL, gives=FULL),
    "all_reduce": Style(_replicated, _replicated, gives=FULL),
    "replicate": Style(_replicated, _replicated),
    "replicated_with_grad_allreduce": Style(_replicated, _replicated),
    "mla_kv_a_proj": Style(_replicated, _replicated),
    "moe_identity_expert": Style(_replicated, _replicated),
    "local_params": Style(_replicated, _replicated),
}


def from_huggingface(
    model: nn.Module, mesh: Mapping[str, int], tensor_axis: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the plan. See `Plan.from_huggingface`."""
    shipped = getattr(model, "tp_plan", None)
    kind = type(model).__name__
    if not shipped:
        raise PlanError(
            "Plan.from_huggingface",
            f"{kind} ships no tp_plan",
            (),
            [
                ("vescale_plans.library", "has plans by hand for several families"),
                ('Plan(mesh=..., parameters={"*": {}})', "data parallelism alone"),
            ],
        )
    if tensor_axis not in mesh:
        return {"mesh": mesh, "parameters": {"*": {}}, **fields}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    placed: dict[str, dict[str, Placement]] = {}
    boundaries: dict[str, Boundary] = {}
    used = False
    for key, name in shipped.items():
        style = _style(kind, key, name)
        pattern = re.compile(re.escape(key).replace(r"\*", r"\d+"))
        if any(pattern.fullmatch(one) for one in parameters):
            used = True
            _place(placed, key, [p for one, p in parameters.items() if pattern.fullmatch(one)], style, tensor_axis)
            continue
        found = [module for one, module in modules.items() if pattern.fullmatch(one)]
        used = used or bool(found)
        for leaf in dict.fromkeys(leaf for module in found for leaf, _ in module.named_parameters(recurse=False)):
            own = [module._parameters[leaf] for module in found if module._parameters.get(leaf) is not None]
            if f"{key}.{leaf}" not in shipped:
                _place(placed, f"{key}.{leaf}", own, style, tensor_axis)
        takes, gives = ({} if side is None else {tensor_axis: side} for side in (style.takes, style.gives))
        if found and (takes or gives):
            boundaries[key] = Boundary(input=takes, output=gives)
    if not used:
        rule = f"the tp_plan of {kind} names nothing that this model has"
        remedies = [("vescale_plans.library", "has plans by hand for several families")]
        raise PlanError("Plan.from_huggingface", rule, [f"it names  {', '.join(shipped)}"], remedies)
    _place_tied(placed, parameters)
    return {"mesh": mesh, "parameters": {**placed, "*": {}}, "boundaries": boundaries, **fields}


def _style(kind: str, key: str, name: str) -> Style:
    style = STYLES.get(name)
    if style is None:
        near = nearest(str(name), list(STYLES))
        raise PlanError(
            "Plan.from_huggingface",
            f"the tp_plan of {kind} gives {key!r} the style {name!r}, which this veScale does not know",
            [f"known  {', '.join(STYLES)}"],
            [(f"model.tp_plan = {{..., {key!r}: {near[0] if near else 'replicate'!r}}}", "another style")],
        )
    return style


def _place(placed: dict, glob: str, parameters: list[nn.Parameter], style: Style, axis: str) -> None:
    """One glob decides for all layers: they have the same number of dims."""
    leaf = glob.rpartition(".")[2]
    place = style.bias if leaf == "bias" or leaf.endswith("_bias") else style.weight
    placement = place(parameters[0].ndim)
    if placement is not None:
        placed[glob] = {axis: placement}


def _place_tied(placed: dict, parameters: Mapping[str, nn.Parameter]) -> None:
    """A parameter of which the plan names one of two names has that place under both."""
    named = {id(parameters[name]): place for name, place in placed.items() if name in parameters}
    for name, parameter in parameters.items():
        if id(parameter) in named:
            placed.setdefault(name, named[id(parameter)])

"""The collectives that a plan's cut weights need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from vescale_dtensor import InterleavedShard, Replicate, Shard

from .fields import PlanFields
from .match import decided, first_match
from .parts import Boundary

Reads = Mapping[str, Mapping[int, Collection[str]]]
"""Module -> numbers that tell apart what it was called with, each with the axes that cut its last dim."""


def least_collectives(
    plan: PlanFields,
    model: nn.Module,
    calls: Mapping[str, int] | None = None,
    reads: Reads | None = None,
    *,
    backward: bool = True,
) -> int:
    """A count from the weights that `plan` cuts along axes that share no batch; a yardstick, not a bound.

    In forward a weight cut along what it sums over takes one, as does an embedding cut along its rows. In backward each
    value that weights cut along their out features read takes one, for its gradient is a sum over the ranks: Q, K and V
    read one, a latent attention's up projections one each, a feed-forward part beside attention the same as it.
    Convolutions count alike, by their channels; what is in groups is cut by them, and takes none. A norm
    of features that are cut takes one in both, of its statistics. What a boundary makes whole although no sum is open
    is gathered, and its gradient sent back. A head cut along the vocabulary takes one in backward, and its loss one, of
    the greatest logit and the sum together. Experts in stacks take one in forward, and in backward two: of their rows,
    and of the routing weights, whose gradient is a product with what the experts give. Where boundaries cut what blocks
    hand on over the axis (sequence parallelism), each is two: it is scattered, and gathered. Recurrences, and values
    that meet what is cut outside of such modules (the rotary part of a latent key), count nothing.

    Arguments:
        calls: module -> how often it ran; without it each ran once.
        reads: what it was called with; without it each sum has one value that feeds it, and norms are known by their
            weights.
        backward: of a forward alone, without.
    """
    times = Counter({name: 1 for name, _ in model.named_modules()}) if calls is None else calls
    return sum(_of_axis(axis, plan, model, times, reads, backward) for axis in cutting_axes(plan))


def _of_axis(
    axis: str, plan: PlanFields, model: nn.Module, times: Mapping[str, int], reads: Reads | None, backward: bool
) -> int:
    both = 1 + backward
    takes = {"sum": 1, "stack": both, "norm": both, "gather": both, "head": both, "table": 1, "out": 0, "part": 0}
    least, values = 0, set()
    for path, kind in _cut(axis, plan, model):
        ran = times.get(path, 0)
        if kind == "stack" and reads is not None and _is_half(model.get_submodule(path)):
            if any(axis in axes for axes in reads.get(path, {}).values()):
                least += both * ran  # the second of two: a sum, and what it is weighted by
                continue
            kind = "out"
        if kind != "norm" or reads is None:
            least += takes[kind] * ran
        if not backward or kind not in ("sum", "out", "stack"):
            continue
        if reads is None:
            least += ran * (kind in ("sum", "stack"))
        elif kind != "sum":
            values.update(reads.get(path, ()))
            if not ran:  # its weight is used by the module around it, which reads a value of its own
                least += times.get(path.rpartition(".")[0], 0)
    if reads is not None:
        norms = (path for path, module in model.named_modules() if _is_norm(module))
        least += both * sum(axis in axes for path in norms for axes in reads.get(path, {}).values())
    is_scattered = any(isinstance(one.output.get(axis), Shard) for one in plan.boundaries.values())
    return (least + len(values)) * (1 + is_scattered)


def open_sums(plan: PlanFields, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Module -> axes over which it gives a sum of parts that no boundary, of it or of one around it, makes whole."""
    found: dict[str, tuple[str, ...]] = {}
    for axis in cutting_axes(plan):
        for path, kind in _cut(axis, plan, model):
            parts = path.split(".")
            around = (first_match(plan.boundaries, ".".join(parts[:end])) for end in range(1, len(parts) + 1))
            is_sum = path and kind in ("sum", "table", "stack")  # no boundary is the model's own
            if is_sum and not any(glob and axis in plan.boundaries[glob].output for glob in around):
                found[path] = (*found.get(path, ()), axis)
    return found


def cutting_axes(plan: PlanFields) -> list[str]:
    """The axes of more than one rank that share no batch, sequence or stages: they cut weights as they are used."""
    apart = {*plan.data_axes, plan.context_axis, plan.expert_axis, plan.pipeline.axis if plan.pipeline else None}
    return [axis for axis, size in plan.mesh.items() if size > 1 and axis not in apart]


def _cut(axis: str, plan: PlanFields, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules and what their cut weights are to them: "sum" (over in features), "out" features, "table" and "part" of
    each row of one, "head", "stack" of experts, "norm", and "gather" where a boundary makes out features whole."""
    seen: set[tuple[int, type]] = set()
    heads = _heads(model)
    for path, module in model.named_modules():
        kinds = set()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            placement = decided(plan.parameters, f"{path}.{name}" if path else name, {}).get(axis)
            if not isinstance(placement, Shard | InterleavedShard):
                continue
            if parameter.ndim < 2:
                kinds.update({"norm"} if _is_norm(module) else ())
                continue
            if (id(parameter), type(module)) in seen:
                continue
            seen.add((id(parameter), type(module)))
            sums = placement.dim == (0 if type(module).__name__ == "Conv1D" else 1)  # transformers': in features first
            if isinstance(module, nn.Embedding):
                kinds.add("table" if placement.dim == 0 else "part")
            elif module in heads:
                kinds.update({"head"} if placement.dim == 0 else ())
            elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                kinds.update({"sum"} if placement.dim == 1 else {"out"} if module.groups == 1 else ())
            elif parameter.ndim == 3:
                kinds.add("stack")
            elif parameter.ndim == 2:
                kinds.add("sum" if sums else "out")
        around = decided(plan.boundaries, path, Boundary())
        if kinds & {"out", "part"} and "sum" not in kinds and isinstance(around.output.get(axis), Replicate):
            kinds.add("gather")
        yield from ((path, kind) for kind in sorted(kinds))


def _is_half(module: nn.Module) -> bool:
    """True if it holds one stack of experts' weights, and another module the other."""
    return sum(one.ndim == 3 for one in module.parameters(recurse=False)) == 1


def _is_norm(module: nn.Module) -> bool:
    """True if it norms all of its features together, by torch's classes and by common names."""
    if getattr(module, "group_size", None) or getattr(module, "num_groups", None):
        return False
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or bool(re.search("(RMS|Layer)_?Norm", type(module).__name__))


def _heads(model: nn.Module) -> list[nn.Module]:
    """Modules whose out features are a vocabulary: what the model calls its output, else the only one that has as many
    as a table has rows."""
    named = getattr(model, "get_output_embeddings", lambda: None)()
    if named is not None:
        return [named]
    rows = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    alike = [one for one in model.modules() if isinstance(one, nn.Linear) and one.out_features in rows]
    return alike if len(alike) == 1 else []

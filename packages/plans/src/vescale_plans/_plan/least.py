"""The collectives that a plan's cut weights need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from vescale_dtensor import InterleavedShard, Shard

from .fields import PlanFields
from .match import first_match


def least_collectives(
    plan: PlanFields, model: nn.Module, calls: Mapping[str, int] | None = None, *, backward: bool = True
) -> int:
    """A count from the weights that `plan` cuts along axes that share no batch; a yardstick, not a bound.

    A weight cut along what it sums over takes a reduction in forward, and what feeds its group one in backward; an
    embedding cut along its rows one in forward. A head cut along the vocabulary takes one in backward, and its loss
    one, of the greatest logit and the sum together. Experts in stacks take the two of a group. Recurrences, and weights
    of other kinds, count nothing.

    Arguments:
        calls: module -> how often it ran; without it each ran once.
        backward: of a forward alone, without.
    """
    both = 1 + backward
    takes = {"sum": both, "stack": both, "head": both, "table": 1}
    times = Counter({name: 1 for name, _ in model.named_modules()}) if calls is None else calls
    return sum(takes[kind] * times.get(path, 0) for axis in _axes(plan) for path, kind in _cut(axis, plan, model))


def open_sums(plan: PlanFields, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Module -> axes over which it gives a sum of parts that no boundary, of it or of one around it, makes whole."""
    found: dict[str, tuple[str, ...]] = {}
    for axis in _axes(plan):
        for path, kind in _cut(axis, plan, model):
            parts = path.split(".")
            around = (first_match(plan.boundaries, ".".join(parts[:end])) for end in range(1, len(parts) + 1))
            if kind != "head" and not any(glob and axis in plan.boundaries[glob].output for glob in around):
                found[path] = (*found.get(path, ()), axis)
    return found


def _axes(plan: PlanFields) -> list[str]:
    apart = {*plan.data_axes, plan.context_axis, plan.expert_axis, plan.pipeline.axis if plan.pipeline else None}
    return [axis for axis, size in plan.mesh.items() if size > 1 and axis not in apart]


def _cut(axis: str, plan: PlanFields, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules that need communication for how their weights are cut: path, and "sum", "table", "head" or "stack"."""
    seen: set[tuple[int, type]] = set()
    heads = _heads(model)
    for path, module in model.named_modules():
        kinds = set()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            glob = first_match(plan.parameters, f"{path}.{name}" if path else name)
            placement = plan.parameters[glob].get(axis) if glob is not None else None
            if not isinstance(placement, Shard | InterleavedShard) or parameter.ndim < 2:
                continue
            if (id(parameter), type(module)) in seen:
                continue
            seen.add((id(parameter), type(module)))
            if isinstance(module, nn.Embedding):
                kinds.update({"table"} if placement.dim == 0 else ())
            elif module in heads:
                kinds.update({"head"} if placement.dim == 0 else ())
            elif parameter.ndim == 3:
                kinds.add("stack")
            elif placement.dim == (0 if type(module).__name__ == "Conv1D" else 1):  # transformers': in features first
                kinds.add("sum")
        yield from ((path, kind) for kind in sorted(kinds))


def _heads(model: nn.Module) -> list[nn.Module]:
    """Modules whose out features are a vocabulary: what the model calls its output, else the only one that has as many
    as a table has rows."""
    named = getattr(model, "get_output_embeddings", lambda: None)()
    if named is not None:
        return [named]
    rows = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    alike = [one for one in model.modules() if isinstance(one, nn.Linear) and one.out_features in rows]
    return alike if len(alike) == 1 else []

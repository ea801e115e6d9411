"""Finds the modules that are experts, and where a plan's expert axis puts their parameters. Pure.

stacked    one module with stacked weights [experts, ...] and a forward of tokens, indices and weights
listed     a ModuleList of modules alike, in a block that has a router for as many: a two-dim parameter, one side
           of which is their number and the other a size of theirs. The block's own forward calls them. A block
           around one that has experts has none: its lists are layers, or norms of layers.

Without an expert axis every rank has all experts. A forward over stacks sorts the rows of the whole batch by expert,
which functions alone could only do by gathering it. So where a data or context axis shards rows, the stacks of
transformers, which are known to treat each row by itself, compute the rows that are there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from vescale_dtensor import Placement, RaggedShard, Replicate, Shard

from .._plan.fields import EXPERT_FORMS, PlanFields
from .._plan.parts import PlanError
from .told import Stack

Placed = dict[str, dict[str, Placement]]


@dataclass(frozen=True)
class Experts:
    """The experts of a model: module name -> its stack; name of a list -> how many members.

    `axis`: over which they are spread; where the plan names none, one that cuts the batch, whose ranks compute
    their own rows.
    """

    stacked: Mapping[str, Stack] = field(default_factory=dict)
    listed: Mapping[str, int] = field(default_factory=dict)
    axis: str | None = None


def stacked_experts(module: nn.Module) -> int:
    """Returns how many experts a module holds as slices of stacked weights; 0 if it is not an experts module."""
    stacks = [parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
    if len(stacks) < 2 or len({*stacks}) > 1:
        return 0
    return stacks[0] if len(_positional(module)) >= 3 else 0


def listed_experts(block: nn.Module) -> tuple[str, int] | None:
    """(name of the list among the block's children, members) when the block has a list of experts and their router."""
    children = dict(block.named_children())
    for name, child in children.items():
        if isinstance(child, nn.ModuleList) and _alike(child):
            sizes = {size for parameter in child[0].parameters() for size in parameter.shape}
            outside = (p for key, p in block.named_parameters() if not key.startswith(f"{name}."))
            routers = (p for p in outside if p.ndim == 2 and len(child) in p.shape)
            others = (other for key, other in children.items() if key != name)
            if any(set(p.shape) - {len(child)} <= sizes for p in routers) and not any(map(_has_experts, others)):
                return name, len(child)
    return None


def _has_experts(module: nn.Module) -> bool:
    return any(stacked_experts(one) or listed_experts(one) for one in module.modules())


def _alike(members: nn.ModuleList) -> bool:
    """Modules of one kind with parameters of their own, of the same names and shapes, that take one tensor each."""
    if len(members) < 2 or len({type(member) for member in members}) > 1:
        return False
    if any(isinstance(inner, nn.ModuleList) or stacked_experts(inner) for inner in members[0].modules()):
        return False  # layers, which hold experts themselves
    shapes = [[(key, p.shape) for key, p in member.named_parameters()] for member in members]
    every = [id(parameter) for member in members for parameter in member.parameters()]
    if not shapes[0] or any(one != shapes[0] for one in shapes) or len({*every}) < len(every):
        return False
    takes = inspect.signature(members[0].forward).parameters.values()
    needs = [p for p in takes if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needs) == 1


def find_experts(plan: PlanFields, model: nn.Module, declared: Mapping[str, str]) -> Experts:
    """Every experts module and list of experts, when the plan has an expert axis. Raises PlanError for none, and for a
    declared one that cannot be. Otherwise those whose rows stay where the batch is cut."""
    stacked = {name: Stack(count) for name, module in model.named_modules() if (count := stacked_experts(module))}
    if plan.expert_axis is None:
        cutting = [axis for axis in (plan.context_axis, *plan.data_axes) if axis is not None]
        shared = [axis for axis in cutting if plan.mesh[axis] > 1]
        stacked = {name: count for name, count in stacked.items() if _is_huggingfaces(model.get_submodule(name))}
        return Experts(stacked, axis=shared[-1]) if shared and stacked else Experts()
    stacked |= {name: _declared(name, model.get_submodule(name), form) for name, form in declared.items()}
    listed = {
        f"{name}.{found[0]}" if name else found[0]: found[1]
        for name, module in model.named_modules()
        if (found := listed_experts(module))
    }
    if not stacked and not listed:
        raise PlanError(
            "parallelize",
            f"the plan spreads experts over axis {plan.expert_axis!r}, and the model has none: no module with stacked "
            "weights [experts, ...] and a forward of tokens, indices and weights, and no ModuleList of equal modules "
            "next to a router of the same size",
            (),
            _without_an_axis(model),
        )
    if listed and plan.capacity_factor is not None:
        raise PlanError(
            "parallelize",
            f"capacity_factor={plan.capacity_factor} counts rows in the order of tokens, but {next(iter(listed))!r} is "
            "a list, whose block passes rows in its own order",
            (),
            [("capacity_factor=None", "nothing is dropped"), ("experts as stacked weights [experts, ...]", "")],
        )
    return Experts(stacked, listed, plan.expert_axis)


def _without_an_axis(model: nn.Module) -> list[tuple[str, str]]:
    """Returns remedies for a model whose experts, if it has any, are of no form that an expert axis knows."""
    stacks = {name.rpartition(".")[0] for name, one in model.named_parameters() if one.ndim == 3}
    folders = sorted({f"*.{name.rpartition('.')[2]}" for name in stacks if name})
    spread = ", ".join(f"'{folder}.*': {{'tp': Shard(0)}}" for folder in folders)
    told = ", ".join(f"{folder!r}: 'counts'" for folder in folders)
    named = [
        (f"parameters={{{spread}, ...}}", "whole experts on each rank of a mesh axis of their own"),
        (f"experts={{{told}}}", f"where {EXPERT_FORMS['counts']}"),
    ]
    everywhere = ("expert_axis=None", "all experts on every rank; with zero=3 each holds its share of every weight")
    return [everywhere, *named * bool(folders)]


def _declared(name: str, module: nn.Module, form: str) -> Stack:
    """Returns the stack of a module that the plan says is experts. Raises PlanError where it cannot be divided."""
    counts = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    inside = next((key for key, _ in module.named_parameters() if "." in key and "parametrizations" not in key), None)
    takes, needs = _positional(module), 2 if form == "counts" else 3
    problem = None
    if len(counts) != 1:
        problem = "holds no weights of its own of three dims [experts, ...], alike in the first"
    elif len(takes) < needs:
        problem = f"takes ({', '.join(takes)}): it chooses experts itself, from tokens that it must see as they are"
    elif inside is not None:
        problem = f"also holds {inside!r}, which is no slice of an expert"
    if problem is None:
        return Stack(*counts, form)
    raise PlanError(
        "parallelize",
        f"experts names {name!r} as experts told by {form}, which cannot be spread: {type(module).__name__} {problem}",
        [f"{key}  {list(parameter.shape)}" for key, parameter in module.named_parameters()],
        [
            (f'experts={{"{name}.experts": "{form}"}}', f"of the stacks alone; {EXPERT_FORMS[form]}"),
            ("expert_axis=None", "all experts on every rank; with zero=3 each holds its share of every weight"),
        ],
    )


def _positional(module: nn.Module) -> list[str]:
    """The names of what a forward takes by position."""
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.KEYWORD_ONLY]


def _is_huggingfaces(module: nn.Module) -> bool:
    """True if its forward is transformers' own for experts classes: row by row, by any of its kernels."""
    library = sys.modules.get("transformers.integrations.moe")
    code = getattr(type(module).forward, "__code__", None)
    return library is not None and code is not None and code.co_filename == library.__file__


def place_experts(plan: PlanFields, model: nn.Module, experts: Experts, placed: Placed) -> Placed:
    """`placed` with the parameters of experts on the expert axis: stacks sharded, members of lists whole on one rank.

    What the plan itself says of that axis stands: experts that it keeps whole there compute the rows that are there.
    """
    if plan.expert_axis is None:
        return placed
    added: Placed = {}
    for module, (count, _) in experts.stacked.items():
        leaves = model.get_submodule(module).named_parameters(recurse=False)
        own = {f"{module}.{leaf}": Shard(0) for leaf, parameter in leaves if parameter.shape[:1] == (count,)}
        added.update(_placed(plan, module, count, own, placed))
    for module, count in experts.listed.items():
        own, ranks = {}, plan.mesh[plan.expert_axis]
        for member in range(count):  # whole, as torch.chunk cuts them
            units = tuple(int(each == member // -(-count // ranks)) for each in range(ranks))
            for leaf, parameter in model.get_submodule(f"{module}.{member}").named_parameters():
                if not parameter.ndim:
                    raise PlanError(
                        "parallelize",
                        f"{module}.{member}.{leaf} is a single number, but what one rank alone holds must have a dim",
                        (),
                        [("nn.Parameter(torch.ones(1))", "has one")],
                    )
                own[f"{module}.{member}.{leaf}"] = RaggedShard((0,), units) if ranks > 1 else Shard(0)
        added.update(_placed(plan, module, count, own, placed))
    return {**placed, **added}


def _placed(plan: PlanFields, module: str, count: int, own: Mapping[str, Placement], placed: Placed) -> Placed:
    """Places one experts module: by `own` if the plan says nothing of the expert axis."""
    axis = plan.expert_axis
    found = {name: {axis: placement, **placed[name]} for name, placement in own.items()}
    as_ours = [found[name][axis] == placement for name, placement in own.items()]
    if all(as_ours):
        _check_enough(plan, module, count)
    elif any(as_ours) or any(placements[axis] != Replicate() for placements in found.values()):
        raise PlanError(
            "parallelize",
            f"the parameters of {module!r}, one slice per expert, lie differently on axis {axis!r}",
            [f"{name}  {dict(placements)}" for name, placements in found.items()],
            [(f"leave {axis!r} out of their placements", "each expert is on one rank, whole")],
        )
    return found


def _check_enough(plan: PlanFields, name: str, count: int) -> None:
    """Every rank must hold an expert: a forward over none is nothing that a model is written for."""
    ranks = plan.mesh[plan.expert_axis]
    used = _ranks_used(count, ranks)
    if used < ranks:
        best = max(n for n in range(1, ranks) if _ranks_used(count, n) == n)
        raise PlanError(
            "parallelize",
            f"{name!r} has {count} experts, and torch.chunk over the {ranks} ranks of axis {plan.expert_axis!r} "
            f"leaves {ranks - used} without one",
            [f"mesh  {plan.mesh}"],
            [(f"{plan.expert_axis!r}: {best}", "every rank holds an expert")],
        )


def _ranks_used(count: int, ranks: int) -> int:
    """Returns how many of `ranks` get something when torch.chunk cuts `count`."""
    return -(-count // -(-count // ranks))

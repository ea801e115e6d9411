"""Builds a `Structure` from what probing saw: which contractions pair up, and which of them repeat in every block."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from vescale_trace.values import tensors_in

from ..._apply.balance import MIXERS
from ..._apply.generators import generators_kept
from ..._dry.distributions import values_unchecked
from ..._experts.structure import stacked_experts
from ..._plan.match import check_names
from ..._plan.parts import PlanError
from ..progress import Bar
from ..structure import Blocks, Experts, Group, Matrix, Source, Span, Structure, Vocabulary
from ..tensor_plan import split_parameters
from .calls import Call, Findings, Influence, Key, paired
from .forwards import raised
from .holding import holding_of
from .operands import Features
from .probe import probe
from .sample import Sample


def _probed(model: nn.Module, sample: Sample, bar: Bar) -> tuple[Sample, Findings]:
    """The first way to read the sample by which the model runs, and what was found so."""
    failed: Exception | None = None
    for one in (sample, *sample.others):
        try:
            return one, probe(model, one, bar)
        except Exception as error:
            if not sample.others:
                raise
            failed = failed or error
    if not sample.entries:  # no two differ in size, and other readings were a second guess
        raise failed
    sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in((sample.args, dict(sample.kwargs))))
    raise PlanError(
        "generate_plan",
        f"{type(model).__name__} does not run on several rows like the sample's. Its inputs differ in size along "
        "dim 0, and it runs neither if they are shared by all rows nor if each row has the same number of entries",
        [f"a row  {sizes} at first", f"which raised  {raised(failed.__cause__ or failed)}"],
        [
            ("sample=...", "with rows along dim 0 of every input, or as many entries for each row"),
            ("self.register_buffer(...)", "for what all rows share, in place of an input"),
        ],
    ) from failed


@generators_kept()
@values_unchecked()
def structure_of(
    model: nn.Module,
    sample: Sample,
    bar: Bar | None = None,
    *,
    computed: torch.dtype | None = None,
    priced: bool = True,
) -> Structure:
    """Probes `model` and reads its structure from what was seen. Nothing of the model is changed. What a step holds on
    to is counted in numbers as wide as `computed`, without it in wide and narrow ones; not at all, which takes
    half the time, of a structure that is not to be `priced`.

    Cost: some tens of forwards of a few blocks without their contractions; no communication, no weight is read.
    """
    check_names(name for name, _ in (*model.named_modules(), *model.named_parameters()))
    sample, found = _probed(model, sample, bar or Bar())
    pairs = paired(found)
    groups = tuple(
        group for sink in sorted(pairs, key=lambda key: found.calls[key].order) for group in _group(found, sink, pairs)
    )
    groups = _everywhere(groups, found.like)
    structure = Structure(
        shapes={name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)},
        modules=tuple(name for name, _ in model.named_modules() if name),
        groups=groups,
        matrices=_matrices(found),
        lookups=_lookups(found),
        heads=_heads(found, pairs),
        experts=_experts(model, found),
        routers=_routers(found),
        blocks=_blocks(model, found),
        tied=found.tied,
        coupled=found.coupled,
        mixers=tuple(name for name, module in model.named_modules() if isinstance(module, MIXERS)),
        position_dim=_position_dim(found, pairs),
        stream_entries=_entries(found),
    )
    if not priced:
        return structure
    split = split_parameters(structure, min(structure.degrees)) if structure.degrees else ()
    inside = {group.module for group in structure.groups if any(one.module == group.module for one in group.sources)}
    return replace(structure, holding=holding_of(model, sample, found.chains, split, inside - {None}, computed))


# ------------------------------------------------------------------------ groups


def _spans(influence: Influence) -> tuple[Span, ...]:
    """Per unit the first and the last feature reached."""
    hits = (row.nonzero().flatten() for row in influence.reach)
    return tuple((int(hit[0]), int(hit[-1]) + 1) if len(hit) else (0, 0) for hit in hits)


def _group(found: Findings, sink: Key, pairs: Mapping[Key, Mapping[Key, Influence]]) -> list[Group]:
    sources = pairs[sink]
    call = found.calls[sink]
    dim = _feature_dim(call.inward, found.shapes[sink[0]])
    if found.is_later(sink) or dim is None:
        return []
    made = []
    for key, influence in sources.items():
        source = found.calls[key]
        outward = _feature_dim(source.outward, found.shapes[key[0]])
        if outward is None:
            continue
        made.append(
            Source(
                key[0],
                source.bias,
                outward,
                source.out_features,
                influence.unit,
                _spans(influence),
                _site(found, found.inputs, source),
                key in found.bridged,
                source.lookup,
            )
        )
    if not made or not any(not one.companion for one in made):
        return []
    for name, reached in found.vectors.items():
        if sink in reached and set(reached) <= pairs.keys():
            size = found.shapes[name][0]
            made.append(Source(name, None, 0, size, reached[sink].unit, _spans(reached[sink]), companion=True))
    split = {one.parameter for one in made}
    kept = {key[0] for key, reached in found.influences.items() if sink in reached} - split - {sink[0]}
    experts = found.shapes[sink[0]][0] if call.stack else 0
    return [
        Group(
            sink[0],
            dim,
            call.in_features,
            call.bias,
            tuple(made),
            tuple(sorted(kept, key=lambda name: list(found.shapes).index(name))) if len(kept) < 8 else (),
            _site(found, found.outputs, call),
            experts,
            any(not found.token_wise.get(key, True) for key in (*sources, *((name, 0) for name in kept))),
        )
    ]


def _site(found: Findings, sites: Mapping[str, int | None], call: Call) -> str | None:
    """The innermost module at the call that takes, or returns, whole activations: positions and all. Of those around
    a repeated block none: where a model adds positions of its own, no module inside has the sample's, and the caller
    stands for them."""
    blocks = {name for chain in found.chains for name in chain.names}
    start = next((at for at, name in enumerate(call.path) if name in blocks), 0)
    own = reversed(call.path[start:])
    inner = next((name for name in own if sites.get(name) is not None), None)
    return inner or (call.path[-1] if call.path else None) or None


def _matrices(found: Findings) -> tuple[Matrix, ...]:
    made: dict[str, Matrix] = {}
    for (name, _), call in found.calls.items():
        if call.lookup:
            continue
        for one in found.like.get(name, (name,)):
            experts = found.shapes[name][0] if call.stack else 0
            made.setdefault(one, Matrix(one, call.in_features, call.out_features, experts))
    return tuple(made.values())


def _feature_dim(features: Features | None, shape: Sequence[int]) -> int | None:
    """The dim of a parameter all of whose indices these are, in order."""
    if features is None or features.dim is None or len(features.index) != shape[features.dim]:
        return None
    return features.dim if torch.equal(features.index, torch.arange(len(features.index))) else None


# ------------------------------------------------------------- vocabulary, experts


def _lookups(found: Findings) -> tuple[Vocabulary, ...]:
    """Tables that data look up: their rows differ where the model's integers do."""
    made = {}
    for key, call in found.calls.items():
        rows = found.shapes[key[0]][0]
        if call.lookup and call.outer is not None and rows > 2 and key[0] not in made:
            made[key[0]] = Vocabulary(key[0], None, 0, call.path[-1] if call.path else None)
    return tuple(made.values())


def _heads(found: Findings, pairs: Mapping) -> tuple[Vocabulary, ...]:
    """Contractions that reach no other, and are no sink themselves."""
    made = {}
    for key, call in found.calls.items():
        if call.lookup or call.stack or call.convolution or key in pairs or found.influences.get(key):
            continue
        dim = _feature_dim(call.outward, found.shapes[key[0]])
        if call.outer is not None and dim is not None and key not in found.routers:
            made[key[0]] = Vocabulary(key[0], call.bias, dim, call.path[-1] if call.path else None)
    return tuple(made.values())


def _routers(found: Findings) -> tuple[str, ...]:
    """Returns routers in the order of calls, those of later blocks behind their like."""
    names = (name for key in found.calls if key in found.routers for name in found.like.get(key[0], (key[0],)))
    return tuple(dict.fromkeys(names))


def _experts(model: nn.Module, found: Findings) -> tuple[Experts, ...]:
    stacks: dict[str, list[Call]] = {}
    for call in found.calls.values():
        if call.stack or (
            call.lookup and call.outer is None and any(c.stack and c.path == call.path for c in found.calls.values())
        ):
            stacks.setdefault(call.path[-1] if call.path else "", []).append(call)
    made = []
    for module, calls in stacks.items():
        names = [call.key[0] for call in calls]
        count = found.shapes[names[0]][0]
        chosen = min(found.chosen.get(count, 1), count)
        spreads = bool(module) and stacked_experts(model.get_submodule(module)) == count
        for one in zip(*(found.like.get(name, (name,)) for name in (module, *names))):
            made.append(Experts(tuple(one[1:]), count, one[0] or None, chosen, spreads))
    return tuple(dict.fromkeys(made))


# --------------------------------------------------------------- repeated blocks


def _everywhere(groups: tuple[Group, ...], repeated: Mapping[str, tuple[str, ...]]) -> tuple[Group, ...]:
    """The groups of the first block of each kind, and their like in the others. What comes from a block that fewer are
    like (T5's first makes the bias of all) is the same in all of them."""
    made: dict[str, Group] = {group.sink: group for group in groups}
    for group in groups:
        alike = len(repeated.get(group.sink, ()))
        for at in range(alike):

            def move(name: str | None, at=at, alike=alike) -> str | None:
                return repeated[name][at] if len(repeated.get(name, ())) == alike else name

            if move(group.sink) not in made:
                sources = tuple(
                    replace(s, parameter=move(s.parameter), bias=move(s.bias), module=move(s.module))
                    for s in group.sources
                )
                moved = replace(
                    group,
                    sink=move(group.sink),
                    bias=move(group.bias),
                    sources=sources,
                    kept=tuple(move(name) for name in group.kept),
                    module=move(group.module),
                )
                made[moved.sink] = moved
    return tuple(made.values())


def _blocks(model: nn.Module, found: Findings) -> tuple[Blocks, ...]:
    """Lists of blocks, and whether a pipeline may be cut between them: what crosses a cut may be of any size."""
    made: dict[int, Blocks] = {}
    spans: dict[int, tuple[int, int]] = {}
    places = {name: place for place, name in enumerate(found.outputs)}
    for at in sorted(range(len(found.chains)), key=lambda at: -_size(model, found.chains[at].names)):
        chain = found.chains[at]
        seen = [name for name in chain.names if name in found.inputs and name in found.outputs]
        order = [places[name] for name in seen]
        least, most = min(order, default=0), max(order, default=0)
        among = [found.chains[at] for at, (first, last) in spans.items() if order and least < last and first < most]
        apart = ""
        if len(seen) < 2:
            apart = "the forward calls fewer than two of them, or not with tensors"
        elif order != sorted(order):
            apart = "they are not called in the order of their registration"
        elif among:
            apart = f"they are called among {', '.join(among[0].patterns)}"
        else:
            spans[at] = order[0], order[-1]
        called = () if apart else _called(model, found, chain.names)
        made[at] = replace(chain, chained=not apart, called=called, apart=apart)
    return tuple(made[at] for at in range(len(found.chains)))


def _size(model: nn.Module, names: Sequence[str]) -> int:
    return sum(one.numel() for name in names for one in model.get_submodule(name).parameters())


def _called(model: nn.Module, found: Findings, blocks: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Modules that hold parameters and are called elsewhere among the blocks than they are registered: by the order of
    registration a pipeline's stages are told. Of blocks alike only the first few ran: what followed them all follows
    the last."""
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    starts = [places[name] for name in blocks]
    ran = [name for name in found.outputs if name in blocks]
    passed, made = -1, []
    for name in found.outputs:  # in the order in which they returned
        if name in ran:
            passed = blocks.index(name) if name != ran[-1] else len(blocks) - 1
            continue
        registered, called = max(0, bisect_right(starts, places.get(name, 0)) - 1), max(0, passed)
        apart = name in places and registered != called and not _around(name, blocks)
        if apart and model.get_submodule(name)._parameters:
            made.append((name, called))
    return tuple(made)


def _around(name: str, blocks: Sequence[str]) -> bool:
    """True if a module is in one of these blocks, or holds one."""
    return any(f"{name}.".startswith(f"{block}.") or f"{block}.".startswith(f"{name}.") for block in blocks) or not name


# ----------------------------------------------------------------------- stream


def _position_dim(found: Findings, pairs: Mapping[Key, Mapping]) -> int | None:
    """The dim of positions in what the groups' modules return, if positions meet nowhere but inside the groups."""
    stream = [  # what reaches no sink directly: what does lies inside a group
        key
        for key, call in found.calls.items()
        if call.outer is not None
        and not call.untouched
        and found.influences.get(key)
        and not set(found.influences[key]) & set(pairs)
    ]
    sinks = [key for key in pairs if found.calls[key].outer is not None]
    if not sinks or not all(found.token_wise.get(key, False) for key in stream):
        return None
    dims = {found.outputs.get(_site(found, found.outputs, found.calls[sink]) or "") for sink in sinks}
    return dims.pop() if len(dims) == 1 else None


def _entries(found: Findings) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            call.path[-1] for call in found.calls.values() if call.lookup and call.outer is not None and call.path
        )
    )

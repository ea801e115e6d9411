"""A picture of a plan on a model: a row per kind of parameter, with the parts that ranks hold."""

from __future__ import annotations

import itertools
import re
from html import escape
from math import prod

from torch import nn

from vescale_dtensor import Layout, Placement
from vescale_dtensor.engine import Mesh, Picture, canonical_states, drawing, layout_of

from .fields import PlanFields
from .json import placement_text
from .match import match
from .validate import fit

WIDTH, LEFT, TOP, THUMB, ROW, LINE = 900, 16, 60, (200, 52), 76, 18
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def draw(plan: PlanFields, model: nn.Module) -> Picture:
    """See `Plan.draw`."""
    fit(plan, model)
    parameters = dict(model.named_parameters())
    placed = match(plan.parameters, parameters, "parameter", complete=True)
    axes = [name for name in plan.mesh if plan.pipeline is None or name != plan.pipeline.axis]
    mesh = Mesh(tuple(plan.mesh[name] for name in axes), tuple(axes))
    kinds: dict[tuple[str, tuple[int, ...], tuple[Placement, ...]], list[str]] = {}
    for name, parameter in parameters.items():
        whole = dict(zip(plan.mesh, plan.placements(placed[name])))
        key = (_NUMBER.sub("*", name), tuple(parameter.shape), tuple(whole[axis] for axis in axes))
        kinds.setdefault(key, []).append(name)
    rows = []
    for i, ((name, shape, placements), names) in enumerate(kinds.items()):
        layout = layout_of(mesh, canonical_states("Plan.draw", placements, mesh, shape), shape)
        rows += _row(plan, layout, name, len(names), TOP + ROW * i)
    captions = list(_captions(plan))
    top = TOP + ROW * len(kinds) + LINE
    height = top + LINE * len(captions)
    title = f"parameters of {type(model).__name__} on {mesh}"
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>{drawing.HATCH}",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="14" font-weight="bold">{escape(title)}</text>',
        *rows,
        *(f'<text x="{LEFT}" y="{top + LINE * i}">{escape(line)}</text>' for i, line in enumerate(captions)),
        "</svg>",
    ]
    return Picture("\n".join(text), "; ".join([title, *captions]))


def _row(plan: PlanFields, layout: Layout, name: str, count: int, y: int) -> list[str]:
    shown = drawing.shown_dims(layout)
    held = {places: _ranks(plan, ranks) for places, ranks in drawing.parts(layout, shown).items()}
    drawn = drawing.rectangles(layout, held, shown, (LEFT, y, *THUMB))
    x = LEFT + THUMB[0] + 16
    shape = ", ".join(map(str, layout.shape))
    cut = [
        f"{axis}: {placement_text(state.placement)}"
        for axis, state in zip(layout.mesh.names, layout.states)
        if not state.is_replicated
    ]
    largest = max(prod(layout.shape_at(one)) for one in itertools.product(*map(range, layout.mesh.sizes)))
    times = f" (of {count})" if count > 1 else ""
    lines = [
        f'<tspan font-weight="bold">{escape(name)}</tspan>{times}  [{shape}]',
        escape(", ".join(cut) or "the same on all ranks"),
        f"{largest:,} of {prod(layout.shape):,} elements on a rank",
    ]
    return [*drawn, *(f'<text x="{x}" y="{y + 14 + LINE * i}">{line}</text>' for i, line in enumerate(lines))]


def _ranks(plan: PlanFields, places: list[int]) -> list[int]:
    """Ranks of the first stage at places in the mesh without the pipeline's axis."""
    if plan.pipeline is None:
        return places
    names, axis = list(plan.mesh), plan.pipeline.axis
    inner = prod(plan.mesh[name] for name in names[names.index(axis) + 1 :])
    return [place // inner * inner * plan.mesh[axis] + place % inner for place in places]


def _captions(plan: PlanFields) -> list[str]:
    """Explains the picture, and names what it does not show."""
    said = ["a colour is one part of the parameter, written on it the ranks that hold it; 'of n': n layers have one"]
    if plan.zero == 3:
        ranks = f"{plan.mesh[plan.zero_axis]} ranks of {plan.zero_axis}"
        said.append(f"zero 3: between uses each of the {ranks} keeps an equal share of a part")
    if plan.pipeline is not None:
        axis, cuts = plan.pipeline.axis, ", ".join(plan.pipeline.cuts)
        ranks = f"{plan.mesh[axis]} ranks"
        said.append(f"ranks are those of stage 0; along {axis} the {ranks} hold other layers, cut at {cuts}")
    return said

"""Counts what a training step holds on to, tensor by tensor, from one step of a few blocks without values.

The model itself is run, forward and backward (`step.py`), with as many rows as two and as four; what grows with the
rows is an activation, what does not is the size of a parameter. A tensor lies between the tensor axis's matrices,
and is split by it, if it comes out of a split matrix and has not met the next one yet; so is the gradient of a split
table. What a module makes of whole activations that it is given, with split matrices inside (experts and their rows),
is whole on every rank, whether positions are split outside or not, and so is what a split matrix is multiplied with,
which is gathered before, and kept so. So nothing is assumed about attention, norms, gates
or the loss: they keep what they keep. Keys that are repeated for the kernel of a CPU are told apart, and scores for
which it has no kernel (values that are narrower than queries); and of a loss over classes what it makes on the way,
since of split ones it is computed in another way (`_rules/solvers/class_parts.py` of vescale_dtensor): it keeps the
scores in place of their logarithms, and makes their gradient in float32, in place.

Which modules of a block are worth computing again in place of all of it follows from the same step. What was made and
saved in one module alone is not kept if that module is computed again; what it was called with is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..held import Amount, Block, Holding, Inside, summed
from ..structure import Blocks
from .blocks import hand_on, skipped
from .model import on_meta
from .sample import Sample
from .step import Item, Step

ROWS, LONGER = (2, 4), 2
DTYPES = (torch.float32, torch.bfloat16)


def holding_of(
    model: nn.Module,
    sample: Sample,
    chains: Sequence[Blocks],
    split: Collection[str],
    around: Collection[str] = (),
    computed: torch.dtype | None = None,
) -> dict[int, Holding]:
    """Bytes of a number -> what is held when the model computes in such numbers; without those in which it does not run
    on tensors without values, or makes nothing that a loss can be made of.

    Arguments:
        split: parameters that the tensor axis splits.
        around: modules that take and give whole activations, with split parameters between.
        computed: the numbers that are asked for, alone; without them all of `DTYPES`.
    """
    asked = [one for one in DTYPES if computed is None or one.itemsize == computed.itemsize]
    stand_ins = skipped(chains)
    found: dict[int, Holding] = {}
    try:
        ran = on_meta(model, stand_ins)
        for parameter in ran.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        hand_on(ran, chains)
        names = [name for chain in chains for name in chain.names if name not in stand_ins]
        for dtype in asked or DTYPES:
            told = (names, split, around, dtype)
            runs = [Step(ran.to(dtype), sample, *told, rows) for rows in ROWS]
            if (held := _summed(*runs, _longer(ran, sample, *told), sample.positions or 1)) is not None:
                found[dtype.itemsize] = _everywhere(held, chains)
    except Exception:  # of the model's own code: what it is cannot be known, and the formula stands in
        return found
    return found


def _longer(ran: nn.Module, sample: Sample, *told: Any) -> Step | None:
    """Runs a step with more positions; None if that many do not go in."""
    try:
        return Step(ran, sample.longer(LONGER), *told, ROWS[1])
    except Exception:
        return None


def _everywhere(held: Holding, chains: Sequence[Blocks]) -> Holding:
    """Completes blocks that did not run from the last of their kind that did."""
    blocks = {}
    for chain in chains:
        like: dict[int, str] = {}
        for name, kind in zip(chain.names, chain.kinds):
            if name in held.blocks:
                like[kind] = name
            if kind in like:
                blocks[name] = held.blocks[like[kind]]
    return replace(held, blocks=blocks)


def _summed(few: Step, many: Step, longer: Step | None, positions: int) -> Holding | None:
    if len(few.log.items) != len(many.log.items) or list(few.spans) != list(many.spans):
        return None
    if longer is not None and len(longer.log.items) != len(many.log.items):
        longer = None
    thirds = longer.log.items if longer is not None else [None] * len(many.log.items)
    amounts = [_amount(*three, positions) for three in zip(few.log.items, many.log.items, thirds)]
    items = many.log.items
    spans = sorted(many.spans.items(), key=lambda one: one[1][0])
    inside: dict[str, Amount] = {}
    for name, (start, stop, *_) in spans:
        inside[name] = summed(
            amount
            for amount, one in zip(amounts, items)
            if start <= one.born < stop and not one.kind and (one.died is None or one.died > many.lost)
        )
    changes = sorted(
        [(one.born, amount, 1) for amount, one in zip(amounts, items) if not one.kind]
        + [(one.died, amount, -1) for amount, one in zip(amounts, items) if not one.kind and one.died is not None],
        key=lambda each: each[0],
    )
    phases: dict[tuple, list[Amount]] = {}
    began = {name: _began(many, name) for name in many.spans}
    live = Amount()
    for time, amount, sign in changes:
        if time > many.done:
            break
        live = live.plus(amount, sign)
        below, key = Amount(), ("tail",)
        for name, (start, stop, back, end) in spans:
            if start <= time < stop:
                key = ("forward", name)
                break
            if back <= time < end:
                key = ("backward", name, tuple(one for one, begins in began[name] if time < begins))
                break
            if time >= stop and time < back:
                below = below.plus(inside[name])
                key = ("loss",)
        phases.setdefault(key, []).append(live.plus(below, -1))
    blocks = {
        name: Block(
            inside[name],
            amounts[many.streams[name]],
            {key[2]: _worst(each) for key, each in phases.items() if key[:2] == ("backward", name)},
            _again(many, name, amounts),
            _worst(phases.get(("forward", name), ())),
        )
        for name, _ in spans
    }
    return Holding(blocks, _worst(phases.get(("loss",), ())), _worst(phases.get(("tail",), ())))


def _began(run: Step, block: str) -> list[tuple[str, int]]:
    """Finds when the backward of each module of a block begins, of those that save anything."""
    return [(place[1], begins) for place, (_, _, begins) in run.calls.items() if place[0] == block and begins >= 0]


def _again(run: Step, block: str, amounts: Sequence[Amount]) -> Mapping[str, Inside]:
    """Memory of the modules that a block calls. What those of a name are given in all blocks (a mask) is held by the
    first."""
    handed = set().union(*run.taken.values())
    found = {}
    for place, (start, stop, begins) in run.calls.items():
        if place[0] != block or begins < 0:
            continue
        saved, made = Amount(), Amount()
        alike = [(other, items) for other, items in run.taken.items() if other[1] == place[1]]
        first = {at: other for other, items in reversed(alike) for at in items}
        for at, (amount, one) in enumerate(zip(amounts, run.log.items)):
            if one.kind:
                continue
            kept = one.died is None or one.died > run.lost
            if start <= one.born < stop:
                made = made.plus(amount)
                if kept and run.saved.get(at) == {place} and at not in handed:
                    saved = saved.plus(amount)
            elif not kept and first.get(at) == place:
                saved = saved.plus(amount, -1)
        found[place[1]] = Inside(saved, made)
    return found


def _amount(few: Item, many: Item, longer: Item | None, positions: int) -> Amount:
    """Fits an amount to one tensor's sizes with two and four rows, and with four of twice the positions."""
    low, high = ROWS
    row = (many.size - few.size) / (high - low)
    fixed = max(0.0, many.size - high * row)
    square = meeting = 0.0
    if longer is not None and row:
        square = max(0.0, (longer.size - fixed) / high - LONGER * row) / (LONGER * (LONGER - 1) * positions**2)
    elif longer is not None and longer.size >= LONGER**2 * fixed:
        fixed, meeting = 0.0, fixed / positions**2
    each = row / positions - square * positions
    if many.written:
        return Amount(written=square or row / positions**2)
    if many.split:
        kept = Amount(split_meet=square, meet=meeting, fixed_split=fixed)
        if many.loss:  # split, it is made of numbers of four bytes, and narrower ones after it
            return kept._replace(classes=each, classes_split=4 / many.loss * each if many.loss < 4 else 0.0)
        once = each / max(1, many.repeated)
        return kept._replace(split=once, repeated=each - once)
    kept = Amount(whole_meet=square, fixed=fixed, meet=meeting)
    return kept._replace(gathered=each) if many.inside or many.met else kept._replace(whole=each)


def _worst(amounts: Sequence[Amount]) -> tuple[Amount, ...]:
    """Returns the amounts that no other exceeds in every part."""
    kept: list[Amount] = []
    for one in sorted({Amount(*(round(part, 3) for part in amount)) for amount in amounts}, reverse=True):
        if not any(all(k >= o for k, o in zip(other, one)) for other in kept):
            kept.append(one)
    return tuple(kept)

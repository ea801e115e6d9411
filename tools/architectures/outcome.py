"""One architecture under one case, against one device. All that a rank runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import vescale

from .register import build, inputs_of, loss_of

STEPS, RATE = 3, 0.05
LOSS, BY_SCALE, BY_NORM, LATER = 1e-5, 1e-5, 1e-3, 1e-3
"""Relative errors: of each step's loss; of a gradient by the largest gradient's norm, and by its own.

The last pass's gradients and what the steps made of the parameters are measured as the first gradients are, by the
largest of their kind, and may be farther apart: an update multiplies rounding (gemma4_text: 1e-5, then 3e-4; in double
precision, but for what it computes in float32, 2e-7, then 2e-5)."""
NEW_TOKENS = 4


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Models warn of their own configuration; of a small one most of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


Tensors = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """What some passes gave, by the names of parameters, and a trace of the last."""

    losses: list[float]
    gradients: Tensors  # of the first
    last: Tensors
    parameters: Tensors
    trace: Any


def trained(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1) -> Trained:
    """Some passes. The gradients of the first two accumulate; an update follows each pass but the first.

    A batch is called whole, or in `parts` of its rows whose mean is the loss."""
    losses, gradients = [], {}
    for step in range(STEPS):
        torch.manual_seed(step)  # of what draws although nothing is dropped: hashes, for one
        with vescale.comm_trace(model) as trace:
            batch = inputs_of(name, step + 1)
            loss = loss_of(model, batch) if parts == 1 else _mean([loss_of(model, one) for one in _cut(batch, parts)])
            loss.backward()
            if step:
                optimizer.step()
        if not step:
            gradients = _gradients(model)
        else:
            last = _gradients(model)
            optimizer.zero_grad()
        losses.append(loss.item())
    parameters = {n: _whole(p).detach().clone() for n, p in model.named_parameters() if n in gradients}
    return Trained(losses, gradients, last, parameters, trace)


def _mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(losses).mean()


def _cut(inputs: dict[str, Any], parts: int) -> Iterator[dict[str, Any]]:
    for at in range(parts):
        yield {n: one.chunk(parts)[at] if isinstance(one, torch.Tensor) else one for n, one in inputs.items()}


def _parts(name: str, plan: vescale.Plan) -> int:
    """In how many parts one device takes a batch. A pipeline's microbatches draw their own random numbers, and have
    their own statistics in batch normalization, as where one device accumulates (design, section 9); all else is held
    against the batch as a whole."""
    if getattr(plan, "pipeline", None) is None:
        return 1
    model = build(name)
    normalized = any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules())
    return plan.pipeline.microbatches if normalized or _draws(name, model) else 1


def _draws(name: str, model: nn.Module) -> bool:
    """Whether a forward takes random numbers, as a router that samples its experts does."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loss_of(model, inputs_of(name))
    return not torch.equal(before, torch.get_rng_state())


def _gradients(model: nn.Module) -> Tensors:
    return {n: _whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def judged(name: str, plan: vescale.Plan) -> dict[str, Any]:
    """Errors against one device in the fields of BOUNDS, and the collectives of a step beside gradient syncs."""
    with quiet():
        alone = build(name)
        before = {n: p.detach().clone() for n, p in alone.named_parameters()}
        wanted = trained(name, alone, torch.optim.SGD(alone.parameters(), RATE), _parts(name, plan))
        found = trained(name, *_parallel(name, plan))
    moved = {n: p - before[n] for n, p in wanted.parameters.items()}
    losses = zip(wanted.losses, found.losses, strict=True)
    by_scale, by_norm = _apart(found.gradients, wanted.gradients)
    return {
        "loss": max(abs(one - other) / max(abs(one), 1e-3) for one, other in losses),
        "by scale": by_scale,
        "by norm": by_norm,
        "last by scale": _apart(found.last, wanted.last)[0],
        "moved by scale": _apart({n: p - before[n] for n, p in found.parameters.items()}, moved)[0],
        "gradients": sorted(found.gradients),
        "gradients wanted": sorted(wanted.gradients),
        "collectives": len(found.trace) - found.trace.count(function="gradient sync"),
        "minimum": found.trace.least,
    }


def _apart(found: Tensors, wanted: Tensors) -> tuple[float, float]:
    """The largest error of those found by the largest norm wanted, and by its own where that is not tiny."""
    norms = {n: one.norm().item() for n, one in wanted.items()}
    scale = max(norms.values())
    apart = {n: (one - wanted[n]).norm().item() for n, one in found.items()}
    by_norm = max((apart[n] / norms[n] for n in apart if norms[n] > 1e-4 * scale), default=0.0)
    return max(apart.values()) / scale, by_norm


BOUNDS = {"loss": LOSS, "by scale": BY_SCALE, "by norm": BY_NORM, "last by scale": LATER, "moved by scale": LATER}


def wrong(found: dict[str, Any]) -> dict[str, float]:
    """The errors beyond their bounds, one that is not a number among them."""
    return {name: found[name] for name, bound in BOUNDS.items() if not found[name] <= bound}


def generated(name: str, plan: vescale.Plan) -> bool | None:
    """Whether greedy tokens are those of one device; None where one device generates none."""
    with quiet():
        prompt = inputs_of(name)["input_ids"]
        asked = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        try:
            wanted = build(name).eval().generate(prompt, **asked)
        except Exception:  # reformer: no positions are left after a prompt of its axial shape
            return None
        found = _parallel(name, plan)[0].eval().generate(prompt, **asked)
    return torch.equal(_whole(found), wanted)


def _parallel(name: str, plan: vescale.Plan, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(name)
    return vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, RATE), **how)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor

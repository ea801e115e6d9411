"""One architecture under one case, against one device. All that a rank runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import vescale

from .register import build, inputs_of, loss_of

STEPS, RATE = 3, 0.05
LOSS, BY_SCALE, BY_NORM = 1e-5, 1e-5, 1e-3
"""Relative errors: of each step's loss; of a gradient by the largest gradient's norm, and by its own."""
NEW_TOKENS = 4


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Models warn of their own configuration; of a small one most of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], dict[str, Any], Any]:
    """Losses of some passes, the first one's gradients, and a trace of the last.

    The gradients of the first two accumulate; an update follows each pass but the first.
    """
    losses, gradients = [], {}
    for step in range(STEPS):
        torch.manual_seed(step)  # of what draws although nothing is dropped: hashes, for one
        with vescale.comm_trace(model) as trace:
            loss = loss_of(model, inputs_of(name, step + 1))
            loss.backward()
            if step:
                optimizer.step()
        if not step:
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            gradients = {n: _whole(g).clone() for n, g in gradients.items()}
        else:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, trace


def judged(name: str, plan: vescale.Plan) -> dict[str, Any]:
    """Errors against one device in the fields of BOUNDS, and the collectives of a step beside gradient syncs."""
    with quiet():
        alone = build(name)
        wanted, gradients, _ = trained(name, alone, torch.optim.SGD(alone.parameters(), RATE))
        model, optimizer = _parallel(name, plan)
        losses, found, trace = trained(name, model, optimizer)
    norms = {n: g.norm().item() for n, g in gradients.items()}
    scale = max(norms.values())
    apart = {n: (g - gradients[n]).norm().item() for n, g in found.items()}
    return {
        "loss": max(abs(one - other) / max(abs(one), 1e-3) for one, other in zip(wanted, losses, strict=True)),
        "by scale": max(apart.values()) / scale,
        "by norm": max((apart[n] / norms[n] for n in apart if norms[n] > 1e-4 * scale), default=0.0),
        "gradients": sorted(found),
        "gradients wanted": sorted(gradients),
        "collectives": len(trace) - trace.count(function="gradient sync"),
    }


BOUNDS = {"loss": LOSS, "by scale": BY_SCALE, "by norm": BY_NORM}


def wrong(found: dict[str, Any]) -> dict[str, float]:
    """The errors beyond their bounds, one that is not a number among them."""
    return {name: found[name] for name, bound in BOUNDS.items() if not found[name] <= bound}


def static(name: str, plan: vescale.Plan) -> list[str]:
    """What is not bitwise alike in static mode."""
    with quiet():
        eager = trained(name, *_parallel(name, plan))
        other = trained(name, *_parallel(name, plan, mode="static"))
    apart = [n for n, g in eager[1].items() if not torch.equal(g, other[1][n])]
    return apart + ["losses"] * (eager[0] != other[0])


def generated(name: str, plan: vescale.Plan) -> bool:
    """Whether greedy tokens are those of one device."""
    with quiet():
        prompt = inputs_of(name)["input_ids"]
        asked = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        wanted = build(name).eval().generate(prompt, **asked)
        found = _parallel(name, plan)[0].eval().generate(prompt, **asked)
    return torch.equal(_whole(found), wanted)


def _parallel(name: str, plan: vescale.Plan, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(name)
    return vescale.parallelize(plan, model, lambda parameters: torch.optim.SGD(parameters, RATE), **how)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, vescale.DTensor) else tensor

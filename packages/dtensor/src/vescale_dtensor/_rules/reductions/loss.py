"""Loss functions.

    batch dims sharded         a sum is P; a mean is P with the global count in its denominator
    class dim sharded          cross entropy and nll never gather it (`classes`)
    features sharded           gathered, where the loss needs them whole
    partial                    reduced first: no loss is linear

A mean over elements is this rank's mean times its share of the elements, so that it is
right on uneven shards, needs no communication, and overflows no half precision that
one device does not.
"""

from __future__ import annotations

from itertools import islice
from math import prod

import torch.nn.functional as F

from vescale_trace.stack import frames

from ..._dispatch.signature import Signature, solve
from ..._errors import OperatorError
from ..._torch_private import legacy_get_string
from ..body import run_body
from ..elements.pointwise import broadcast
from ..registry import Call, Decision, decomposed, rule
from ..solvers.owned import nothing


def reduction_of(call: Call) -> str:
    """The reduction by name, legacy `size_average` and `reduce` included. The functions take it by keyword or last."""
    given = bound(call)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return legacy_get_string(given.get("size_average"), given.get("reduce"), emit_warning=False)
    return given["reduction"]


def bound(call: Call) -> dict:
    """All arguments of a Python function by name, defaults included."""
    code, defaults = call.function.__code__, call.function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    values = dict(zip(names[len(names) - len(defaults) :], defaults))
    values.update(zip(names, call.args))
    values.update(call.kwargs)
    return values


def reduced(call: Call, inputs, each, shape, reduction: str) -> Decision | None:
    """The decision for a loss of `shape` with labels `each` before its reduction."""
    if reduction == "none":
        return solve(call, Signature(inputs, [each], whole=_others(inputs, each), shapes=[shape]))
    if reduction not in ("mean", "batchmean", "sum"):
        return None  # the function itself says so
    signature = Signature(
        inputs, [each, ()], summed=set(each), whole=_others(inputs, each), shapes=[shape, ()], single=False
    )
    decision = solve(call, signature)
    if decision is None:
        return None
    parts, decision.out = decision.out
    if 0 in shape:
        return decision
    if 0 in parts.local_shape:
        decision.run = _sum(call.function)  # a mean of nothing is nan
    elif reduction == "batchmean":
        decision.run = _shared(call.function, parts.local_shape[0] / shape[0])
    elif reduction == "mean" and parts.local_shape != tuple(shape):
        decision.run = _shared(call.function, prod(parts.local_shape) / prod(shape))
    return decision


def _others(inputs, each) -> set:
    """Labels that do not reach the result: features and classes, which a loss needs whole."""
    return {label for labels in inputs for label in labels if label is not None and label not in each}


def _shared(function, share: float):
    def run(*args, **kwargs):
        return function(*args, **kwargs) * share

    return run


def _sum(function):
    def run(*args, **kwargs):
        return function(*args, **{**kwargs, **_SUM} if "reduce" in kwargs else {**kwargs, "reduction": "sum"})

    return run


_SUM = {"size_average": None, "reduce": None, "reduction": "sum"}


# --- elementwise ------------------------------------------------------------------

# How many operands, when all are given, must have equal sizes: these do not broadcast.
_ALIKE = {F.huber_loss: 3, F.binary_cross_entropy: 2, F.binary_cross_entropy_with_logits: 2}


@rule(
    F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
    F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
)  # fmt: skip
def elementwise_loss(call: Call):
    """Any weight broadcasts like another operand. Sizes that must be equal are compared here, where they are global."""
    found = broadcast(call.operands)
    alike = call.operands[: _ALIKE.get(call.function, 0)]
    if found is None or len(alike) == _ALIKE.get(call.function) and len({one.shape for one in alike}) > 1:
        return None
    inputs, each, shape = found
    return reduced(call, inputs, each, shape, reduction_of(call))


@rule(F.mse_loss)
def mse_loss(call: Call):
    """Decides mse_loss; with a weight, a mean is over the weight's sum: torch's own formula, op by op."""
    if len(call.operands) == 3:
        return decomposed(run_body(F.mse_loss, call.mesh))
    return elementwise_loss(call)


@rule(F.l1_loss)
def l1_loss(call: Call):
    decision = elementwise_loss(call)
    if decision is not None:
        decision.run = _weight_seen(decision.run or F.l1_loss)
    return decision


def _weight_seen(run):
    """torch (2.13) forgets l1_loss's weight when it hands over: refuse rather than leave it out."""
    code = F.l1_loss.__code__

    def checked(*args, **kwargs):
        frame = next((one for one in islice(frames(), 10) if one.f_code is code), None)
        if frame is not None and frame.f_locals.get("weight") is not None:
            raise OperatorError(
                "l1_loss",
                "torch does not pass its weight to a tensor subclass, so it would be ignored",
                (),
                [("(weight * (input - target).abs()).sum() / weight.sum()", "the mean; sum and none alike")],
            )
        return run(*args, **kwargs)

    return checked


@rule(F.kl_div)
def kl_div(call: Call):
    """`batchmean` divides by the global size of dim 0."""
    found = broadcast(call.operands)
    reduction = reduction_of(call)
    if found is None or reduction == "batchmean" and (call.operands[0].shape != found[2] or not found[2]):
        return None
    return reduced(call, *found, reduction)


@rule(F.gaussian_nll_loss)
def gaussian_nll_loss(call: Call):
    """var like input, or without its last dim, or with one dim of size 1."""
    if len(call.operands) != 3:
        return elementwise_loss(call)
    own, target, var = call.operands
    found = broadcast([own, target])
    if found is None or own.shape != found[2]:
        return None
    inputs, each, shape = found
    if var.shape == shape[:-1] and var.shape != shape:
        return reduced(call, [*inputs, each[:-1]], each, shape, reduction_of(call))
    if var.ndim != own.ndim or any(a not in (1, b) for a, b in zip(var.shape, shape)):
        return None
    labels = tuple(label if a == b else None for label, a, b in zip(each, var.shape, shape))
    return reduced(call, [*inputs, labels], each, shape, reduction_of(call))


# --- over features or classes, which are whole --------------------------------------


@rule(F.cosine_embedding_loss)
def cosine_embedding_loss(call: Call):
    """x1, x2 [N, D] or [D], target [N] or []."""
    first, second, target = call.operands
    if first.shape != second.shape or target.shape != first.shape[:-1]:
        return None
    each = tuple(range(target.ndim))
    return reduced(call, [(*each, "f"), (*each, "f"), each], each, target.shape, reduction_of(call))


@rule(F.triplet_margin_loss)
def triplet_margin_loss(call: Call):
    """anchor, positive, negative [..., D]; the distance p is a number that only the local call reads."""
    shapes = {operand.shape for operand in call.operands}
    if len(shapes) != 1 or not call.operands[0].ndim:
        return None
    each = tuple(range(call.operands[0].ndim - 1))
    return reduced(call, [(*each, "f")] * 3, each, call.operands[0].shape[:-1], reduction_of(call))


@rule(F.multi_margin_loss)
def multi_margin_loss(call: Call):
    """input [N, C], target [N], weight [C]."""
    own, target, *weight = call.operands
    if own.ndim != 2 or target.shape != own.shape[:1]:
        return None
    return reduced(call, [("n", "f"), ("n",), *[("f",)] * len(weight)], ("n",), target.shape, reduction_of(call))


@rule(F.multilabel_margin_loss)
def multilabel_margin_loss(call: Call):
    """input, target [N, C]."""
    own, target = call.operands
    if own.ndim != 2 or target.shape != own.shape:
        return None
    return reduced(call, [("n", "f")] * 2, ("n",), own.shape[:1], reduction_of(call))


@rule(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(call: Call):
    """input, target [..., C], weight broadcasts; a mean over classes, then over the rest."""
    found = broadcast(call.operands)
    if found is None or not found[1] or found[2] != call.operands[0].shape:
        return None
    inputs, each, shape = found
    return reduced(call, inputs, each[:-1], shape[:-1], reduction_of(call))


@rule(F.ctc_loss)
def ctc_loss(call: Call):
    """log_probs [T, N, C], targets [N, S], lengths [N]; concatenated targets or lengths as lists fall back."""
    if [operand.ndim for operand in call.operands] != [3, 2, 1, 1]:
        return None
    each, shape = ("n",), call.operands[2].shape
    decision = reduced(call, [("t", "n", "f"), ("n", "s"), each, each], each, shape, reduction_of(call))
    if decision is None:
        return None
    log_probs = decision.targets[0] or call.operands[0].layout
    if 0 in log_probs.local_shape:
        decision.run = _no_sequences(decision.out.local_shape)
    return decision


def _no_sequences(shape):
    def run(log_probs, *args, **kwargs):
        return nothing((log_probs,), shape)

    return run


@rule(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(call: Call):
    """The distance is the user's: torch's own formula, op by op."""
    return decomposed(run_body(call.function, call.mesh))


# --- similarities -------------------------------------------------------------------


@rule(F.cosine_similarity, F.pairwise_distance)
def similarity(call: Call):
    """Two tensors that broadcast; `dim` (the last one, of a distance) is whole."""
    found = broadcast(call.operands)
    if found is None or len(call.operands) != 2 or not found[1]:
        return None
    inputs, each, shape = found
    of_distance = call.function is F.pairwise_distance
    dim = -1 if of_distance else call.get(2, "dim", 1)
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return None
    dim %= len(shape)
    keep = of_distance and call.get(4, "keepdim", False)
    kept = (None,) if keep else ()
    ones = (1,) if keep else ()
    return Signature(
        inputs, [(*each[:dim], *kept, *each[dim + 1 :])], whole={each[dim]},
        shapes=[(*shape[:dim], *ones, *shape[dim + 1 :])],
    )  # fmt: skip

"""torch's own operator database as an oracle, on a 2x2 mesh with mixed placements. For tests.

Every float32 entry of `op_db` runs on one device and on DTensors, some samples under
each row of LAYOUTS; values and gradients must agree. An entry passes, raises one of our
typed errors (RAISES says which may, and why), or is wrong: a different result, another
error, ranks that disagree or do not answer.

A difference in float32 may be the rounding of a sum in another order, so float64
decides there, on the same values.

    python tools/sweeps/operator_sweep.py [ENTRY ...]    all of it, or some
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import DTensor
from vescale_dtensor.placement import Partial, Placement, Replicate, Shard
from vescale_trace import VescaleError

from ._torch_private import operator_database, tree_flatten, tree_unflatten
from .oracle import spread
from .ranks import RankError, mesh_of, run_ranks

DATABASE = "torch.testing._internal.common_methods_invocations"

# Per mesh axis: a dim to shard, "P" or "R"; of the first tensor, and of all others.
LAYOUTS: tuple[tuple[tuple[Any, Any], tuple[Any, Any]], ...] = (
    ((0, -1), (0, -1)),
    ((-1, "R"), (-1, "R")),
    ((0, 0), (0, 0)),
    (("P", 0), ("R", 0)),
    (("R", "R"), ("R", "R")),
    ((0, -1), ("R", "R")),
    ((-1, "P"), ("R", "R")),
    (("R", -2), (0, "R")),
)

# Whose contents nothing defines, or a generator does: shape and dtype alone are compared, and no gradients.
UNDEFINED = frozenset(
    "empty empty_like new_empty new_empty_strided empty_strided empty_permuted resize_ resize_as_ "
    "bernoulli normal rand_like randn_like randint_like uniform multinomial cauchy exponential geometric "
    "log_normal randn randint svd_lowrank pca_lowrank nn.functional.dropout nn.functional.dropout2d "
    "nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout "
    "nn.functional.rrelu nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d".split()
)

# Entries of which some sample may raise: the type of the error, and why.
RAISES: dict[str, tuple[str, str]] = {
    "sparse.mm.reduce": ("PlacementError", "a sparse matrix is not sharded; it may stay plain beside DTensors"),
    "sparse.sampled_addmm": ("PlacementError", "a sparse matrix is not sharded; it may stay plain beside DTensors"),
}

# Written for another device: compiled for CUDA when called.
NOT_ON_CPU = frozenset(
    "jiterator_unary jiterator_binary jiterator_4inputs_with_extra_args jiterator_binary_return_by_ref "
    "jiterator_2inputs_2outputs".split()
)

MOST_DRAWN = 24  # samples that are made of an entry, to choose the largest from
LARGEST = 20_000  # elements of a sample's input
TOLERANCE = {torch.float32: (1e-4, 1e-6), torch.float64: (1e-8, 1e-10)}  # of the largest element, and absolute
DOUBLED = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a sample under a layout, or of an entry. kind: "pass", "raise", "wrong" or "none" (did not run)."""

    kind: str
    text: str = ""
    error: str = ""


@functools.cache
def database() -> dict[str, Any]:
    """The entries that take float32, by name and variant."""
    named = {f"{info.name}.{info.variant_test_name}".rstrip("."): info for info in operator_database()}
    return {name: info for name, info in named.items() if torch.float32 in info.dtypes}


def check_entry(name: str, samples: int = 2, timeout: float = 90.0) -> Outcome:
    """The worst outcome of an entry over its samples, LAYOUTS and ranks. Called in the test process."""
    outcomes = _agreed(name, samples, torch.float32, timeout)
    if any(one.kind == "wrong" for one in outcomes):
        again = _agreed(name, samples, torch.float64, timeout)
        if len(again) == len(outcomes):  # else it takes no float64, or does not survive it
            outcomes = [b if a.kind == "wrong" and b.kind != "none" else a for a, b in zip(outcomes, again)]
    for kind in ("wrong", "raise", "pass"):
        worst = [one for one in outcomes if one.kind == kind]
        if worst and kind == "raise" and {one.error for one in worst} != {RAISES.get(name, ("",))[0]}:
            unlisted = next(one for one in worst if one.error != RAISES.get(name, ("",))[0])
            return Outcome("wrong", f"raises, and RAISES does not list it: {unlisted.text}", unlisted.error)
        if worst:
            return worst[0]
    return Outcome("none") if name in NOT_ON_CPU else Outcome("wrong", "no sample runs on one device: nothing compared")


def summary(outcomes: dict[str, Outcome]) -> dict[str, int]:
    """Counts the entries, and each kind."""
    kinds = [one.kind for one in outcomes.values()]
    return {"entries": len(kinds), **{kind: kinds.count(kind) for kind in ("pass", "raise", "wrong", "none")}}


# ------------------------------------------------------------------- test process


def _agreed(name: str, samples: int, dtype: torch.dtype, timeout: float) -> list[Outcome]:
    """One outcome per case. Ranks that disagree on what happened are wrong."""
    try:
        ranks = run_ranks(4, _outcomes, name, samples, dtype, timeout=timeout)
    except RankError as error:
        return [Outcome("wrong", f"{type(error).__name__}: {str(error)[:2500]}")]
    if len({len(rank) for rank in ranks}) > 1:
        return [Outcome("wrong", f"ranks ran {[len(rank) for rank in ranks]} cases")]
    merged = []
    for each in zip(*ranks, strict=True):
        wrong = [one for one in each if one.kind == "wrong"]
        if not wrong and len({(one.kind, one.text) for one in each}) > 1:
            wrong = [Outcome("wrong", f"ranks disagree: {each}")]
        merged.append(wrong[0] if wrong else each[0])
    return merged


# --------------------------------------------------------------------- on a rank


def _outcomes(name: str, most: int, dtype: torch.dtype) -> list[Outcome]:
    """One outcome per sample and layout.

    Which cases there are, and whether each communicates, depends on the sample alone,
    never on what a rank found: so no rank waits for another that went on. What raises
    an error that is not ours ends the call, and the pool ends the other ranks.
    """
    info = database()[name]
    exact = info.name not in UNDEFINED
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(_samples(info, most)):
            leaves, tree = tree_flatten(([sample.input, *sample.args], sample.kwargs))
            if dtype != torch.float32:
                leaves = [_doubled(leaf) for leaf in leaves]

            def function(given: list[Any], tree: Any = tree) -> list[Any]:
                args, kwargs = tree_unflatten(given, tree)
                return tree_flatten(info.op(*args, **kwargs))[0]

            alone = _alone(function, leaves, exact)
            for placements in _layouts(leaves):
                if alone is None:
                    outcomes.append(Outcome("none"))
                    continue
                text = f"sample {number} of {name}, {_described(leaves, placements)}"
                try:
                    wrong = _difference(function, leaves, placements, alone, dtype, exact)
                    outcomes.append(Outcome("wrong", f"{text}: {wrong}") if wrong else Outcome("pass"))
                except VescaleError as error:
                    outcomes.append(Outcome("raise", f"{text}: {error}", type(error).__name__))
                except BaseException as error:
                    error.add_note(text)
                    raise
    return outcomes


def _samples(info: Any, most: int) -> list[Any]:
    """The largest samples up to LARGEST, the same on every rank."""
    torch.manual_seed(20261120)
    drawn = itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd), MOST_DRAWN)
    return sorted(drawn, key=_size, reverse=True)[:most]


def _size(sample: Any) -> int:
    """Size of its input, or of the largest tensor there; below all others if that is larger than LARGEST."""
    size = max((leaf.numel() for leaf in tree_flatten(sample.input)[0] if isinstance(leaf, Tensor)), default=0)
    return size if size <= LARGEST else -size


def _doubled(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype in DOUBLED:
        return leaf.detach().to(DOUBLED[leaf.dtype]).requires_grad_(leaf.requires_grad)
    return DOUBLED.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _layouts(leaves: Sequence[Any]) -> Iterator[list[tuple[Placement, ...] | None]]:
    """Per row of LAYOUTS the placements of each leaf; None for what is no tensor. Without tensors, one row."""
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for first, rest in LAYOUTS if tensors else LAYOUTS[:1]:
        row: list[tuple[Placement, ...] | None] = [None] * len(leaves)
        for i in tensors:
            row[i] = tuple(_placement(choice, leaves[i]) for choice in (first if i == tensors[0] else rest))
        yield row


def _placement(choice: Any, tensor: Tensor) -> Placement:
    """Returns the placement, or Replicate for what cannot lie so (no such dim; no sum of integers or sparse parts)."""
    if choice == "P":
        sums = tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex())
        return Partial() if sums else Replicate()
    if choice == "R" or not -tensor.ndim <= choice < tensor.ndim:
        return Replicate()
    return Shard(choice % tensor.ndim)


@dataclass(frozen=True)
class _Alone:
    """One device's results: outputs, a cotangent per differentiable one, gradients per leaf."""

    outputs: list[Any]
    cotangents: list[Tensor]
    gradients: list[Tensor | None]


def _alone(function: Callable[[list[Any]], list[Any]], leaves: Sequence[Any], exact: bool) -> _Alone | None:
    """Runs on one device; returns None if that does not run it.

    The cotangents are those of a weighted sum of squared absolute values, which does not
    depend on the signs and phases that a decomposition is free to choose.
    """
    given = [_fresh(leaf) for leaf in leaves]
    try:
        outputs = function(given)
        cotangents = []
        if exact:
            generator = torch.Generator().manual_seed(7)
            for output in _differentiable(outputs):
                wide = torch.complex128 if output.is_complex() else torch.float64  # complex32 has no arithmetic
                weight = torch.rand(output.shape, generator=generator, dtype=torch.float64) + 0.5
                cotangent = torch.nan_to_num(output.detach().to(wide) * weight, posinf=1.0, neginf=1.0)
                cotangents.append(cotangent.to(output.dtype))
            if cotangents:
                torch.autograd.backward(_differentiable(outputs), cotangents)
    except Exception:
        return None
    return _Alone(outputs, cotangents, [leaf.grad if isinstance(leaf, Tensor) else None for leaf in given])


def _difference(
    function: Callable[[list[Any]], list[Any]],
    leaves: Sequence[Any],
    placements: Sequence[tuple[Placement, ...] | None],
    alone: _Alone,
    dtype: torch.dtype,
    exact: bool,
) -> str | None:
    """Says how the run on DTensors differs from one device, or None. No rank alone returns before the last
    communication."""
    mesh = mesh_of(2, 2)
    given = [
        leaf if row is None else spread(_fresh(leaf), mesh, row, seed=i).requires_grad_(leaf.requires_grad)
        for i, (leaf, row) in enumerate(zip(leaves, placements))
    ]
    outputs = function(given)
    if len(outputs) != len(alone.outputs):
        return f"{len(outputs)} outputs for {len(alone.outputs)}"
    for i, (want, have) in enumerate(zip(alone.outputs, outputs)):
        if _form(want) != _form(have):
            return f"output {i}: {_form(have)} for {_form(want)}"
    found = [_full(output) for output in outputs]
    gradients: list[Any] = [None] * len(given)
    if alone.cotangents:
        ends = _differentiable(outputs)
        if len(ends) != len(alone.cotangents):
            return f"{len(ends)} differentiable outputs for {len(alone.cotangents)}"
        torch.autograd.backward(ends, [cotangent.clone() for cotangent in alone.cotangents])
        gradients = [_full(leaf.grad) if isinstance(leaf, Tensor) else None for leaf in given]
    pairs = [(f"output {i}", *pair) for i, pair in enumerate(zip(alone.outputs, found))]
    for i, (want, have) in enumerate(zip(alone.gradients, gradients)):
        if want is None and isinstance(have, Tensor):
            want = torch.zeros_like(have)  # what torch leaves undefined; ours passed a conversion, which needs a tensor
        pairs.append((f"gradient of input {i}", want, have))
    for what, want, have in pairs:
        unlike = _unlike(want, have, dtype, exact)
        if unlike:
            return f"{what}: {unlike}"
    return None


def _fresh(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _differentiable(outputs: Iterable[Any]) -> list[Tensor]:
    """Returns the differentiable outputs without sparse ones: cotangents are dense."""
    tensors = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    return [output for output in tensors if output.layout == torch.strided]


def _full(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _form(value: Any) -> str:
    """Describes a result without communication."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype}{list(value.shape)} {value.layout}"


def _unlike(want: Any, have: Any, dtype: torch.dtype, exact: bool) -> str | None:
    """Says how two results differ by more than a rounding, relative to the largest element."""
    if not isinstance(want, Tensor) or not isinstance(have, Tensor):
        if isinstance(want, float) and isinstance(have, float):
            want, have = torch.tensor(want, dtype=dtype), torch.tensor(have, dtype=dtype)
        else:
            return None if want is have or (type(want) is type(have) and want == have) else f"{have!r} for {want!r}"
    want = want.detach()
    if _form(want) != _form(have):
        return f"{_form(have)} for {_form(want)}"
    if not exact:
        return None
    if want.layout != torch.strided:
        want, have = want.to_dense(), have.to_dense()
    if not want.is_floating_point() and not want.is_complex():
        return None if torch.equal(want, have) else f"{_some(have)} for {_some(want)}"
    relative, absolute = TOLERANCE[dtype]
    relative = max(relative, 4 * torch.finfo(want.dtype).eps)  # a cast to bfloat16 rounds each part of a sum
    wide = torch.complex128 if want.is_complex() else torch.float64
    want, have = want.to(wide), have.to(wide)
    finite = want.isfinite()
    allowed = absolute + relative * (want[finite].abs().max().item() if finite.any() else 0.0)
    same = (want == have) | (want.isnan() & have.isnan()) | (finite & ((have - want).abs() <= allowed))
    if bool(same.all()):
        return None
    return f"{int((~same).sum())} of {same.numel()} elements, such as {_some(have[~same])} for {_some(want[~same])}"


def _some(tensor: Tensor) -> list[Any]:
    return tensor.flatten()[:4].tolist()


def _described(leaves: Sequence[Any], placements: Sequence[tuple[Placement, ...] | None]) -> str:
    said = [
        repr(leaf) if row is None else f"{list(leaf.shape)} {', '.join(map(str, row))}"
        for leaf, row in zip(leaves, placements)
    ]
    return "; ".join(said)[:400]

"""Writes docs/coverage.md: what becomes of each entry of torch's operator database on DTensors.

    python tools/sweeps/operator_coverage.py            regenerate the page
    python tools/sweeps/operator_coverage.py --check    say whether it is up to date; exit status 1 if not

Two ranks run the largest samples of every entry with all tensors Shard(0), and note who
answered: rules, handlers, the gather fallback, or an error; and the forward's
collectives. Whether the values are right is for the sweep and the tests to say.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PAGE = Path(__file__).absolute().parents[2] / "docs" / "coverage.md"
COMMAND = "python tools/sweeps/operator_coverage.py"
RANKS, SAMPLES, BATCH = 2, 6, 40

# How an entry is answered, and what that means.
HOWS = {
    "native": "every function of every sample has a rule that keeps the shards",
    "handler": "answered by the tensor class itself: metadata, copies, conversions to plain values",
    "partly": "native for some samples; in others a function has no rule and gathers",
    "gather": "a function has no rule: its inputs are gathered, and every rank runs it on whole tensors",
    "raises": "an error, with the reason",
    "no tensor": "takes no tensor, so no DTensor reaches it",
}
# Of the swept entries: how many run on native rules, and how many move nothing with their tensors cut on dim 0.
LEAST = {"native": 450, "free": 400}
# Properties that compute; all others are metadata, which a check of arguments may read.
VIEWS = {"T", "mT", "H", "mH", "real", "imag"}
# Entries that the sweep of issue 3 leaves out: results that are random, or memory that nobody wrote.
RANDOM = set(
    """
    bernoulli normal rand_like randn_like randint_like uniform multinomial cauchy exponential geometric log_normal
    randn randint nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout
    nn.functional.feature_alpha_dropout nn.functional.rrelu svd_lowrank pca_lowrank
    nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    empty empty_like new_empty new_empty_strided empty_strided empty_permuted resize_ resize_as_ to_sparse
    """.split()
)


@dataclass(frozen=True)
class Row:
    """One entry. least, most: the collectives of its cheapest and costliest sample; functions: those that gathered."""

    name: str
    how: str
    least: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    why: str = ""
    swept: bool = True

    @property
    def free(self) -> bool:
        """Whether some sample runs without a collective: for others the mathematics may not allow it."""
        return self.how in ("native", "handler", "partly") and not self.least

    def cells(self) -> tuple[str, ...]:
        moves = self.how not in ("raises", "no tensor")
        least, most = (_counted(self.least), _counted(self.most)) if moves else ("", "")
        return (f"`{self.name}`", self.how, least, "" if most == least else most, self.why or ", ".join(self.functions))


def _counted(kinds: Sequence[str]) -> str:
    counts = sorted(Counter(kinds).items())
    return ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in counts) or "none"


# --- on the ranks --------------------------------------------------------------------------


def entries() -> dict[str, Any]:
    """The database's entries that have samples for a CPU, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    named = {op.name + ("." + op.variant_test_name if op.variant_test_name else ""): op for op in op_db}
    return {name: op for name, op in named.items() if op.dtypes}


def rows_of(names: Sequence[str]) -> list[Row | None]:
    """The rows of some entries; on every rank."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return [row_of(name, op) for name, op in entries().items() if name in set(names)]


def row_of(name: str, op: Any) -> Row | None:
    """None for an entry of which one device runs no sample."""
    import torch

    from vescale_dtensor._errors import VescaleError

    dtype = min(op.dtypes, key=lambda d: (d != torch.float32, d != torch.int64, str(d)))
    swept = dtype is torch.float32 and op.name not in RANDOM
    seen = []
    for sample in samples_of(op, dtype):
        try:
            seen.append(observe(op.op, sample))
        except Exception as error:
            typed = "" if isinstance(error, (VescaleError, NotImplementedError)) else "NOT TYPED, "
            return Row(name, "raises", why=f"{typed}{type(error).__name__}: {first_line(error)}", swept=swept)
    if not seen:
        return None
    hows = {how for how, _, _ in seen}
    return Row(
        name,
        how="partly" if {"gather"} < hows else next(how for how in HOWS if how in hows),
        least=min((collectives for how, collectives, _ in seen if how != "gather" or hows == {"gather"}), key=len),
        most=max((collectives for _, collectives, _ in seen), key=len),
        functions=tuple(sorted({function for _, _, functions in seen for function in functions})),
        swept=swept,
    )


def samples_of(op: Any, dtype: Any) -> list[Any]:
    """The largest of the first samples, among those that one device runs and that have a tensor to cut."""
    import torch
    from torch.utils._pytree import tree_map

    def copied(value):
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    torch.manual_seed(20261120)
    few = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 12))
    few.sort(key=lambda sample: -(sample.input.numel() if isinstance(sample.input, torch.Tensor) else 0))
    fit = []
    for sample in few:
        given = tree_map(copied, (sample.input, sample.args, sample.kwargs))
        try:
            op.op(given[0], *given[1], **given[2])
        except Exception:
            continue
        fit.append((sample.input, sample.args, sample.kwargs))
    cut = [given for given in fit if any(t.ndim and t.shape[0] > 1 for t in tensors_in(given))]
    return (cut or fit)[:SAMPLES]


def tensors_in(value: Any) -> list[Any]:
    import torch

    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def observe(function: Callable, sample: tuple) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(how, kinds of collectives, functions that were gathered) of one call with all tensors Shard(0)."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_map

    from vescale_dtensor import Replicate, Shard, comm_trace, distribute_tensor
    from vescale_dtensor._communication.events import function_name
    from vescale_dtensor._dispatch import fallback
    from vescale_dtensor._rules.registry import TABLE
    from vescale_testkit import mesh_of

    called, gathered = [], []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") != "__get__" or function_name(func) in VIEWS:
                called.append(func)
            return func(*args, **(kwargs or {}))

    def spread(value):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        placement = Shard(0) if value.ndim and value.shape[0] else Replicate()
        return distribute_tensor(value.detach().clone(), mesh_of(RANKS), [placement])

    given, args, kwargs = tree_map(spread, sample)
    report = fallback._report
    fallback._report = lambda function, *_: gathered.append(function_name(function))
    try:
        with comm_trace() as trace, Watch():
            function(given, *args, **kwargs)
    finally:
        fallback._report = report
    if not tensors_in(sample):
        how = "no tensor"
    elif gathered:
        how = "gather"
    else:
        known = [TABLE.get(f) for f in called]
        how = "handler" if known and all(e is not None and e.handler is not None for e in known) else "native"
    return how, tuple(event.kind for event in trace.events for _ in range(event.count)), tuple(gathered)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].replace("|", "\\|")[:160]


# --- calls that never arrive -----------------------------------------------------------------

# (call, what is given, what to write instead). d is sharded, p a partial 0-dim integer, r a replicated one.
BYPASSING: tuple[tuple[str, str, str], ...] = (
    ("torch.tensor(d)", "a sharded d", ""),
    ("torch.Tensor(d)", "a sharded d", ""),
    ("torch.tensor(p)", "a partial 0-dim p", ""),
    ("torch.tensor(r)", "a replicated 0-dim r", ""),
    ("torch.full((3,), p)", "a partial 0-dim p", ""),
    ("torch.full((3,), r)", "a replicated 0-dim r", ""),
    ("torch.add(x, x, alpha=p)", "plain x, a partial 0-dim p", ""),
    ("torch.add(x, x, alpha=r)", "plain x, a replicated 0-dim r", ""),
    ("torch.add(d, d, alpha=p)", "a sharded d, a partial 0-dim p", ""),
    ("x.sum(p)", "plain x, a partial 0-dim p as the dim", ""),
    ("torch.arange(p)", "a partial 0-dim p", ""),
    ("torch.randint(0, p, (2,))", "a partial 0-dim p", ""),
    ("torch.zeros(p)", "a partial 0-dim p as the size", ""),
    ("torch.as_tensor(d)", "a sharded d", ""),
    ("numpy.asarray(d)", "a sharded d", ""),
    ("torch.from_dlpack(d)", "a sharded d", ""),
    ("torch.vmap(torch.neg)(d)", "a sharded d", "`torch.neg(d)`: batch dims need no vmap here"),
    ("torch.func.jvp(torch.neg, (d,), (d,))", "a sharded d", "`torch.autograd.forward_ad`, on the shards"),
    ("torch.func.grad(torch.sum)(d)", "a sharded d", "`torch.autograd.grad(d.sum(), d)`"),
    ("torch.func.vjp(torch.neg, d)[0]", "a sharded d", "`torch.autograd.grad(outputs, d, cotangents)`"),
    ("torch.func.functionalize(torch.neg)(d)", "a sharded d", "`torch.neg(d)`"),
)


def bypassing() -> list[tuple[str, str, str, str]]:
    """(call, given, what comes out, instead): measured; on every rank."""
    import numpy
    import torch

    from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
    from vescale_dtensor._errors import VescaleError
    from vescale_testkit import mesh_of
    from vescale_testkit.oracle import spread

    warnings.simplefilter("ignore")
    mesh = mesh_of(RANKS)
    whole = {"d": torch.arange(4.0), "p": torch.tensor(3), "r": torch.tensor(2), "x": torch.ones(2, 2, 2, 2)}
    parts = {
        "d": distribute_tensor(whole["d"], mesh, [Shard(0)]),
        "p": spread(whole["p"], mesh, [Partial()]),
        "r": distribute_tensor(whole["r"], mesh, [Replicate()]),
        "x": whole["x"],
    }
    rows = []
    for call, given, instead in BYPASSING:
        try:
            torch.manual_seed(0)
            wanted = eval(call, {"torch": torch, "numpy": numpy, **whole})
            torch.manual_seed(0)
            found = eval(call, {"torch": torch, "numpy": numpy, **parts})
            if type(found).__name__ == "DTensor":
                found = found.full_tensor()
            right = tuple(found.shape) == tuple(wanted.shape) and bool((found == wanted).all())
            outcome = "as on one device" if right else "each rank its own part: WRONG"
        except VescaleError as error:
            outcome = f"raises {type(error).__name__}"
        except Exception:
            outcome = "each rank its own part: WRONG"
        rows.append((f"`{call}`", given, outcome, instead))
    return rows


# --- in this process -------------------------------------------------------------------------


def collect(names: Sequence[str]) -> list[Row]:
    """The rows of entries; one that kills a rank, or on which ranks hang, is told from the rest."""
    from vescale_testkit import RankError, run_ranks

    try:
        ranks = run_ranks(RANKS, rows_of, names, timeout=150.0)
    except RankError as error:
        if len(names) == 1:
            return [Row(names[0], "raises", why=f"NOT TYPED, ranks end or hang: {first_line(error)}")]
        half = len(names) // 2
        return collect(names[:half]) + collect(names[half:])
    worst = list(HOWS)
    rows = [max(several, key=lambda row: worst.index(row.how) if row else -1) for several in zip(*ranks, strict=True)]
    return [row for row in rows if row is not None]


def totals(rows: Sequence[Row]) -> dict[str, int]:
    counts = Counter(row.how for row in rows)
    return {"entries": len(rows), **{how: counts[how] for how in HOWS}, "free": sum(row.free for row in rows)}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(rows: Sequence[Row], bypasses: Sequence[Sequence[str]]) -> str:
    swept = totals([row for row in rows if row.swept])
    every = totals(rows)
    rows = sorted(rows, key=lambda row: row.name.lower())
    answered = [row.cells() for row in rows if row.how != "raises"]
    raising = [row for row in rows if row.how == "raises"]
    summary = [[how, str(swept[how]), str(every[how]), meaning] for how, meaning in HOWS.items()]
    meaning = "entries of the first three rows with a sample that needs no communication"
    summary.append(["no collective", str(swept["free"]), str(every["free"]), meaning])
    summary.append(["all", str(swept["entries"]), str(every["entries"]), ""])
    torch = metadata.version("torch").split("+")[0]
    return f"""# Which operators keep their shards

Written by `{COMMAND}`; do not edit. The entries are those of torch {torch}'s own operator
database. The forward of its {SAMPLES} largest samples ran on {RANKS} ranks, with every tensor `Shard(0)`.
*Swept* are the float32 entries whose results are comparable (not random, not uninitialised).

{table(["answer", "swept", "all", "meaning"], summary)}

An operator that gathers is correct but slow. It reports this once, as a `FallbackWarning`; `register_rule` fixes it.
Running without a collective is not always possible: a sum over the sharded dim is partial and needs none, but a sort
along it does.

## Entries that raise

{table(["operator", "why"], [[r.cells()[0], r.why] for r in raising]) if raising else "None."}

## Calls that never reach `__torch_function__`

For these calls torch reads arguments in C++, below anything that a tensor subclass can see. The table shows the result
measured on {RANKS} ranks, and what to write instead:

{table(["call", "given", "result", "write instead"], bypasses)}

## Attention functions outside the database

torch's database does not have these functions of Python and of flash-attn. Tests cover them (`test_rules_flex.py`,
`test_rules_packed.py`), not this command. `torch.compile(flex_attention)` compiles the call on the shards. The second and
third columns give the communication if these dims are sharded.

| function | batch, heads | sequence or tokens of q | runs whole |
| --- | --- | --- | --- |
| `flex_attention` | none | k and v are gathered, or an all-to-all of each; q too, if a rank's rows are not whole blocks of the mask | never |
| `create_block_mask`, `create_mask` | tensors that their function holds are gathered; the mask is plain, and covers the whole batch | the same | always |
| `varlen_attn` | none | q, k and v are gathered, or an all-to-all of each | with pages of a cache |
| `flash_attn_func`, `flash_attn_varlen_func` | none | the same | with dropout, slopes, pages, or requested probabilities |

## Every entry

The collectives are those of the forward of the cheapest sample, and of the costliest if it needs others. (`Shard(0)` of
two tensors that broadcast may mean different dims of the result.) The last column names the functions that gathered.

{table(["operator", "answer", "collectives", "at most", "gathered"], answered)}
"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    asked = parser.parse_args()
    from vescale_testkit import run_ranks

    names = list(entries())
    rows = [row for start in range(0, len(names), BATCH) for row in collect(names[start : start + BATCH])]
    bypasses = [max(several, key=lambda row: row[2]) for several in zip(*run_ranks(RANKS, bypassing))]  # "as" < "each"
    text = page(rows, bypasses)
    swept = totals([row for row in rows if row.swept])
    print(swept)
    short = [f"{swept[what]} {what}, not {least}" for what, least in LEAST.items() if swept[what] < least]
    if short:
        print(f"fewer than they were to be: {', '.join(short)}", file=sys.stderr)
        return 1
    if asked.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

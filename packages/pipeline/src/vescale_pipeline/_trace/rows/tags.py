"""Tags the values of a forward by how they come from the rows of its batch.

Two dry runs, of one microbatch and of the whole batch, note every function that is
called, on placeholders and on real tensors alike. A dim that differs between them is
the batch's. Each value then gets one of five tags, function by function:

    CONSTANT   does not depend on the batch's rows: a weight, a rotary table, a number
    ROWS       has the batch's rows, each from its own
    an Order   has them in the order of a key of theirs, see `orders.py`
    a frozenset of weightings   linear in per-row terms: "mean", "sum", or the number
               of a call that takes a mean over labels, counted when the batch is known;
               and "once" if something CONSTANT is added, such as a penalty of weights
    Lost       anything else, with the function that it began at

No list of functions can be whole; one that is not known here and takes the rows away is Lost, which the user is told.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import functional as F

from vescale_trace.values import leaves

from ..placeholder import FACTORIES
from .notes import Note, Ref, Step, refs_in
from .orders import INDEXING, SORTS, Order, reordered, sorted_by
from .places import COUNTING, NUMBERS, Places, counts_rows

LABELLED = frozenset((F.cross_entropy, F.nll_loss))
"""Functions whose mean is over the labels that are not ignored."""


@dataclass(frozen=True)
class Lost:
    cause: str
    line: str = ""


CONSTANT, ROWS = "constant", "rows"
MEAN, SUM, ONCE = frozenset(("mean",)), frozenset(("sum",)), frozenset(("once",))
Tag = str | frozenset | Order | Lost


class Tags:
    """`of`: number of a value -> its tag. `read`: who made a number of the batch's values."""

    def __init__(self, times: int) -> None:
        self.of: dict[int, Tag] = {}
        self.read: Lost | None = None
        self._times = times
        self._labelled = 0
        self.places = Places()
        self._shared: dict[int, set[int]] = {}  # a storage -> the values in it
        self._aside: set[int] = set()  # values of which the batch's rows were not the first dim at some time

    def go_on(self, small: Note, large: Note) -> None:
        refs = refs_in(small)
        axes = [self._axis(*pair) for pair in zip(refs, refs_in(large))]
        outs = [self._axis(*pair) for pair in zip(small.outs, large.outs)]
        step = Step(small, refs, axes, list(map(self._given, refs, axes)), outs, _ratio(small, large))
        if small.function in LABELLED and any(ref.placeholder for ref in refs):
            self._labelled += 1
        if not small.outs:
            if any(tag != CONSTANT for tag in step.tags):
                self.read = Lost(small.name, small.line)
            return
        if any(ref.number in self._aside for ref in refs) or any(axis not in (None, 0) for axis in (*axes, *outs)):
            self._aside.update(out.number for out in small.outs)
        lost = next((tag for tag in step.tags if isinstance(tag, Lost)), None)
        for place, out in enumerate(small.outs):
            made = lost
            if small.function in FACTORIES or lost is None:
                made = None if lost or small.function in FACTORIES else self._ordered(step, place)
                if made is None and isinstance(outs[place], Lost):
                    made = lost or Lost(small.name)
            if made is None:
                made = self._made(step, large, outs[place] is not None)
            is_here = isinstance(made, Lost) and not made.line
            self.of[out.number] = replace(made, line=small.line) if is_here else made
        self.places.note(step)
        for ref in (*refs, *small.outs):
            self._shared.setdefault(ref.memory, set()).add(ref.number)
        if small.written is not None and isinstance(made := self.of[small.outs[0].number], Lost):
            self.of.update(dict.fromkeys(self._shared[small.written.memory], made))  # whichever view was written to

    def _ordered(self, step: Step, place: int) -> Tag | None:
        """The tag of what a sort makes of the batch's rows, and others of rows in that order; None of anything else."""
        name, is_aside = step.note.name, any(ref.number in self._aside for ref in step.refs)
        if name in SORTS and step.tags == [ROWS] and not is_aside:
            return sorted_by(step, place)
        if not any(isinstance(tag, Order) for tag in step.tags):
            return None
        # along the rows it may sort places, add up counts, or take rows by their places
        mixes = name not in (*SORTS, "cumsum", *INDEXING) and self.places.mixes(step)
        known = (step.ratio == 1 or name in _SHAPES) and not mixes and not is_aside
        made = reordered(step, step.note.outs[place]) if known else None
        has_rows = made == ROWS or isinstance(made, Order) and made.kind not in ("counts", "ends")
        return Lost(name) if made is None or has_rows and step.outs[place] != 0 else made

    def _given(self, ref: Ref, axis: int | Lost | None) -> Tag:
        """The tag of an argument; of one that no function made, by its shape."""
        known = self.of.get(ref.number)
        if known is None:
            known = CONSTANT if axis is None else ROWS
            if ref.strange and axis is None:
                known = Lost("a function that is not torch's own")
            self.of[ref.number] = known
        return ROWS if known == CONSTANT and axis == 0 else known  # a row that is repeated there

    def _axis(self, small: Ref, large: Ref) -> int | Lost | None:
        return axis_of(small.shape, large.shape, self._times)

    def _made(self, step: Step, large: Note, has_rows: bool) -> Tag:
        """The tag of what a function makes of values with these tags, none of them Lost."""
        small, given, ratio, name = step.note, step.tags, step.ratio, step.note.name
        if name in _FILLED and _fill(small) != _fill(large):
            return Lost(name)
        if name in COUNTING and has_rows and not given:
            from_zero = len(small.args) == 1 or len(small.args) == 2 and small.args[0] == 0
            return NUMBERS if name == "arange" and from_zero else Lost(name)
        if small.function in FACTORIES or name in _FILLED and not given:
            return ROWS if has_rows else CONSTANT if ratio == 1 else Lost(name)
        reduced = [tag for tag in given if isinstance(tag, frozenset)]
        if reduced:
            return Lost(name) if has_rows or ROWS in given else self._combined(small, given, reduced, ratio)
        if NUMBERS in given and (given[0] == NUMBERS or name not in INDEXING):
            return NUMBERS if has_rows and counts_rows(small, given) else Lost(name)
        if has_rows:
            alike = ratio == 1 or name in _SHAPES
            return ROWS if alike and not self.places.mixes(step) else Lost(name)
        if ratio != 1:
            return Lost(name)
        return self._reduced(step) if ROWS in given else CONSTANT

    def _reduced(self, step: Step) -> Tag:
        """Tags a reduction over the rows."""
        small = step.note
        if small.name in ("sum", "mean"):
            return SUM if small.name == "sum" else MEAN
        if small.function not in LABELLED and small.function not in _LOSSES or self.places.mixes(step):
            return Lost(small.name)
        try:
            given = inspect.signature(small.function).bind(*small.args, **small.kwargs).arguments
        except TypeError:
            return Lost(small.name)
        kind = given.get("reduction", "mean")
        if given.get("reduce") is not None or given.get("size_average") is not None or kind not in ("mean", "sum"):
            return Lost(small.name)
        if kind == "sum":
            return SUM
        if small.function in LABELLED:
            target, weight = given["target"], given.get("weight")
            if not target.integer:
                return MEAN
            if target.placeholder or isinstance(weight, Ref) and weight.placeholder:
                return Lost(f"{small.name} with labels or weights that the model computes")
            return frozenset((self._labelled - 1,))
        return MEAN

    def _combined(self, small: Note, given: list[Tag], reduced: list[frozenset], ratio: float | None) -> Tag:
        """A linear function of what is linear already."""
        name, kinds = small.name, frozenset().union(*reduced)
        lost = Lost(name)
        if name in _LINEAR:
            return kinds if ratio == 1 and CONSTANT not in given else lost
        if name in _ADD:
            offset = CONSTANT in given or any(number for number in _numbers(small.args))
            return lost if ratio != 1 or small.kwargs else kinds | ONCE if offset else kinds
        if len(reduced) > 1 or small.kwargs:
            return lost
        if name in _TIMES or name in _OVER and isinstance(given[0], frozenset) and isinstance(small.args[0], Ref):
            return _scaled(kinds, ratio if name in _TIMES else ratio and 1 / ratio, self._times) or lost
        return lost


def axis_of(small: tuple[int, ...], large: tuple[int, ...], times: int) -> int | Lost | None:
    """The dim that has the batch's rows, from the shapes of a part's value and of the whole batch's; None if none
    has."""
    if len(small) != len(large):
        return Lost("")
    differ = [i for i, (a, b) in enumerate(zip(small, large)) if a != b]
    if not differ:
        return None
    grows = small[differ[0]] * times == large[differ[0]]
    return differ[0] if len(differ) == 1 and grows else Lost("")


def _fill(note: Note) -> Any:
    """Returns the value that one of _FILLED fills with."""
    return note.kwargs.get("fill_value", next(iter(note.args[_FILLED[note.name] :]), None))


def _scaled(kinds: frozenset, ratio: float | None, times: int) -> frozenset | None:
    """`kinds` times a number that is `ratio` times as large for the whole batch."""
    if ratio is None:
        return None
    if ratio == 1:
        return kinds
    if kinds == SUM and abs(ratio * times - 1) < 1e-9:
        return MEAN
    return SUM if kinds == MEAN and abs(ratio / times - 1) < 1e-9 else None


def _ratio(small: Note, large: Note) -> float | None:
    """Returns the factor between the numbers among the arguments of part and whole batch; None if they disagree."""
    a, b = list(_numbers((small.args, small.kwargs))), list(_numbers((large.args, large.kwargs)))
    if a == b:
        return 1
    return b[0] / a[0] if len(a) == len(b) == 1 and a[0] else None


def _numbers(value: Any) -> Iterator[float]:
    return (leaf for leaf in leaves(value, Ref) if type(leaf) in (int, float))


# --- functions, by name without underscores -------------------------------------------

_TIMES = frozenset(("mul", "rmul", "imul", "multiply"))
_OVER = frozenset(("div", "truediv", "itruediv", "divide", "true_divide"))
_ADD = frozenset(("add", "radd", "iadd", "sub", "isub", "rsub", "subtract"))
_LINEAR = frozenset(
    (
        *("sum", "mean", "neg", "negative", "detach", "clone", "contiguous", "to", "type_as", "float", "double"),
        *("half", "bfloat16", "view", "reshape", "flatten", "squeeze", "unsqueeze", "stack", "cat", "getitem"),
        *("permute", "transpose", "cpu", "cuda", "unbind", "select"),
    )
)
_SHAPES = frozenset(
    (
        *("view", "reshape", "expand", "repeat", "zeros", "ones", "empty", "arange", "unflatten", "getitem", "narrow"),
        *("split", "chunk", "as_strided", "tile", "broadcast_to", "rand", "randn", "repeat_interleave"),
    )
)
"""Functions whose numbers are sizes: for the whole batch they are larger."""

_FILLED = {"full": 1, "full_like": 1, "new_full": 2}
"""Functions that fill what they make with a number, and its place; their other numbers are sizes."""

_LOSSES = frozenset(
    (
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.gaussian_nll_loss, F.poisson_nll_loss),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.hinge_embedding_loss),
        *(F.cosine_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss, F.multi_margin_loss),
        *(F.multilabel_margin_loss, F.multilabel_soft_margin_loss),
    )
)
"""Functions whose mean is over all elements, or rows."""

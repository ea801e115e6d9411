"""Tells whether a function leaves each row of a batch at its place: each output row is made of that row alone.

Most functions that keep a batch's rows do. Here is what does not: functions along the dim of the rows, indices that
choose among them, and shapes that put them elsewhere. What counts the rows (`arange(len(x))`) is a tag of its own, for
`x[rows, last]` takes of each row its own. Of rows that lie there several times (`cat([x, y])`, or what has a dim before
the rows and is flattened), a chunk is the batch.
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch.nn import functional as F

from .notes import Note, Ref, Step
from .scattered import SCATTERS, takes_own

NUMBERS = "numbers"
"""The tag of what says which row of the batch it is: 0, 1, ..."""

COUNTING = frozenset(("arange", "range", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices"))
"""Functions that make other numbers for each row, of their number alone."""

_ALL, _FIXED = object(), 99
_MATRIX = (-2, -1)
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "safe_softmax", "glu", "sort", "argsort"), (1, -1)),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), (1, _ALL)),
    **dict.fromkeys(("flip", "unfold", "unfold_copy", "fftshift", "ifftshift"), (1, _ALL)),
    **dict.fromkeys(("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), (2, -1)),
    **dict.fromkeys(("fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2"), (2, _MATRIX)),
    **dict.fromkeys(("fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn", "roll"), (2, _ALL)),
    **dict.fromkeys(("index_fill", "index_copy", "index_reduce"), (1, _ALL)),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), (1, _ALL)),
    **dict.fromkeys(("diff", "quantile", "nanquantile", "softmax_backward_data", "log_softmax_backward_data"), (2, -1)),
    **dict.fromkeys(("tril", "triu", "svd", "qr", "pinv", "pinverse", "svdvals", "lstsq"), (_FIXED, _MATRIX)),
    **dict.fromkeys(("lu", "lu_factor", "lu_factor_ex", "lu_unpack", "geqrf", "ormqr"), (_FIXED, _MATRIX)),
    **dict.fromkeys(("householder_product", "solve"), (_FIXED, _MATRIX)),
    **dict.fromkeys(("trapezoid", "cumulative_trapezoid", "stft", "istft"), (_FIXED, -1)),
    **dict.fromkeys(("multi_head_attention_forward", "flipud", "msort"), (_FIXED, 0)),
    **dict.fromkeys(("diagonal_scatter", "slice_scatter", "select_scatter", "as_strided_scatter"), (_FIXED, _ALL)),
    **dict.fromkeys(("fill_diagonal", "block_diag", "put", "take"), (_FIXED, _ALL)),
    **dict.fromkeys(("nonzero", "argwhere", "unique_consecutive", "unique_dim", "renorm", "gradient"), (_FIXED, _ALL)),
    **dict.fromkeys(("unsafe_masked_index", "unsafe_masked_index_put_accumulate"), (_FIXED, _ALL)),
    "scaled_dot_product_attention": (_FIXED, -2),
    "gumbel_softmax": (4, -1), "rot90": (2, (0, 1)), "fliplr": (_FIXED, 1), "normalize": (2, 1),
}  # fmt: skip
"""Functions that mix the entries along dims -> the place of these among the arguments, and those where none are
given."""

_BY_INDEX = frozenset(("index_select", "index_add", "gather", "take_along_dim"))
_SCATTERS = frozenset(("scatter", "scatter_add", "scatter_reduce"))
_PARTS = {
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"), (2, 0)),
    "narrow": (1, 0), "vsplit": (_FIXED, 0), "hsplit": (_FIXED, 1), "dsplit": (_FIXED, 2),
}  # fmt: skip
"""Functions that give a part of a dim -> its place among the arguments, and the dim where none is given."""
_KNOTS = {"bucketize": 1, "searchsorted": 0}
"""Functions that look among the sorted entries of the last dim of one of their tensors."""
_RESHAPES = frozenset(("view", "view_copy", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel"))
_OF_NUMBERS = frozenset(
    (
        *("to", "int", "long", "type", "type_as", "contiguous", "clone", "detach", "cpu", "cuda", "unsqueeze"),
        *("squeeze", "expand", "expand_as", "view", "reshape", "flatten", "repeat_interleave", "broadcast_to"),
    )
)


class Places:
    """Knows how often the batch lies in each value, one after another.

    `takes_own`: whether a function keeps rows at their places that `check_rows_take_own` is to look at in each call.
    """

    def __init__(self) -> None:
        self.takes_own = False
        self._copies: dict[int, int] = {}  # number of a value -> how often, if more than once

    def note(self, step: Step) -> None:
        """Notes how often the batch lies in each output."""
        note, refs = step.note, step.refs
        for out, axis in zip(note.outs, step.outs):
            if type(axis) is not int:
                continue
            if note.name in ("cat", "concat", "concatenate") and _dim(note, 1, 0, out) == axis:
                copies = sum(self._of(ref) for ref in refs)
            elif note.name in ("repeat", "tile") and type(begun := step.axes[0]) is int:
                copies = self._of(refs[0]) * out.shape[axis] // max(1, refs[0].shape[begun])
            elif note.name in _RESHAPES and type(step.axes[0]) is int:
                copies = self._reshaped(refs[0], step.axes[0], out, axis)
            elif note.name in _PARTS or note.name == "getitem" and _takes_a_part(note):
                copies = 1
            else:
                copies = max(map(self._of, refs), default=1)
            if copies > 1:
                self._copies[out.number] = copies

    def _of(self, ref: Ref) -> int:
        return self._copies.get(ref.number, 1)

    def mixes(self, step: Step) -> bool:
        """True if an output of the function is not made of each row, at its place."""
        note, refs, axes = step.note, step.refs, step.axes
        if not refs:
            return False
        name = note.name.partition(".")[0].removeprefix("fft_").removeprefix("linalg_").strip("_")
        first, axis = refs[0], axes[0]
        if name in _KNOTS and len(refs) > 1:
            return axes[_KNOTS[name]] == len(refs[_KNOTS[name]].shape) - 1
        if name == "masked_scatter":
            own = note.function in SCATTERS and takes_own(step, lambda ref: self._of(ref) == 1)
            self.takes_own |= own
            return not own
        if name in _SCATTERS and any(ref.integer and at != axis for ref, at in zip(refs[1:2], axes[1:2])):
            return True
        if type(axis) is not int:
            return False
        if name in _ALONG:
            dims = _dims(note, *_ALONG[name], first)
            return dims is None or axis in dims
        if name in _BY_INDEX:
            dim = _dim(note, 2 if name == "take_along_dim" else 1, _ALL, first)
            at = next((tag for ref, tag in zip(refs[1:], step.tags[1:]) if ref.integer), None)
            return (dim is None or dim == axis) and at != NUMBERS
        if name in ("getitem", "setitem", "index_put"):
            index = note.args[1] if len(note.args) > 1 else note.kwargs.get("indices")
            if name == "index_put":
                index = tuple(slice(None) if entry is None else entry for entry in index)
            return self._chooses(index, first, axis, dict(zip((ref.number for ref in refs), step.tags)))
        if name in _PARTS:
            dim = _dim(note, *_PARTS[name], first)
            dim = 0 if name == "hsplit" and len(first.shape) == 1 else dim
            return dim == axis and not self._are_the_batch(first, axis, note.outs)
        if name in _RESHAPES and note.outs:
            to = step.outs[0]
            return type(to) is not int or not self._reshaped(first, axis, note.outs[0], to)
        rows = {(self._of(ref), ref.shape[at]) for ref, at in zip(refs, axes) if type(at) is int}
        return len({size for _, size in rows}) == 1 < len(rows)  # where one of them repeats the batch, and another rows

    def _reshaped(self, first: Ref, axis: int, out: Ref, to: int) -> int:
        """Returns how often the batch lies along dim `to` of another shape of a value; 0 where that cuts the batch, or
        a row, in two."""
        if 0 in out.shape:
            return 1
        copies, rest = divmod(self._of(first) * prod(first.shape[:axis]), prod(out.shape[:to]))
        return copies if copies and not rest and out.shape[to] % copies == 0 else 0

    def _are_the_batch(self, first: Ref, axis: int, outs: tuple[Ref, ...]) -> bool:
        copies = self._of(first)
        return copies > 1 and all(
            len(out.shape) == len(first.shape) and out.shape[axis] * copies == first.shape[axis] for out in outs
        )

    def _chooses(self, index: Any, first: Ref, axis: int, tags: dict[int, Any]) -> bool:
        """True if an index chooses among the rows: by numbers other than each row's own, or a slice."""
        at = 0
        entries = list(index) if isinstance(index, (tuple, list)) else [index]
        taken = sum(_dims_of(entry) for entry in entries)
        for entry in entries:
            width = len(first.shape) - taken if entry is Ellipsis else _dims_of(entry)
            if at <= axis < at + width and entry is not Ellipsis:
                return self._is_choice(entry, first, axis, tags)
            at += width
        return False

    def _is_choice(self, entry: Any, first: Ref, axis: int, tags: dict[int, Any]) -> bool:
        if isinstance(entry, Ref):
            return not entry.boolean and tags.get(entry.number) != NUMBERS
        if isinstance(entry, slice):
            size, copies = first.shape[axis], self._of(first)
            start, stop, step = entry.indices(size)
            if (start, stop, step) == (0, size, 1):
                return False
            return step != 1 or copies == 1 or (stop - start) * copies != size
        return True


def _dims(note: Note, place: int, default: Any, first: Ref) -> set[int] | None:
    """Returns the dims along which a function runs; None for all."""
    if note.function is F.unfold:  # windows of an image
        return set()
    named = note.args[place] if len(note.args) > place else default
    if note.name == "flip" and type(named) is int:
        named = note.args[place:]
    for name in ("dim", "dims", "axis", "dimension"):
        named = note.kwargs.get(name, named)
    if named is _ALL or named is None:
        return None
    rank = max(1, len(first.shape))
    return {dim % rank for dim in (named if isinstance(named, (tuple, list)) else (named,)) if type(dim) is int}


def _dim(note: Note, place: int, default: Any, first: Ref) -> int | None:
    return next(iter(_dims(note, place, default, first) or ()), None)


def counts_rows(note: Note, tags: list[Any]) -> bool:
    """True if a function of numbers of rows gives such numbers, too."""
    whole = note.name == "getitem" and all(one in (None, ..., slice(None)) for one in _index(note))
    return tags == [NUMBERS] and (whole or note.name in _OF_NUMBERS)


def _index(note: Note) -> tuple:
    return note.args[1] if isinstance(note.args[1], tuple) else (note.args[1],)


def _takes_a_part(note: Note) -> bool:
    return any(isinstance(entry, slice) and entry != slice(None) for entry in _index(note))


def _dims_of(entry: Any) -> int:
    """Returns how many dims of the indexed tensor an entry of an index takes."""
    if entry is None or entry is Ellipsis or type(entry) is bool:
        return 0
    return len(entry.shape) if isinstance(entry, Ref) and entry.boolean else 1

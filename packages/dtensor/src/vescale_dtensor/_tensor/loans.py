"""Views of memory that does not stay: a parameter's, which ZeRO frees after use or an optimizer updates elsewhere.

On one device a view of a parameter shows the parameter's values for as long as it lives. Here its
memory may be freed once its block has run, or it is a copy, because its shard lies on another rank:
what is read of it later would be old values, or no memory at all. So the layout of such a parameter
is a `watched` one, dispatch tells the parameter's owner of every view of it and of every further view
(`borrow`), and the owner takes the views' layouts away when they no longer hold. Nothing reads a DTensor
without asking how it lies, so whoever reads such a view gets a ViewError; nobody else pays for a check.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from .._errors import ViewError
from .._layouts.layout import Layout
from .tensor import DTensor


class Held(enum.Enum):
    """Place of a parameter's view."""

    STAYS = "in memory that follows the parameter"
    COMES_AND_GOES = "in memory that is freed between uses of the parameter"
    COPY = "in a copy, for its shard lies on another rank"


class Lender:
    """The views of one piece of memory. They are known weakly; what they refer to never communicates.

    is_there: whether what comes and goes holds the parameter's values now.
    """

    def __init__(self, is_there: Callable[[], bool]) -> None:
        self.is_there = is_there
        self._loans: dict[Held, dict[int, ref[Loan]]] = {Held.COMES_AND_GOES: {}, Held.COPY: {}}

    def lend(self, view: DTensor, owner: Any, held: Held) -> None:
        """Notes that `view` is one of the parameter of `owner`, which has its `name` and is told of further views."""
        view._layout = view._layout.watched
        view._loan = loan = Loan(self, view, owner, held)
        loans = self._loans.get(held)
        if loans is not None:
            key = id(loan)
            loans[key] = ref(loan, lambda _: loans.pop(key, None))

    def end(self, held: Held) -> None:
        """Ends, from now on, the views that lie so: they do not show the parameter's values."""
        for known in tuple(self._loans[held].values()):
            loan = known()
            if loan is not None:
                loan.end()


class Loan:
    """A view's hold on its parameter's owner. It lives as long as the view."""

    __slots__ = ("_lender", "_view", "_layout", "_owner", "_held", "__weakref__")

    def __init__(self, lender: Lender, view: DTensor, owner: Any, held: Held) -> None:
        self._lender, self._view, self._owner, self._held = lender, ref(view), owner, held
        self._layout: Layout = view._layout

    def lend(self, view: DTensor) -> None:
        """A further view, of this one."""
        self._owner.lend(view)

    def written(self) -> None:
        """Values were put into the view's memory, past dispatch."""
        self._owner.written()

    def where(self, local: Tensor) -> Held:
        """Tells where a plain tensor over the view's memory lies."""
        return self._owner.where(local)

    def end(self) -> None:
        view = self._view()
        if view is not None:
            view.__dict__.pop("_layout", None)

    def wait(self) -> None:
        """Somebody asks how the view lies, to read it. Raises ViewError unless its memory is back."""
        view = self._view()
        if self._held is Held.COMES_AND_GOES and self._lender.is_there():
            view._layout = self._layout
            return
        of = self._owner.name or "a parameter"
        rule, since = _ENDED[self._held]
        raise ViewError(
            "read",
            f"a view of {of!r} is read {since}: {rule}",
            [f"view  {list(self._layout.shape)}"],
            [
                ("take the view where it is read", "as much as taking it cost"),
                ("view.clone(), where it is taken", "keeps its current values, in its own memory"),
            ],
        )


_ENDED = {
    Held.COMES_AND_GOES: (
        "it lies in memory that holds the parameter while its block runs, and is freed afterwards",
        "outside the forward or backward in which it was taken",
    ),
    Held.COPY: (
        "its shard lies on another rank than the parameter's, so that it is a copy, of the values of then",
        "after an optimizer's step or a load",
    ),
}


def borrow(views: object, sources: list[Tensor]) -> None:
    """Tells who owns the memory of `sources` that `views` were taken of it: of the first, or of each one its own."""
    if isinstance(views, (list, tuple)):
        each = len(sources) == len(views) > 1
        for i, view in enumerate(views):
            borrow(view, sources[i : i + 1] if each else sources)
        return
    source = sources[0]
    if type(views) is not DTensor or views is source or type(source) is not DTensor or not source._layout.is_watched:
        return
    known = views.__dict__
    if "_owner" in known or "_loan" in known:
        return
    owner = _owner_of(source)
    if owner is not None:
        owner.lend(views)


def outliving(local: Tensor, source: DTensor) -> Tensor:
    """The plain tensor `local`, made of `source`, for who keeps it: a clone where it would lie in memory that does not
    stay."""
    owner = _owner_of(source) if source._layout.is_watched else None
    return local if owner is None or owner.where(local) is not Held.COMES_AND_GOES else local.clone()


def written(tensor: Tensor) -> None:
    """Tells who owns a tensor's memory that values were put into it, past dispatch, which would have noticed."""
    owner = _owner_of(tensor) if type(tensor) is DTensor else None
    if owner is not None:
        owner.written()


def _owner_of(tensor: DTensor) -> Any:
    """A view's loan, or who owns a parameter."""
    return tensor.__dict__.get("_loan") or tensor.__dict__.get("_owner")

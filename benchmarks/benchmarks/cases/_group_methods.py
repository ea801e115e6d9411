"""A process group's own methods, past the look at their arguments that importing veScale puts before them: what is
written by hand is not to pay for it."""

from collections.abc import Callable
from functools import cache
from inspect import unwrap


@cache
def direct(kind: type, name: str) -> Callable:
    """The method of a class of groups, to be called with one of them."""
    return unwrap(getattr(kind, name))

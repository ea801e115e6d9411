"""Traits of functions, as entries in the table of rules say them: `Trait`, a small closed set.

A rule tells how a function shards. Other parts of the library ask what it *does*: flat shards stay flat under what is
elementwise, the reproducible mode leaves alone what only moves data. They ask the traits and nothing else: not which
rule it is, nor in which file that stands. So a user's rule is treated as ours are, if it says as much.

A function without traits is taken for one that may do anything to the elements of its operands (a sum, a sort, a
contraction). That is always right and at times slow: on a flat shard its operand is gathered, in the reproducible mode
it runs on whole tensors. What is declared and is not so gives wrong results; `tests/rules/test_traits.py`
holds ours against torch's operator database, by numbers.
"""

from __future__ import annotations

import enum


class Trait(enum.Flag):
    """Properties of a function, independent of layouts. Combine them with `|`."""

    ELEMENTWISE = enum.auto()
    """An element of a result depends on the operands' elements at its own place (after broadcasting) and on numbers
    alone: the function of a slice is the slice of the function, and so is its gradient. With LISTS: item by item."""

    LINEAR = enum.auto()
    """f(x + y) = f(x) + f(y) for its first tensor, whatever the other arguments are."""

    MOVES = enum.auto()
    """Every element of a result is an element of an operand, or a constant that does not depend on them; none is
    taken twice. So nothing is rounded or added up, in forward and in backward."""

    VIEW = enum.auto()
    """On one device the result shares the storage of its first tensor, at least for some arguments: where an operand
    must be redistributed, writes to the result would be lost, and are refused."""

    ORDERED = enum.auto()
    """The elements of its result are those of its first tensor, in the same order: it changes dims alone."""

    DRAWS = enum.auto()
    """It takes numbers from a random generator, at least for some arguments. With ELEMENTWISE: it is so for the
    numbers that were drawn."""

    READS = enum.auto()
    """It gives Python a value of its tensors, or makes the shape of a result depend on one."""

    METADATA = enum.auto()
    """It looks at shapes, dtypes and devices of its tensors alone: equal for any values, and right without them."""

    LISTS = enum.auto()
    """It takes lists of tensors; the items of one place belong together, and are apart from those of all others."""


NONE = Trait(0)
ELEMENTWISE = Trait.ELEMENTWISE
VIEWS = Trait.MOVES | Trait.VIEW | Trait.LINEAR
"""A view under another shape."""
RESHAPES = VIEWS | Trait.ORDERED

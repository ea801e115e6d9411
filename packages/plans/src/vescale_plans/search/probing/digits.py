"""Finds which of many units reach a feature, from few tests: by the digits of their numbers.

One test taints all units that have one value of one digit. A feature that is met by one value of each digit is reached
by the one unit of that number. Where several values of one digit meet it, and one of each other, each of these must
come from a unit of its own, for the other digits are the same: that is exact too. So the first digit may hold whole
runs of neighbours that meet a feature together (a head's), and the last one the parts of a packed weight that do
(halves, thirds). This is group testing without adaption: Du and Hwang, Combinatorial Group Testing and Its
Applications.
"""

from __future__ import annotations

from functools import cached_property
from math import gcd

import torch
from torch import Tensor

PARTS = 6
"""Equal parts of a packed weight: the last digit has a value, or several, for each of two or three."""
MOST_VALUES, VALUES = 5, 4
"""A digit has so many values at most, and so many where more are to follow: four cost as much as two digits of two."""


class Digits:
    """`count` units, numbered from 0; digits may have values that no unit has.

    Arguments:
        neighbours: so many units, one after the other, may meet a feature together; looked at where it divides `count`.

    Attributes:
        tests: bool [tests, units], those that each test taints.
    """

    def __init__(self, count: int, neighbours: int = 1) -> None:
        self.count, numbers = count, torch.arange(count)
        first = neighbours if count % neighbours == 0 else 1
        parts = gcd(count // first, PARTS)
        values = count // first // parts
        digits, middle = [(numbers % first, first)], numbers // first % values
        while values > 1:
            size = values if values <= MOST_VALUES else VALUES
            digits.append((middle % size, size))
            middle, values = middle // size, -(-values // size)
        digits.append((numbers // (count // parts), parts))
        self._digits = [(digit, size) for digit, size in digits if size > 1]

    @cached_property
    def tests(self) -> Tensor:
        rows = [digit == value for digit, size in self._digits for value in range(size)]
        return torch.stack(rows) if rows else torch.ones(1, self.count, dtype=torch.bool)

    def reach(self, met: Tensor) -> Tensor | None:
        """Returns what each unit reaches, bool [units, features], from what each test met, bool [tests, features]; None
        if digits do not tell."""
        if not self._digits:
            return met
        found, any_met = torch.ones(self.count, met.shape[1], dtype=torch.bool), met.any(0)
        several, start = torch.zeros(met.shape[1], dtype=torch.long), 0
        for digit, size in self._digits:
            values = met[start : start + size]
            if not torch.equal(values.any(0), any_met):
                return None  # several units together meet what none of some of them does
            found &= values[digit]
            several += values.sum(0) > 1
            start += size
        return None if bool((several > 1).any()) else found

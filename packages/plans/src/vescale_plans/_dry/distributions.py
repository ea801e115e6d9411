"""Checks of values by `torch.distributions`, which are off where a model runs on values that are none.

A distribution looks whether its parameters, and what it is asked about, lie where they may. While a model is probed
some of them are NaN, and in a dry run there are none to be looked at. A distribution that was told `validate_args=True`
itself looks all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution

from .._torch_private import distributions_check_values


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Turns off the default checks of distributions in the block; afterwards the default is the program's."""
    checks = distributions_check_values()
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)

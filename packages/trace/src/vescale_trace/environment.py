"""Numbers from the environment, read in one place per type. A wrong one is an error that names its variable."""

from __future__ import annotations

import math
import os
from typing import TypeVar

from .errors import VescaleError

T = TypeVar("T", float, None)
MOST = 2**31 - 1


def seconds(name: str, default: T) -> float | T:
    """Returns the variable's positive number of seconds; `default` where it is not set.

    Raises VescaleError for what is none.
    """
    given = os.environ.get(name)
    if given is None:
        return default
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        rule = f"{given!r}, in the environment, is no positive number of seconds"
        raise VescaleError(name, rule, (), [(f"{name}=600", "")])
    return found


def count(name: str, default: int) -> int:
    """Returns the variable's whole number, 0 or more; `default` where it is not set.

    Raises VescaleError for what is none.
    """
    given = os.environ.get(name)
    if given is None:
        return default
    if not (given.strip().isascii() and given.strip().isdigit() and len(given) < 12 and int(given) <= MOST):
        rule = f"{given!r}, in the environment, is no whole number from 0 to {MOST:,}"
        remedies = [(f"{name}={default}", ""), (f"unset {name}", "torchrun sets those of ranks")]
        raise VescaleError(name, rule, (), remedies)
    return int(given)

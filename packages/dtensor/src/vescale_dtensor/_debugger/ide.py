"""An IDE's debugger, attached to one rank: what it evaluates there is evaluated on that rank alone.

A collective in it would wait for ranks that know nothing of it, or meet their next one and change their numbers. So
while debugpy is attached (VS Code, PyCharm's pydevd), none begins that a watch, a console, or a breakpoint's condition
asks for. Stepping through the program's own collectives is no evaluation, and goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vescale_trace.stack import frames, module_of

from .._errors import CommunicationError
from .guard import before_collectives

_BENEATH = {"_pydevd_bundle.pydevd_runpy", "_pydevd_bundle.pydevd_monkey"}
"""Modules of pydevd at the bottom of a program's or a thread's own stack."""


def refuse_evaluated() -> None:
    """Makes collectives that a debugger of this kind asks for errors, from now on, if one is in the process."""
    global _refuses
    if _refuses is None and "pydevd" in sys.modules:
        _refuses = before_collectives(_refuse)
        _refuses.__enter__()


def _refuse(kind: str, ranks: Sequence[int], where: str) -> None:
    if len(ranks) > 1 and _is_evaluated():
        raise CommunicationError(
            "breakpoint",
            f"{kind}{where} was not begun: the debugger of an IDE asked for it, on this rank alone",
            (),
            [
                ("x.to_local()", "this rank's part: no communication"),
                ("vescale.breakpoint() in this line", "what is typed there is executed by all ranks"),
            ],
        )


def _is_evaluated() -> bool:
    return any(name.startswith("_pydevd") and name not in _BENEATH for name in map(module_of, frames()))


_refuses = None

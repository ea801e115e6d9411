"""The base of the errors that veScale raises.

A `VescaleError` is the user's: it names the operation, the rule that was broken
with its numbers, the operands, and remedies with what each costs. It derives
from RuntimeError, because Python's reflected operators swallow TypeError and
NotImplementedError. Texts are the same on every rank; what differs by rank goes
into a note (`add_note`). Names in them may come from anybody, so that they have
no control characters.
"""

from __future__ import annotations

from collections.abc import Iterable

from .text import printable


class VescaleError(RuntimeError):
    """Base class of all errors that a user can fix.

    Arguments: the operation, the violated rule (with numbers), descriptions of the operands, and remedies as (code,
    cost) pairs.
    """

    def __init__(
        self,
        operation: str,
        rule: str,
        operands: Iterable[str] = (),
        remedies: Iterable[tuple[str, str]] = (),
    ) -> None:
        dunder = operation.startswith("__") and operation.endswith("__")
        self.operation = operation[2:-2] if dunder else operation
        self.rule = rule
        self.operands = tuple(operands)
        self.remedies = tuple(remedies)
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"{self.operation}: {self.rule}"]
        lines += [f"  {operand}" for operand in self.operands]
        if self.remedies:
            width = max(len(code) for code, _ in self.remedies)
            head = "fix: " if len(self.remedies) == 1 else "fix one of: "
            for i, (code, cost) in enumerate(self.remedies):
                lead = head if i == 0 else " " * len(head)
                lines.append(f"{lead}{code:<{width}}  # {cost}" if cost else f"{lead}{code}")
        return printable("\n".join(lines), lines=True)

    def __reduce__(self):
        return (type(self), (self.operation, self.rule, self.operands, self.remedies))

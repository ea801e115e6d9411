"""The errors that veScale raises.

Two families. A `VescaleError` is the user's: it names the operation, the rule
that was broken with its numbers, the operands, and remedies with what each
costs. An `InternalError` is ours and asks for a report. All derive from
RuntimeError, because Python's reflected operators swallow TypeError and
NotImplementedError. Texts are the same on every rank; what differs by rank goes
into a note (`add_note`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class VescaleError(RuntimeError):
    """Base class of all errors that a user can fix.

    Arguments: the operation, the rule it broke (with numbers), the operands'
    descriptions, and remedies as (code, cost) pairs.
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
        return "\n".join(lines)

    def __reduce__(self):
        return (type(self), (self.operation, self.rule, self.operands, self.remedies))


class MeshError(VescaleError):
    """A mesh of the wrong size, an unknown axis, or tensors of two meshes in one call."""


class PlacementError(VescaleError):
    """A placement that does not fit its tensor or its mesh."""


class ShapeError(VescaleError):
    """Local shapes that do not form the stated global tensor, or ranks that disagree on one."""


class ViewError(VescaleError):
    """A view that cannot keep its sharding, or a write to a view that had to be made by copying."""


class PlainTensorError(VescaleError):
    """A plain tensor that had lost its layout was combined with a DTensor."""


class GradientError(VescaleError):
    """The gradient would be wrong: an autograd Function that veScale does not know, or a gradient with the wrong
    layout."""


class ImplicitCommunicationError(VescaleError):
    """An implicit collective inside `strict()`. `fixes` maps the names of the call's operands to placements under
    which the call needs no communication."""

    fixes: Sequence[Mapping[str, tuple]] = ()


class CommunicationError(VescaleError):
    """A collective failed or timed out; names the collective, the axis and who asked for it."""


class OperatorError(VescaleError):
    """A function that cannot be computed correctly on distributed tensors."""


class InternalError(RuntimeError):
    """A bug in veScale: please report it with the state in the message."""

    def __init__(self, what: str, **state: object) -> None:
        detail = "".join(f"\n  {name} = {value!r}" for name, value in state.items())
        super().__init__(f"{what} (a bug in veScale: please report it with this text){detail}")

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
        return "\n".join(lines)

    def __reduce__(self):
        return (type(self), (self.operation, self.rule, self.operands, self.remedies))


class MeshError(VescaleError):
    """The mesh has the wrong size or lacks an axis, or one call has tensors of two meshes."""


class PlacementError(VescaleError):
    """A placement does not fit its tensor or its mesh."""


class ShapeError(VescaleError):
    """Local shapes do not form the stated global tensor, or ranks disagree on a shape."""


class ViewError(VescaleError):
    """A write to a view that had to be made by copying, or to its base; or a read of a parameter's view that no longer
    shows the parameter.
    """


class PlainTensorError(VescaleError):
    """A plain tensor that has lost its layout meets a DTensor."""


class GradientError(VescaleError):
    """A gradient would be wrong: an autograd Function that veScale does not know, or a gradient with the wrong layout.
    """


class ImplicitCommunicationError(VescaleError):
    """An implicit collective inside `strict()`. `fixes` maps the names of the call's operands to placements with which
    the call needs no communication.
    """

    fixes: Sequence[Mapping[str, tuple]] = ()


class CommunicationError(VescaleError):
    """A collective failed or timed out; the text names the collective, the axis and the function that asked for it."""


class OperatorError(VescaleError):
    """A function cannot be computed correctly on distributed tensors."""


class InternalError(RuntimeError):
    """A bug in veScale: please report it with the state in the message."""

    def __init__(self, what: str, **state: object) -> None:
        detail = "".join(f"\n  {name} = {value!r}" for name, value in state.items())
        super().__init__(f"{what} (a bug in veScale: please report it with this text){detail}")

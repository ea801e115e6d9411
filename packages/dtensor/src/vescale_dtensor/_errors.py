"""The errors that veScale raises.

Two families. A `VescaleError` is the user's. An `InternalError` is ours and asks
for a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vescale_trace import VescaleError as VescaleError


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

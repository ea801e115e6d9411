"""The errors that pipelines raise."""

from __future__ import annotations

from vescale_trace import VescaleError


class PipelineError(VescaleError):
    """Base class of all errors in this package that a user can fix."""


class ScheduleError(PipelineError):
    """A schedule cannot be generated or read, or it would deadlock, compute something else, or need too much memory."""

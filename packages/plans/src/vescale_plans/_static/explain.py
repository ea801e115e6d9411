"""What static mode found about each module of a model, as a tree."""

from __future__ import annotations

from torch import nn

from .._plan.parts import PlanError
from .site import EAGER, UNSEEN, Site
from .threads import looking_thread


class StaticTree:
    """The findings of static mode about each module of a model. `str` gives a tree with reasons and source lines.

    Attributes:
        calls: per module name, the verdict ("static", "static, draws its region", "eager", "not called") and the
            reason.
        thread: the name of a running thread that might read the model, so that every call is eager; or None.
    """

    def __init__(self, model: nn.Module, sites: list[Site]) -> None:
        self._type = type(model).__name__
        self.calls = {"" if site.module is model else site.name: (site.verdict, site.reason) for site in sites}
        looking = looking_thread()
        self.thread = None if looking is None else looking.name

    @property
    def share(self) -> float:
        """Of the modules that were called, the part that runs static."""
        called = [verdict for verdict, _ in self.calls.values() if verdict is not UNSEEN]
        return sum(verdict is not EAGER for verdict in called) / max(len(called), 1)

    def __str__(self) -> str:
        lines = []
        for name, (verdict, reason) in self.calls.items():
            depth = name.count(".") + 1 if name else 0
            if verdict is UNSEEN:
                verdict = "-"
            leaf = name.rpartition(".")[2] or self._type
            lines.append(f"{'    ' * depth}{leaf}: {verdict}" + (f", {reason.what}" if reason else ""))
            if reason and reason.line:
                lines.append(f"{'    ' * depth}    at {reason.line}")
        lines.append(f"{100 * self.share:.0f}% of the modules called run static")
        if self.thread is not None:
            lines.append(f"while the thread {self.thread!r} runs, which might read the model, every call is eager")
        return "\n".join(lines)


def explain_static(model: nn.Module) -> StaticTree:
    """Prints and returns which modules of `model` run in static mode, which stay eager, and why, with the source line.

    Raises PlanError if the model is not in static mode.
    """
    held = getattr(model, "_vescale", None)
    if held is None or held.static is None:
        raise PlanError("explain_static", "the model is not under static mode", (), [("static(model)", "")])
    tree = StaticTree(model, list(held.static.sites.values()))
    print(tree)
    return tree

"""A call as the mode's forms see it: a signature solved, and the cuts of its labels.

A form decides a function as a rule does (`_rules/registry.py`), for DTensors and, on a mesh without axes, for the
plain tensors of one device, which then owns all blocks: so one device and every mesh run the same lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .._dispatch.signature import Signature, solve
from .._layouts.layout import Layout
from .._layouts.mesh import Mesh
from .._rules.registry import Call, Decision
from .grid import Cut, cut_of, fine_count
from .tree import Spread

ALONE = Mesh((), (), ())


class Solved:
    """A decision, the layouts that its operands then have, and where each label lies."""

    def __init__(self, call: Call, signature: Signature, decision: Decision) -> None:
        self.call, self.signature, self.decision = call, signature, decision
        targets = decision.targets or (None,) * len(call.operands)
        self.layouts: list[Layout] = [t or operand.layout for t, operand in zip(targets, call.operands)]
        self.inputs: list[tuple] = [tuple(labels) for labels in signature.inputs]
        self.out: Layout = decision.out

    def cut(self, label, count: int | None = None, split: str = "hidden") -> Cut:
        """The blocks of a label, as the first operand that has it is cut; as fine as they come unless counted."""
        for layout, labels in zip(self.layouts, self.inputs):
            if label in labels:
                dim = labels.index(label)
                count = fine_count(layout.shape[dim]) if count is None else count
                return cut_of(self.call.name, layout, dim, count, split)
        raise KeyError(label)

    def running(self, run: Callable[..., Tensor]) -> Decision:
        """The decision, of `run` on the local tensors."""
        self.decision.run = run
        return self.decision


def solved(call: Call, signature: Signature | None, adds: bool = True) -> Solved | None:
    """The signature's decision, with what the forms ask of it; None when there is none, or it is no signature.

    Arguments:
        adds: whether an element of the output adds up several elements of one operand. Every element of a partial
            tensor is on one rank, but not all on the same (a slice of a sharded dim is on its owners): what adds
            elements up, of one operand or of two, adds reduced ones. Else the output would be a sum over ranks that
            is yet to be made, and a product with it would not be one device's.
    """
    if not isinstance(signature, Signature):
        return None
    keeps = () if adds or signature.addends else tuple(one for one in signature.linear if len(one) == 1)
    signature = replace(signature, linear=keeps)
    decision = solve(call, signature)
    return None if decision is None else Solved(call, signature, decision)


def expanded(x: Tensor, kept: tuple[int, ...], shape: tuple[int, ...], dims: tuple[int, ...], cuts: tuple) -> Tensor:
    """`x` spread to `shape`; `kept` are those of its dims that are not stretched from size 1."""
    x = x.reshape([x.shape[d] for d in kept])
    return Spread.apply(x, shape, dims, cuts)

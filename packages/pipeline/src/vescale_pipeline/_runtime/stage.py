"""One stage: its parameters, what it computes for a microbatch, and the gradients it adds up.

Gradients are added in the order of the backwards, apart from `param.grad`: a call's
gradients belong to nobody until the user's `loss.backward()` releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_not
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import PipelineError
from .._torch_private import DisableTorchFunctionSubclass as local_only
from .._torch_private import _foreach_add_, _storage_Use_Count
from .._trace.event import Record
from .._trace.memory import Memories
from .._trace.placeholder import current
from .._transport.p2p import Header, header_of
from .backward import Gradients, Split, both
from .batch.microbatches import rows_in_order
from .recomputed import Halves
from .skeleton import Run, recomputing


class Codec:
    """Turns values of a call into plain tensors that travel, and back. This one is for plain tensors.

    A codec for distributed tensors keeps autograd's graph through both directions, and
    says in `form` what the other end needs to know.
    """

    def encode(self, value: Tensor) -> tuple[Tensor, Any]:
        """The plain tensor to send, and its form (picklable)."""
        return value, None

    def decode(self, tensor: Tensor, form: Any) -> Tensor:
        """The value of a plain tensor that arrived."""
        return tensor

    def lift(self, tensor: Tensor, others: list[Tensor]) -> Tensor:
        """A plain tensor that is to be filled with values of `others`, as one of their kind."""
        return tensor

    def parts(self, batch: Tensor, count: int) -> Sequence[Tensor]:
        """The rows of a batch for each of `count` microbatches, the same number in each."""
        return rows_in_order(batch, count)

    def whole(self, value: Tensor) -> Tensor:
        """A loss or an output as one device has it, the same on every rank of the stage; differentiable."""
        return value


@dataclass
class Slot:
    """State of one microbatch in a stage between its forward and its backward.

    `counts` is whether the loss has any weight: that of a microbatch whose labels are all ignored is 0 / 0, and its
    gradients are zero whatever comes out. A weight on a device, which the host does not know, counts: cross entropy
    gives ignored labels no gradient. `kept` is what user code needs that computes again in backward, `halves` what the
    halves of one share of that. `returned`: values that the model returns, by their keys.
    """

    leaves: list[Tensor | None]
    outputs: list[Tensor | None]
    header: Header
    buffers: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    output: Any = None
    split: Split | None = None
    counts: bool = True
    kept: dict[int, Tensor] | None = None
    halves: Halves | None = None
    returned: dict[int, Tensor] = field(default_factory=dict)


class Stage:
    """See the module.

    Arguments:
        index: of the stage.
        parameters: name -> parameter, those that the stage owns.
    """

    def __init__(self, index: int, parameters: dict[str, nn.Parameter], codec: Codec) -> None:
        self.index = index
        self.parameters = parameters
        self._codec = codec
        self._slots: dict[int, Slot] = {}
        self.begin(None, 1)

    def begin(self, record: Record | None, stages: int, apart: Collection[str] = ()) -> None:
        """A call begins: nothing is kept, no gradient is added up yet. Those of the weights `apart` will not be."""
        self._record, self._is_last = record, self.index == stages - 1
        self._slots.clear()
        self._header: Header | None = None  # of the last microbatch's outputs
        with local_only():
            self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self._weights = [self.parameters[name] for name in self.trained]
        self._apart: dict[int, list[Tensor]] = {i: [] for i, name in enumerate(self.trained) if name in apart}
        self._sums: Gradients = [None] * len(self.trained)

    # --- forward --------------------------------------------------------------------

    def forward(
        self,
        microbatch: int,
        arrived: list[Tensor | None],
        header: Header,
        forward: Callable[[], Any],
        memories: Memories,
    ) -> Slot:
        """Runs the skeleton on what arrived; `outputs` of the slot is what the next stage needs."""
        record = self._record
        values: dict[int, Tensor] = {}
        leaves: list[Tensor | None] = []
        grad = torch.is_grad_enabled()
        if self.index:
            for key, tensor, part in zip(record.crossing[self.index - 1], arrived, header):
                if part is None:
                    leaves.append(None)
                    continue
                leaf = tensor.detach()
                if grad and part.requires_grad:
                    leaf.requires_grad_()
                leaves.append(leaf if part.requires_grad else None)
                value = leaf if part.form is None else self._codec.decode(leaf, part.form)
                values[key] = value.clone() if key in record.written else value
        run, halves = Run(record, self.index, values, self._codec.lift), Halves()
        before, current.halves = current.halves, halves
        try:
            result = memories.of_stage(self.index, values, run, forward)
        finally:
            current.halves = before
        outputs: list[Tensor | None] = []
        header: Header = ()
        if not self._is_last:
            forms = []
            for key in record.crossing[self.index]:
                value = values.get(key)
                tensor, form = (None, None) if value is None else self._codec.encode(value)
                outputs.append(tensor)
                forms.append(form)
            header = self._header = header_of(outputs, forms, self._header)
        slot = self._slots[microbatch] = Slot(leaves, outputs, header, [t for t in arrived if t is not None])
        slot.kept, slot.halves = run.kept, halves
        if not grad and record.returned:
            slot.returned = {key: values[key] for key, at in record.returned.items() if at == self.index}
        if self._is_last:
            slot.output = run.reveal(result)
        return slot

    # --- backward -------------------------------------------------------------------

    def backward(self, microbatch: int, gradients: list[Tensor | None], seed: Tensor | None) -> tuple[Gradients, list]:
        """The gradients of what arrived, and the buffers that are free now; adds up those of the weights."""
        slot = self._slots.pop(microbatch)
        leaves, found = self._run(slot, gradients, seed, both)
        self._add(found if slot.counts else _zeros(found))
        return leaves, slot.buffers

    def input_backward(self, microbatch: int, gradients: list[Tensor | None], seed: Tensor | None) -> Gradients:
        """Half of the backward: the gradients of what arrived."""
        slot = self._slots[microbatch]
        slot.halves.are_apart = True

        def halved(*given: Any) -> tuple[Gradients, None]:
            slot.split = Split(*given)
            return slot.split.leaves, None

        leaves, _ = self._run(slot, gradients, seed, halved)
        slot.leaves, slot.outputs, slot.loss, slot.output = [], [], None, None
        return leaves

    def weight_backward(self, microbatch: int) -> list[Tensor]:
        """The other half: adds up the gradients of the weights. Gives the buffers that are free now."""
        slot = self._slots.pop(microbatch)
        found = recomputing(slot.kept, slot.split.weights)
        slot.halves.end()
        self._add(found if slot.counts else _zeros(found))
        return slot.buffers

    def sums(self) -> dict[str, Tensor | None]:
        """The weights' gradients over all microbatches so far, stacked for those that are kept apart; they are the
        caller's from now on."""
        sums, self._sums = self._sums, [None] * len(self.trained)
        for i, kept in self._apart.items():
            sums[i] = torch.stack(kept) if kept else None
        return dict(zip(self.trained, sums))

    # --- internal -------------------------------------------------------------------

    def _run(self, slot: Slot, gradients: list, seed: Tensor | None, compute: Callable) -> tuple[Gradients, Any]:
        roots, seeds = [], []
        for output, gradient in zip(slot.outputs, gradients):
            if output is not None and gradient is not None and output.requires_grad:
                roots.append(output)
                seeds.append(gradient.detach())  # whoever keeps it is seen by the owners of its memory
        if slot.loss is not None and slot.loss.requires_grad:
            roots.append(slot.loss)
            seeds.append(seed)
        wanted = [leaf for leaf in slot.leaves if leaf is not None]
        found, rest = recomputing(slot.kept, compute, roots, seeds, wanted, self._weights)
        following = iter(found if slot.counts else _zeros(found))
        return [None if leaf is None else next(following) for leaf in slot.leaves], rest

    def _add(self, gradients: Gradients) -> None:
        """Adds gradients in place, in the memory of the first, or of a copy if anything else may hold that."""
        for i, kept in self._apart.items():
            if gradients[i] is not None:
                kept.append(gradients[i].clone())
                gradients[i] = None
        sums = self._sums
        if sums and all(map(is_not, sums, _NONES)) and all(map(is_not, gradients, _NONES)):  # most microbatches
            _foreach_add_(sums, gradients)
            return
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        both = [i for i in there if sums[i] is not None]
        if both:
            _foreach_add_([sums[i] for i in both], [gradients[i] for i in both])
        with local_only():
            owned = {i for i in there if sums[i] is None and _is_owned(gradients, i)}
        for i in there:
            if sums[i] is None:
                sums[i] = gradients[i] if i in owned else gradients[i].clone()


def _is_owned(gradients: Gradients, i: int) -> bool:
    """True if this list alone holds the memory of one of its gradients, each element once.

    Autograd hands on what needs no work: `x + weight` gives x, the weight and the next stage's gradient one memory, in
    one object or in several. A Linear's is a view of the product that it made, which nothing but the view holds then.
    """
    alone = _ALONE if gradients[i]._base is None else _VIEW_ALONE
    return gradients[i].is_contiguous() and _holders(gradients, i) <= alone


def _holders(tensors: Sequence[Tensor], i: int) -> int:
    """References, in Python and in C++, to one of a list's tensors, to what it is a view of, and to their memory."""
    held = [tensors[i].untyped_storage(), tensors[i]._base]
    count = getrefcount(tensors[i]) + tensors[i]._use_count()
    count += getrefcount(held[0]) + _storage_Use_Count(held[0]._cdata)
    return count if held[1] is None else count + getrefcount(held[1]) + held[1]._use_count()


_ALONE, _VIEW_ALONE = _holders([torch.empty(1)], 0), _holders([torch.empty(1).view(1)], 0)
"""Holders of a tensor that a list alone holds; torch's versions differ in what they count of their own."""
_NONES = repeat(None)


def _zeros(gradients: Gradients) -> Gradients:
    return [None if gradient is None else torch.zeros_like(gradient) for gradient in gradients]


def check_uses(record: Record, stages: dict[str, tuple[int, ...]], cuts: Sequence[str]) -> None:
    """Raises PipelineError where the forward uses a parameter in a stage that does not own it."""
    for name, uses in record.uses.items():
        owners = stages.get(name, ())
        strange = [stage for stage in uses if stage not in owners]
        if strange:
            raise PipelineError(
                "pipeline",
                f"the parameter {name!r} is owned by stage {', '.join(map(str, owners))} and used by stage "
                f"{strange[0]}: stages are told from the order in which modules are registered, and the forward calls "
                "them in another",
                [f"cuts  {', '.join(cuts)}"],
                [
                    (f"Pipeline(owners={{{name.rpartition('.')[0]!r}: {strange[0]}}})", "that stage holds the module"),
                    ("register the module where it is called", "the order of __init__ is that of forward"),
                    ("tie it under a second name in the using stage", "module.weight = other.weight"),
                    ("loss = model(batch) + penalty", "of model.parameters(), in the loop, where it is one"),
                ],
            )

"""torch's total norm of what a loop has chosen otherwise than by `model.parameters()`: by names, of an optimizer's
groups, of a module, by a filter. No stand-in for other stages is in such a list.

Every rank runs the same loop, and so each has chosen what it holds of what one device would choose, perhaps nothing:
they tell each other their norms, and the total is of all, in the order of the model, with the same bits on every rank.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from ..._torch_private import _get_total_norm, set_total_norm
from ..member import Member
from ..ownership import is_elsewhere, named_everywhere
from .stand_ins import OtherStages, Remote
from .told import exchange, norms_of_gradients


class Chosen:
    """Parameters of a pipeline's model, and their gradients, in lists."""

    pipelines: ClassVar[WeakSet[Chosen]] = WeakSet()
    last: ClassVar[ref[Chosen] | None] = None  # of the pipeline that was called last: whose an empty list is

    def __init__(self, member: Member, model: nn.Module) -> None:
        self._member = member
        self._elsewhere = {id(one) for _, one in named_everywhere(model) if is_elsewhere(one)}
        self._places = {name: place for place, name in enumerate(member.owned.stages)}
        self.pipelines.add(self)

    def called(self) -> None:
        Chosen.last = ref(self)

    def joined(self, tensors: list[Tensor], order: float) -> list[Tensor]:
        """The list with the norms of what ranks hold of the model, of all ranks, in place of what this rank holds."""
        parameters = self._member.parameters
        places = {id(one): self._places[name] for name, one in parameters.items()}
        places |= {id(one.grad): self._places[name] for name, one in parameters.items() if one.grad is not None}
        mine = [tensor for tensor in tensors if id(tensor) in places]
        rest = [one for one in tensors if id(one) not in places and id(one) not in self._elsewhere]
        if len(rest) == len(tensors) and (tensors or Chosen.last is None or Chosen.last() is not self):
            return tensors
        with torch.no_grad():
            norms = norms_of_gradients([tensor.detach() for tensor in mine], order, self._member.codec.whole)
        numbers: dict[int, Tensor] = {}
        for place, dtype, norm in exchange(self._member, [places[id(tensor)] for tensor in mine], norms):
            numbers.setdefault(place, norm.to(dtype))  # of a tied weight the first rank's
        return rest + [numbers[place] for place in sorted(numbers)]


@wraps(_get_total_norm)
def _total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
    if Chosen.pipelines:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not any(isinstance(tensor, (Remote, OtherStages)) for tensor in tensors):
            for pipeline in list(Chosen.pipelines):
                tensors = pipeline.joined(tensors, float(norm_type))
    return _get_total_norm(tensors, norm_type, *args, **kwargs)


set_total_norm(_total_norm)

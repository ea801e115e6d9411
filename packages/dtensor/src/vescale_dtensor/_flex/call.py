"""One call of flex_attention on DTensors: what dispatch decides by, and what then runs on a rank's shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask
from torch.overrides import handle_torch_function

from .._conversions.convert import alias, convert
from .._dispatch.dispatch import call
from .._reproducible.mode import check_order
from .._rules.solvers.owned import nothing
from .._tensor.tensor import DTensor
from .._torch_private import _is_torch_function_enabled
from . import blocks, door, kernel
from .captured import captured, replaced


class Form:
    """Options beside the operands. Two are equal where the same is decided for them; what is compared outlives the call
    in dispatch's cache, and users' functions, with their tensors, do not (`release`)."""

    def __init__(self, given: dict[str, Any], held: list[Tensor]) -> None:
        self.score_mod: Callable | None = given["score_mod"]
        self.mask: BlockMask | None = given["block_mask"]
        self.rest = {name: one for name, one in given.items() if name not in _NAMED}
        self._held = [id(tensor) for tensor in held]
        self.grouped: bool = given["enable_gqa"]
        aux = given.get("return_aux")
        asked = ("lse",) if given.get("return_lse") else tuple(name for name in _AUX if getattr(aux, name, False))
        self.statistics: tuple[str, ...] = asked
        mask = self.mask
        self.lists = None if mask is None else tuple(mask.kv_num_blocks.shape)
        self.lengths = None if mask is None else tuple(mask.seq_lengths)
        self.edge = 1 if mask is None else mask.BLOCK_SIZE[0]
        self.is_ordered = mask is not None and getattr(mask, "dq_write_order", None) is not None
        self._key = (self.grouped, self.statistics, self.lists, self.lengths, self.edge, self.is_ordered)

    def __eq__(self, other: object) -> bool:
        return type(other) is Form and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def release(self) -> None:
        self.score_mod = self.mask = None
        self.rest.clear()

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, held: list[Tensor], places: blocks.Places, grouped: bool
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Runs on plain tensors or shards, which hold `places` of the whole; returns the result, and the statistics
        asked for."""
        query, key, value = alias(query), alias(key), alias(value)
        by = {of: alias(tensor) for of, tensor in zip(self._held, held)}
        score_mod = blocks.at_global(replaced(self.score_mod, by), places, query.device, scores=True)
        mask = self.mask
        if mask is not None:
            mask_mod = blocks.at_global(replaced(mask.mask_mod, by), places, query.device, scores=False)
            mask = blocks.cut(mask, places, mask_mod)
        out = kernel.attend(query, key, value, score_mod=score_mod, block_mask=mask, enable_gqa=grouped, **self.rest)
        found, more = (out, ()) if isinstance(out, Tensor) else out
        if query.is_meta and by:  # what stands in has no use for them, and their gradient is to be counted
            found = found + nothing(by.values(), ())
        statistics = (more,) if isinstance(more, Tensor) else tuple(getattr(more, name) for name in self.statistics)
        return found, *statistics


_NAMED = frozenset({"query", "key", "value", "score_mod", "block_mask", "enable_gqa"})
_AUX = ("lse", "max_scores")
_ORDERED = ("F.scaled_dot_product_attention", "it has an order there (of transformers: attn_implementation='sdpa')")


def attended(query: Tensor, key: Tensor, value: Tensor, held: list[Tensor], form: Form) -> tuple[Tensor, ...]:
    """flex_attention, with what its functions hold as operands. It has the rule."""
    return form.run(query, key, value, held, blocks.ALL, form.grouped)


attended.__name__ = "flex_attention"  # by which users hear of it


def flex_attention(function: Callable, args: tuple, kwargs: dict) -> Any:
    """torch's flex_attention of DTensors."""
    given = door.FLEX.given(args, kwargs)
    mask = given["block_mask"]
    held = captured(given["score_mod"], None if mask is None else mask.mask_mod)
    form = Form(given, held)
    try:
        out, *statistics = call(attended, given["query"], given["key"], given["value"], held, form)
    finally:
        form.release()
    if given.get("return_aux") is not None:
        return out, AuxOutput(**dict(zip(form.statistics, statistics)))
    return (out, *statistics) if statistics else out


def _attend(at: door.Door, args: tuple, kwargs: dict) -> Any:
    """DTensors go to dispatch, placeholders to their class, tensors without data to what stands in for the kernel."""
    if _is_torch_function_enabled():
        check_order("flex_attention", "torch compiles it whole, so that it computes", _ORDERED)
        operands = [one for one in (*args[:3], *kwargs.values()) if type(one) is DTensor or _goes_first(one)]
        if operands:
            return handle_torch_function(at.function, operands, *args, **kwargs)
    query = args[0] if args else kwargs.get("query")
    return kernel.attend(**at.given(args, kwargs)) if kernel.stands_in(query) else NotImplemented


def _goes_first(value: Any) -> bool:
    return getattr(type(value), "before_dtensor", False)


def _made(at: door.Door, args: tuple, kwargs: dict) -> Any:
    """A mask is made whole, of whole tensors: one gather of each DTensor that its function holds where it is cut."""
    given = at.given(args, kwargs)
    if at is door.BLOCKS and not kernel.reads_lists(given["device"]):
        return kernel.empty_lists(**given)
    name = next(iter(given))  # mask_mod, or mod_fn
    held = [tensor for tensor in captured(given[name]) if type(tensor) is DTensor]
    if not held:
        return NotImplemented
    whole = {id(tensor): convert(tensor, tensor._layout.base.invariant, at.function) for tensor in held}
    given[name] = replaced(given[name], {key: alias(tensor).detach() for key, tensor in whole.items()})
    return door.compiled(at)(**given)


door.FLEX.answer = _attend
door.BLOCKS.answer = door.MASK.answer = _made

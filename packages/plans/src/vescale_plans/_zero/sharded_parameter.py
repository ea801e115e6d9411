"""A parameter's place in a flat bucket, how buckets are shared, and what layouts say about both."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from vescale_dtensor import DTensor, Layout, PlacementError
from vescale_dtensor.engine import Held, Lender, Mesh, attach, convert, convert_plain, forget, local_only

from .._plan.parts import Precision

_set_data = Tensor.data.__set__


@dataclass(frozen=True)
class Sharing:
    """Settings by which the buckets of a model are shared.

    zero: the stage. lead: the mesh axis over which ZeRO shards (`Plan.zero_axis`); None without one.
    precision: see `Precision`, None for the parameters' own.
    offload: full-precision shards, and so optimizer states, on the host.
    prefetch, ahead_bytes: how many blocks are gathered ahead, and the bytes of these, and of reductions under way.
    sums: see `Plan`.
    """

    mesh: Mesh
    zero: int = 0
    lead: int | None = None
    precision: Precision | None = None
    offload: bool = False
    prefetch: int = 1
    ahead_bytes: int | None = None
    sums: str = "ordered"


def laid(value: Tensor, layout: Layout, cause: str) -> DTensor:
    """Returns a tensor that somebody gave in this layout; a plain one is alike on all ranks."""
    return convert(value, layout, cause) if type(value) is DTensor else convert_plain(value, layout.mesh, layout, cause)


class Read(Function):
    """A parameter's part at rest -> the same values; backward, a part's gradient -> this rank's share of the full one.

    Parts of different ranks are of different elements, so what is sent is nothing more than the sum over ranks that the
    gradients of the model's own use take.
    """

    @staticmethod
    def forward(ctx, part: Tensor, param: ShardedParameter) -> Tensor:
        ctx.param = param
        with local_only():
            return part.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        with local_only():
            return ctx.param.spread(grad), None


_read = super(Function, Read).apply  # `apply` of others is replaced by one that gathers


@dataclass(slots=True, eq=False, repr=False)
class ShardedParameter:
    """One parameter's place in a bucket."""

    parameter: DTensor
    name: str
    start: int
    full_layout: Layout  # while the model computes with it
    shard_layout: Layout  # as the optimizer updates it
    is_separate: bool  # whether `full` is memory of its own, which rests empty, or as a copy in another dtype
    hooks: OrderedDict[int, Callable] | None  # the user's, for the reduced gradient; None where nothing is reduced
    wait: Callable[[], None]  # the bucket's: what is on its way to its parameters is there
    numel: int = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    shown: tuple[Layout, ...] = field(init=False)  # at rest and unsharded; of these, and whether views are watched
    reduced_layout: Layout = field(init=False)  # of the full reduced gradient
    gradient_layout: Layout = field(init=False)  # of the reduced gradient that an optimizer step consumes
    full: Tensor = field(init=False)
    shard: Tensor = field(init=False)
    optimized: nn.Parameter | None = None  # the shard as a plain parameter, which elementwise optimizers take
    gradient: Tensor | None = None
    arriving: Tensor | None = None  # on the host, where the gradients of an offloaded parameter arrive
    is_copied: bool = False  # whether `optimized` is a copy of the full-precision shard, on the host
    met: tuple[Tensor, Layout] | None = None  # where it lay before autograd was shown it unsharded, to add to it
    is_away: bool = False  # the parameter was pointed at memory of somebody else's
    is_lent: bool = False  # its memory was given to somebody whose writes do not count the parameter's version up
    held: tuple[int, int] = field(init=False)  # the range of the local shard, flattened, that `shard` is
    open_gradients: Callable[[], None] = field(init=False)  # the bucket's: autograd adds into its memory from there on
    end_pass: Callable[[], None] = field(init=False)  # the model's: ends a backward that raised, before a look
    lender: Lender = field(init=False)  # the bucket's, of its memory of now
    arrival: RemovableHandle | None = None  # of the hook by which the bucket hears of gradients

    def __post_init__(self) -> None:
        full = self.full_layout
        self.numel, self.shape = prod(full.local_shape), full.local_shape
        self.reduced_layout, self.gradient_layout = full.gradient.reduced, self.shard_layout.gradient.reduced

    def read(self, tensor: DTensor) -> Tensor:
        """The parameter at rest, for a function that computes with it: with gradient, a tensor of its own.

        Autograd knows a parameter by one shape, which is that of the full one, for so the model uses it.
        """
        if tensor is not self.parameter or not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        with local_only():
            rest = self._show_unsharded()
            node = Tensor.view_as(tensor, tensor).grad_fn.next_functions[0][0]
            self._show_again(rest)
            node.register_prehook(self._meet)
            out = attach(_read(tensor, self), self.shard_layout)
            self.lend(out)
            return out

    def lend(self, view: DTensor) -> None:
        """Somebody took this view of the parameter, or a copy where it cannot be one."""
        self.lender.lend(view, self, self.where(view))

    def where(self, tensor: Tensor) -> Held:
        """Tells where a tensor that was made of the parameter lies."""
        with local_only():
            place = tensor.untyped_storage()._cdata
            if place == self.shard.untyped_storage()._cdata:
                return Held.STAYS
            return Held.COMES_AND_GOES if place == self.full.untyped_storage()._cdata else Held.COPY

    def written(self) -> None:
        """Values were loaded into the parameter's memory."""
        self.lender.end(Held.COPY)

    def _meet(self, grads: tuple[Tensor, ...]) -> None:
        """Before autograd adds to the gradient: the parameter has the gradient's shape, until it was added."""
        with local_only():
            if self.parameter._layout.base is not self.full_layout:
                self.met = self._show_unsharded()

    def part(self) -> None:
        """After it. With dispatch off."""
        if self.met is not None:
            rest, self.met = self.met, None
            self._show_again(rest)

    def _show_unsharded(self) -> tuple[Tensor, Layout]:
        """`show(True)`, for a moment. Returns where the parameter lay, which may be memory of a user's own."""
        rest = self.parameter.data, self.parameter._layout
        self.show(True)
        return rest

    def _show_again(self, rest: tuple[Tensor, Layout]) -> None:
        forget(self.parameter)
        data, self.parameter._layout = rest
        _set_data(self.parameter, data)

    def spread(self, grad: Tensor) -> Tensor:
        """A gradient of the part, as one of the local shard: zero elsewhere. With dispatch off."""
        self.open_gradients()
        low, high = self.held
        padded = F.pad(grad.reshape(-1), (low, self.numel - high)).view(self.shape)
        return padded.to(self.full.device)

    def register(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """`register_post_accumulate_grad_hook` of the parameter."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def leave(self) -> tuple[OrderedDict[int, Callable] | None, OrderedDict[int, Callable] | None]:
        """The parameter belongs to no bucket from here on, and has no gradient. Gives the users' hooks, as `Hooks`."""
        self.parameter.grad = None
        if self.arrival is not None:
            self.arrival.remove()
        self.lender.end(Held.COMES_AND_GOES)
        self.lender.end(Held.COPY)
        with local_only():
            found = self.parameter._backward_hooks, self.hooks or self.parameter._post_accumulate_grad_hooks
        self.full = self.shard = self.optimized = self.gradient = self.arriving = None
        return found

    @property
    def at_rest(self) -> tuple[Tensor, Layout]:
        """The memory that holds the parameter's values between steps, and how it is laid out."""
        self.wait()
        return (self.shard, self.shard_layout) if self.is_separate else (self.full, self.full_layout)

    def show(self, unsharded: bool) -> None:
        """Points the parameter at `full` or at `shard`. Call with dispatch disabled."""
        parameter = self.parameter
        forget(parameter)
        _set_data(parameter, self.full if unsharded else self.shard)
        parameter._layout = self.shown[unsharded]

    def choose_shown(self, products: str | None) -> None:
        """Chooses the layouts to show: a shard at rest apart is untracked, so that whoever computes with it asks for
        `read`. Views are watched where one may be a copy, or lie in memory that does not stay. products: of linear
        layers with the full one."""
        rest = self.shard_layout.untracked if self.is_separate else self.shard_layout
        cut = any(size > 1 and state.is_sharded for size, state in zip(rest.mesh.sizes, self.full_layout.states))
        full = self.full_layout.with_products(products)
        self.shown = (rest.watched, full.watched) if self.is_separate or cut else (rest, full)

    def replace(self, tensor: DTensor, value: Tensor) -> None:
        """`tensor.data = value`, of the parameter: it lies there until the bucket takes the values in. What is over
        its memory of now, an average's backup, keeps that. Raises PlacementError for another global shape."""
        layout = tensor._layout.base
        if tuple(value.shape) != layout.shape:
            raise PlacementError(
                "Tensor.data",
                f"{self.name!r} is in a flat bucket, and cannot be given a value of another shape",
                [f"parameter  {list(layout.shape)}", f"value  {list(value.shape)}"],
                [("change the module before parallelize", ""), ("module.weight = nn.Parameter(...)", "a new one")],
            )
        value = laid(value.detach(), layout, "Tensor.data")
        with local_only():
            if self.arriving is not None:
                value = value.to(tensor.device)
            if value.device != tensor.device:
                raise PlacementError(
                    "Tensor.data",
                    f"{self.name!r} lies on {tensor.device}, where the plan's mesh is, and is given a value elsewhere",
                    [f"value  {value.device}"],
                    [(f"value.to({str(tensor.device)!r})", "a copy")],
                )
            if value.data_ptr() == tensor.data_ptr() and value.dtype is tensor.dtype and value.device == tensor.device:
                return
            forget(tensor)
            _set_data(tensor, value.detach())
        self.is_away = True

    def reduced(self, value: Tensor) -> DTensor | None:
        """`parameter.grad = value`, of the global shape, as the gradient that a step consumes; None for one that is
        partial as autograd's own is, or of another shape."""
        if self.hooks is None:  # nothing of it is reduced: autograd goes on adding to it
            return None
        full = self.full_layout
        partial = type(value) is DTensor and value._layout.base is full.gradient
        if tuple(value.shape) != full.shape or (partial and self.gradient_layout is self.reduced_layout):
            return None
        return laid(value, self.gradient_layout, "grad")

    @property
    def is_lost(self) -> bool:
        """True if the parameter's memory is another than the bucket's: replaced, or exchanged with a tensor's."""
        return self.is_away or self.parameter.__dict__.get("_owner") is not self

    def take_back(self, may_be_part: bool) -> tuple[Tensor, bool]:
        """The parameter's local values, wherever they lie, and whether they are the shard's alone."""
        tensor, full = self.parameter, self.full_layout
        kept = (full, self.shard_layout) if may_be_part else (full,)
        if type(tensor) is not DTensor:  # exchanged with a plain one
            value = convert_plain(tensor.detach(), full.mesh, full, "swap_tensors")
            tensor.__class__ = DTensor
        else:
            value = tensor.detach()
            value = value if tensor._layout.base in kept else convert(value, full, "swap_tensors")
        tensor._layout, tensor._owner, self.is_away = value._layout.base, self, False
        with local_only():
            return value.detach(), value._layout.base is not full


def holders(layout: Layout) -> tuple[tuple[int, int], ...]:
    """(axis, rank) of the axes of which one rank alone holds anything: an expert's, say."""
    found = []
    for axis, state in enumerate(layout.states):
        if state.is_sharded and layout.mesh.sizes[axis] > 1:
            before, after = (0,) * axis, (0,) * (layout.mesh.ndim - axis - 1)
            ranks = range(layout.mesh.sizes[axis])
            full = [rank for rank in ranks if prod(layout.shape_at((*before, rank, *after)))]
            found += [(axis, rank) for rank in full if len(full) == 1]
    return tuple(found)


def largest_shard(layout: Layout) -> int:
    """Elements of the largest shard over all coordinates: what the bucket reserves on every rank alike."""
    cutting = [range(size) if state.is_sharded else (0,) for size, state in zip(layout.mesh.sizes, layout.states)]
    return max(prod(layout.shape_at(coordinate)) for coordinate in itertools.product(*cutting))


def block_of(layout: Layout, rows: int) -> int:
    """Elements of `rows` rows of the local shard."""
    return rows * prod(layout.local_shape[1:]) if layout.ndim else 1

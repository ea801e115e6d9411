"""Probes that a calibration times: matrix products, operators, attention and collectives, each at a few sizes.

A probe is a function that does one of them on tensors that are there already; results are allocated anew, as in a
model. Sizes are bytes read and written, as `vescale_plans.timeline` counts them, operations for attention, and bytes
received for collectives, products for waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from vescale_plans.dry_run import Meter
from vescale_plans.timeline import Recorder, operation_of

WIDTH = 512
BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Bytes of the first operand of an operator."""
MESSAGES = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
"""Bytes that each rank receives in a collective."""
PRODUCTS = ((1, 1, 1), (1, 2, 2), (2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 2, 4), (4, 8, 2), (8, 2, 8), (2, 4, 4))
"""(m, n, k) in units of the base size."""
WAITS = (0, 1, 4, 16, 48)
"""Products before ranks meet."""
ATTENTION = ((1, 4, 128, 64), (1, 8, 256, 64), (4, 8, 256, 64), (2, 8, 512, 64))
"""Batch, heads, positions, features of a head."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Probe:
    """One thing to time.

    Arguments:
        kind: "product", "operator", "collective" or "wait".
        name: operator or kind of collective.
        size: see above; (m, n, k) of a product.
        run: does it.
        ranks: of a collective.
        before: what a rank computes before each run, whose result `run` is given: a collective in a training step finds
            caches full of other things.
    """

    kind: str
    name: str
    size: Any
    run: Callable[..., object]
    ranks: int = 1
    before: Callable[[], object] | None = None


class Operands:
    """Tensors of [rows, WIDTH] to work on, of which probes of one size share."""

    def __init__(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> None:
        rows = nbytes // WIDTH // dtype.itemsize
        made = {"dtype": dtype, "device": device}
        self.x, self.y = torch.rand(rows, WIDTH, **made) + 0.5, torch.rand(rows, WIDTH, **made) + 0.5
        self.out = torch.ones(rows, WIDTH, **made)
        self.line = torch.ones(WIDTH, **made)
        self.ids = torch.randint(rows, (rows,), device=device)
        self.labels = torch.randint(WIDTH, (rows,), device=device)
        self.mask = torch.rand(rows, WIDTH, device=device) > 0.5
        # Of the forward itself: a device may keep statistics in more bits than its operands have.
        _, self.mean, self.rstd = aten.native_layer_norm(self.x, [WIDTH], self.line, self.line, 1e-5)

    @property
    def rows(self) -> int:
        return self.x.shape[0]


# Operator -> (function, arguments) of the dispatcher; the ones that training steps spend their time on.
OPERATORS: tuple[tuple[Any, Callable[[Operands], tuple]], ...] = (
    (aten.add.Tensor, lambda o: (o.x, o.y)),
    (aten.add_.Tensor, lambda o: (o.out, o.y)),
    (aten.sub.Tensor, lambda o: (o.x, o.y)),
    (aten.mul.Tensor, lambda o: (o.x, o.y)),
    (aten.mul_.Tensor, lambda o: (o.out, 1.0)),
    (aten.div.Tensor, lambda o: (o.x, o.y)),
    (aten.neg.default, lambda o: (o.x,)),
    (aten.sqrt.default, lambda o: (o.x,)),
    (aten.pow.Tensor_Scalar, lambda o: (o.x, 2)),
    (aten.exp.default, lambda o: (o.x,)),
    (aten.tanh.default, lambda o: (o.x,)),
    (aten.relu.default, lambda o: (o.x,)),
    (aten.threshold_backward.default, lambda o: (o.x, o.y, 0)),
    (aten.silu.default, lambda o: (o.x,)),
    (aten.silu_backward.default, lambda o: (o.x, o.y)),
    (aten.gelu.default, lambda o: (o.x,)),
    (aten.gelu_backward.default, lambda o: (o.x, o.y)),
    (aten.native_layer_norm.default, lambda o: (o.x, [WIDTH], o.line, o.line, 1e-5)),
    (
        aten.native_layer_norm_backward.default,
        lambda o: (o.y, o.x, [WIDTH], o.mean, o.rstd, o.line, o.line, [True] * 3),
    ),
    (aten._softmax.default, lambda o: (o.x, -1, False)),
    (aten._softmax_backward_data.default, lambda o: (o.y, o.x, -1, o.x.dtype)),
    (aten._log_softmax.default, lambda o: (o.x, -1, False)),
    (aten._log_softmax_backward_data.default, lambda o: (o.y, o.x, -1, o.x.dtype)),
    (aten.nll_loss_forward.default, lambda o: (o.x, o.labels, None, 1, -100)),
    (aten.gather.default, lambda o: (o.x, 1, o.labels[:, None])),
    (aten.amax.default, lambda o: (o.x, [-1], True)),
    (aten.sum.dim_IntList, lambda o: (o.x, [0], True)),
    (aten.mean.dim, lambda o: (o.x, [-1], True)),
    (aten.clone.default, lambda o: (o.x.view(o.rows, 8, -1).transpose(0, 1),)),
    (aten.copy_.default, lambda o: (o.out, o.y)),
    (aten.cat.default, lambda o: ([o.x, o.y],)),
    (aten.zeros_like.default, lambda o: (o.x,)),
    (aten.slice_backward.default, lambda o: (o.x, [2 * o.rows, WIDTH], 0, 0, o.rows, 1)),
    (aten.masked_fill.Scalar, lambda o: (o.x, o.mask, 0.0)),
    (aten.where.self, lambda o: (o.mask, o.x, o.y)),
    (aten.embedding.default, lambda o: (o.y, o.ids)),
    (aten.embedding_dense_backward.default, lambda o: (o.x, o.ids, o.rows, -1, False)),
    (aten.lerp_.Scalar, lambda o: (o.out, o.y, 0.1)),
    (aten.addcmul_.default, lambda o: (o.out, o.x, o.y)),
    (aten.addcdiv_.default, lambda o: (o.out, o.x, o.y)),
)


def operators(dtype: torch.dtype, device: torch.device) -> Iterator[Probe]:
    """Elementwise work, reductions, norms, copies and look-ups."""
    for nbytes in BYTES:
        operands = Operands(nbytes, dtype, device)
        for function, arguments in OPERATORS:
            given = arguments(operands)
            size = operation_of(function, given, {}, function(*given)).moved
            yield Probe("operator", f"aten.{function.overloadpacket.__name__}", size, lambda f=function, g=given: f(*g))


def products(dtype: torch.dtype, device: torch.device, base: int) -> Iterator[Probe]:
    """Yields the products of a linear layer: forward, its input's gradient, and its weight's."""
    for units in PRODUCTS:
        m, n, k = (base * unit for unit in units)
        x, w, g = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((m, k), (n, k), (m, n)))
        yield Probe("product", "forward", (m, n, k), lambda x=x, w=w: x @ w.t())
        yield Probe("product", "input gradient", (m, k, n), lambda g=g, w=w: g @ w)
        yield Probe("product", "weight gradient", (n, k, m), lambda g=g, x=x: g.t() @ x)


def attention(dtype: torch.dtype, device: torch.device) -> Iterator[Probe]:
    """Fused attention, whole and causal."""
    for batch, heads, positions, width in ATTENTION:
        shape = (batch, positions, heads, width)
        q, k, v = (
            torch.randn(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_(True) for _ in range(3)
        )
        flops = 4 * batch * heads * positions**2 * width
        for causal in (False, True):
            tail = ".causal" * causal
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            def forward(q=q, k=k, v=v, causal=causal) -> Tensor:
                with torch.no_grad():
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            def backward(out=out, leaves=(q, k, v)) -> object:
                return torch.autograd.grad(out, leaves, out, retain_graph=True)

            yield Probe("operator", f"attention{tail}", flops, forward)
            yield Probe("operator", f"attention_backward{tail}", flops * 5 // 2, backward)


class Block(nn.Module):
    """A block as transformers have them, to see what a step takes besides its operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, positions, width = x.shape
        q, k, v = self.packed(self.norm(x)).view(rows, positions, -1, 64).transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, positions, width))
        return x + self.narrow(F.gelu(self.wide(self.mixed(x))))


def step(mesh: DeviceMesh, device: torch.device) -> tuple[Callable[[], None], Counter]:
    """A training step of a few blocks, replicated over `mesh`, as the engine runs it; and its operations."""
    torch.manual_seed(0)
    whole = (Replicate(),) * mesh.ndim
    model = nn.Sequential(*(Block(WIDTH) for _ in range(2))).to(device)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        made = distribute_tensor(parameter.detach(), mesh, whole)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(made))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = distribute_tensor(torch.ones(2, 256, WIDTH, device=device), mesh, whole)

    def run() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    recorder = Recorder()
    with Meter() as meter:
        meter.listener = recorder.note
        run()
    operations: Counter = Counter()
    for (_, _, operation), count in recorder.operations.items():
        operations[operation] += count
    return run, operations


def collectives(mesh: DeviceMesh, dtype: torch.dtype, device: torch.device) -> Iterator[Probe]:
    """Conversions over the inner axis of `mesh`, all its lines at once, as the engine makes them; each of numbers that
    were just written, after a product."""
    ranks = mesh.size(1)
    outer = (Replicate(),)
    left, right = (torch.randn(rows, WIDTH, dtype=dtype, device=device) for rows in (2 * WIDTH, WIDTH))
    for received in MESSAGES:
        rows = max(ranks, received // dtype.itemsize // WIDTH // (ranks - 1) * ranks) if received >= 1 << 16 else ranks
        width = WIDTH if received >= 1 << 16 else max(1, received // dtype.itemsize // (ranks - 1))

        def made(before: Placement, rows: int = rows, width: int = width) -> DTensor:
            shape = (rows, width * (ranks if width < WIDTH else 1))
            local = [size // ranks if before == Shard(dim) else size for dim, size in enumerate(shape)]
            tensor = torch.ones(*local, dtype=dtype, device=device)
            return DTensor.from_local(tensor, mesh, (*outer, before), shape=shape)

        for kind, before, after in _CONVERSIONS:
            tensor = made(before)
            shard = tensor.numel() * dtype.itemsize // ranks * (ranks - 1)
            size = {"all_reduce": 2 * shard, "all_to_all": shard // ranks}.get(kind, shard)

            def compute(made=made, before=before) -> DTensor:
                left @ right
                return made(before)

            run = lambda tensor, p=(*outer, after): tensor.redistribute(placements=p)
            yield Probe("collective", kind, size, run, ranks, compute)


def waits(dtype: torch.dtype, device: torch.device, base: int) -> Iterator[Probe]:
    """Products, as many as there may be between two collectives of a step; all ranks have the same."""
    x, w = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((4 * base, 2 * base), (2 * base, 2 * base)))
    for count in WAITS:

        def run(count: int = count) -> None:
            for _ in range(count):
                x @ w

        yield Probe("wait", "products", (count, 4 * base, 2 * base, 2 * base), run)


def sends(dtype: torch.dtype, device: torch.device) -> Iterator[Probe]:
    """Sends from each rank to its neighbour and back, all pairs at once: half of it is a send."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    other = rank ^ 1
    for nbytes in MESSAGES[:-1]:
        there = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)

        def run(there: Tensor = there) -> None:
            for sender in (0, 1):
                if other < ranks:
                    (dist.send if rank % 2 == sender else dist.recv)(there, other)

        yield Probe("collective", "send", 2 * nbytes, run, 2)


_CONVERSIONS = (
    ("all_gather", Shard(0), Replicate()),
    ("reduce_scatter", Partial(), Shard(0)),
    ("all_reduce", Partial(), Replicate()),
    ("all_to_all", Shard(0), Shard(1)),
)

"""0-dim DTensors given to functions that read a number, or data, in C++: the global value, whatever the rank holds."""

import math
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from vescale_dtensor import DTensor, OperatorError, Partial, Replicate, Shard, comm_trace, distribute_tensor, from_local
from vescale_testkit import raises_on_all, run_ranks, slice_of

PLAIN = torch.arange(24.0).view(8, 3)

# name -> function of (a whole number n in 2..5, a plain [8, 3] tensor x)
INTEGERS = {
    "arange": lambda n, x: torch.arange(n),
    "arange step": lambda n, x: torch.arange(0, 40, n),
    "zeros": lambda n, x: torch.zeros(n),
    "zeros of several": lambda n, x: torch.ones(n, 2),
    "zeros of a list": lambda n, x: torch.zeros([n, 2]),
    "full size": lambda n, x: torch.full((n, 2), 1.0),
    "eye": lambda n, x: torch.eye(n),
    "eye of two": lambda n, x: torch.eye(2, n),
    "randperm": lambda n, x: torch.randperm(n, generator=torch.Generator().manual_seed(3)),
    "randint": lambda n, x: torch.randint(0, n, (16,), generator=torch.Generator().manual_seed(3)),
    "linspace": lambda n, x: torch.linspace(0, 1, n),
    "size": lambda n, x: torch.zeros(torch.Size([n, 2])),
    "repeat": lambda n, x: x.repeat(n, 1),
    "tile": lambda n, x: x.tile(n),
    "expand": lambda n, x: x[:1].expand(n, -1),
    "view": lambda n, x: x.flatten()[:20].repeat(3)[: n * 4].view(n, 4),
    "reshape": lambda n, x: x.repeat(5, 4)[:n].reshape(n, -1),
    "roll": lambda n, x: x.roll(n, 0),
    "narrow start": lambda n, x: x.narrow(0, n, 2),
    "narrow length": lambda n, x: x.narrow(0, 0, n),
    "topk": lambda n, x: x.t().topk(n).values,
    "split": lambda n, x: x.split(n)[0],
    "chunk": lambda n, x: x.chunk(n)[0],
    "index": lambda n, x: x[n],
    "slice": lambda n, x: x[1:n],
    "slice of two": lambda n, x: x[: n + 1, n - 2 :],
    "written index": lambda n, x: x.clone().index_fill_(0, torch.tensor([0]), 2.0)[n],
    "new_zeros": lambda n, x: x.new_zeros(n),
    "new_zeros of a tuple": lambda n, x: x.new_zeros((n, 2)),
    "new_ones of several": lambda n, x: x.new_ones(n, n),
    "new_full size": lambda n, x: x.new_full((n,), 2.0),
    "new_empty": lambda n, x: x.new_empty(n).fill_(1),
    "repeat_interleave": lambda n, x: x.repeat_interleave(n, 0),
    "tril": lambda n, x: x.tril(n - 3),
    "one_hot": lambda n, x: torch.nn.functional.one_hot(torch.arange(2), n),
    "pad": lambda n, x: torch.nn.functional.pad(x, (0, n)),
    "range": lambda n, x: torch.tensor(list(range(n))),
    "list": lambda n, x: torch.tensor([5, 6, 7, 8, 9, 10][n]),
    "int": lambda n, x: torch.tensor(int(n)),
    "index method": lambda n, x: torch.tensor(n.__index__()),
    "multinomial": lambda n, x: torch.multinomial(
        torch.ones(10), n, generator=torch.Generator().manual_seed(3)
    ),
    "dim": lambda n, x: x[None, None, None].sum(n),
    "tensor of a list": lambda n, x: torch.tensor([n, n + 1]),
    "tensor of nested lists": lambda n, x: torch.tensor([[n, 1], [2, n]]),
    "as_tensor of a list": lambda n, x: torch.as_tensor([n, 2]),
    "new_tensor of a list": lambda n, x: x.new_tensor([n, n]),
    "LongTensor of a list": lambda n, x: torch.LongTensor([n, 3]),
}
NUMBERS = {
    "full": lambda n, x: torch.full((3,), n),
    "full_like": lambda n, x: torch.full_like(x, n),
    "new_full": lambda n, x: x.new_full((3,), n),
    "scalar_tensor": lambda n, x: torch.scalar_tensor(n),
    "add alpha": lambda n, x: torch.add(x, x, alpha=n),
    "sub alpha": lambda n, x: x.sub(x.cos(), alpha=n),
    "addmm beta": lambda n, x: torch.addmm(x[:3], x[:3], x[:3], beta=n, alpha=n),
    "fill_": lambda n, x: x.clone().fill_(n),
    "masked_fill": lambda n, x: x.masked_fill(x > 3, n),
    "clamp": lambda n, x: x.clamp(max=n),
    "linspace end": lambda n, x: torch.linspace(0, n, 4),
    "normal_": lambda n, x: torch.zeros(4).normal_(n, 1.0, generator=torch.Generator().manual_seed(3)),
    "uniform_": lambda n, x: torch.zeros(4).uniform_(0, n, generator=torch.Generator().manual_seed(3)),
    "item in a write": lambda n, x: _written(x, n),
    "threshold": lambda n, x: torch.nn.functional.threshold(x, n, 0.0),
    "hardtanh": lambda n, x: torch.nn.functional.hardtanh(x, 0.0, n),
    "math": lambda n, x: torch.tensor(math.sqrt(n)),
    "float": lambda n, x: torch.tensor(float(n)),
    "format": lambda n, x: torch.tensor(float(f"{n:.4f}")),
    "comparison": lambda n, x: torch.tensor(bool(n > 2.5)),
    "numpy": lambda n, x: torch.as_tensor(numpy.array(n)),
    "numpy list": lambda n, x: torch.as_tensor(numpy.array([float(n), 1.0])),
    "tensor": lambda n, x: torch.tensor(n),
    "tensor to a dtype": lambda n, x: torch.tensor(n, dtype=torch.float64),
    "as_tensor to a dtype": lambda n, x: torch.as_tensor(n, dtype=torch.float64),
    "asarray": lambda n, x: torch.asarray(n, copy=True),
    "new_tensor": lambda n, x: x.new_tensor(n),
    "Tensor": lambda n, x: torch.Tensor(n),
    "tensor list": lambda n, x: torch.tensor([n, 2.0]),
    "extremes": lambda n, x: torch.tensor([n.max(), n.min()]),
    "as_tensor list": lambda n, x: torch.as_tensor([n, 2.0]),
    "tolist": lambda n, x: torch.tensor(n.tolist()),
    "dlpack": lambda n, x: torch.from_dlpack(n).clone(),
    "multiplied": lambda n, x: x * n,
    "where": lambda n, x: torch.where(x > 3, n, 0.0),
    "stacked": lambda n, x: torch.stack([n, n * 2]),
    "pow": lambda n, x: 2.0**n,
}


def _written(x, n):
    x = x.clone()
    x[0] = n
    x[1, 1] = n
    return x


def _integers(mesh):
    """Whole numbers of every kind: (name, DTensor, the value on one device)."""
    idx = torch.tensor([3, 4, 2, 5, 3])
    d = distribute_tensor(idx, mesh, [Shard(0)])
    counts = distribute_tensor(torch.tensor([1, 0, 1, 1, 1]), mesh, [Shard(0)])
    yield "partial sum", counts.sum(), 4
    yield "view of a shard on the first rank", d[0], 3
    yield "view of a shard on the last rank", d[4], 3
    yield "maximum", d.max(), 5
    yield "partial from local", from_local(torch.tensor(1 + dist.get_rank()), mesh, [Partial()]), 3
    yield "replicated", distribute_tensor(torch.tensor(4), mesh, [Replicate()]), 4
    yield "squeezed", counts.sum(0, keepdim=True).squeeze(), 4
    yield "copied", counts.sum().clone().detach(), 4
    yield "one element", d[2:3], 2


def _numbers(mesh):
    x = torch.tensor([0.25, 1.0, 0.5, 0.75, 0.0])
    d = distribute_tensor(x, mesh, [Shard(0)])
    w = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    yield "partial sum", d.sum(), 2.5
    yield "mean of a shard", d.mean(), 0.5
    yield "with gradient", (w * 1).sum(), 2.5
    yield "view of a shard", d[3], 0.75
    yield "sums added", d.sum() + d.sum() / 2, 3.75
    yield "converted", d.sum().to(torch.float64), 2.5
    yield "unsqueezed and back", d.sum()[None][0], 2.5
    with torch.no_grad():
        yield "without gradient", (w * 1).sum(), 2.5
    with torch.inference_mode():
        yield "in inference mode", distribute_tensor(x, mesh, [Shard(0)]).sum(), 2.5


def _whole(value):
    return value.full_tensor() if type(value) is DTensor else value


def _outcome(function, number):
    try:
        with torch.no_grad():
            found = _whole(function(number, PLAIN)).detach().clone()
    except (RuntimeError, TypeError, ValueError, IndexError, BufferError) as error:
        return type(error), str(error)[:200]
    return found


def _compare(functions, kind):
    warnings.simplefilter("ignore")  # torch's own, of copies; ours, of functions that gather one number
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong = []
    for name, function in functions.items():
        for title, number, value in (_integers if kind is int else _numbers)(mesh):
            shape = tuple(number.shape)
            plain = torch.full(shape, value, dtype=number.dtype)
            if number.requires_grad:
                plain.requires_grad_()
            expected, found = _outcome(function, plain), _outcome(function, number)
            if isinstance(expected, tuple):  # not for one device either
                continue
            if isinstance(found, tuple) or found.dtype != expected.dtype or not torch.equal(found, expected):
                wrong.append((name, title, str(found), str(expected)))
    return wrong


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_is_the_global_one_however_it_is_read(kind):
    assert run_ranks(2, _compare, INTEGERS if kind is int else NUMBERS, kind, timeout=200) == [[], []]


def _under_a_mode(functions, kind):
    with FlopCounterMode(display=False):
        return _compare(functions, kind)


@pytest.mark.parametrize("kind", [int, float])
def test_a_number_is_the_global_one_while_somebody_listens(kind):
    functions = INTEGERS if kind is int else NUMBERS
    chosen = {name: functions[name] for name in slice_of(functions, 4)}
    assert run_ranks(2, _under_a_mode, chosen, kind, timeout=400) == [[], []]


def _trained(mesh):
    """A loss that stays partial, read in every way between forward and backward; (gradients, collectives)."""
    x = torch.arange(6.0).view(3, 2) / 4
    w = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    scale = torch.nn.Parameter(distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]))
    seen = []
    with comm_trace() as trace:
        total = (w * w).sum()
        total.register_hook(lambda gradient: seen.append(torch.full((1,), gradient).item()))
        loss = total * scale + total / 2 + scale
        before = len(trace.events)
        loss.backward()
    scale.register_hook(lambda gradient: seen.append(torch.full((1,), gradient.detach()).item()))
    ((w * 2).sum() * scale).backward()
    read = torch.full((2,), scale.grad.detach())
    return w.grad.full_tensor(), scale.grad.full_tensor(), read, seen, before


def test_gradients_pass_through_numbers():
    x = (torch.arange(6.0).view(3, 2) / 4).requires_grad_()
    scale = torch.tensor(3.0, requires_grad=True)
    total = (x * x).sum()
    (total * scale + total / 2 + scale).backward()
    ((x * 2).sum() * scale).backward()
    for grad, of_scale, read, seen, before in run_ranks(2, lambda: _trained(init_device_mesh("cpu", (2,)))):
        assert torch.equal(grad, x.grad) and torch.equal(of_scale, scale.grad)
        assert read.tolist() == [scale.grad.item()] * 2
        assert seen == [3.5, (x * 2).sum().item()]
        assert before == 0, "a partial loss is read by nobody: nothing is reduced"


def test_what_would_write_to_a_number_in_place_is_refused():
    def squeezed():
        mesh = init_device_mesh("cpu", (2,))
        one = distribute_tensor(torch.ones(4, 1), mesh, [Shard(0)]).sum(0, keepdim=True)
        one.add_(1).mul_(2)
        assert one.item() == 10
        dist.distributed_c10d._get_default_group().broadcast(one, 0)

    raises_on_all(2, OperatorError, squeezed, match="full_tensor")

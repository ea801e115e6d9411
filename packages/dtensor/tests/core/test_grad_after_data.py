"""`p.data = value` of another layout while `p.grad` is held: the gradient is what it was, and what follows is one
device's."""

import pytest
import torch
from torch import nn

from vescale_dtensor import GradientError, Partial, Replicate, Shard, distribute_tensor
from vescale_testkit import mesh_of, run_ranks

R, P = Replicate(), Partial()
SHAPES = [(4, 6), (1, 4), (2, 1), (3, 5), (1,), ()]


def layouts(shape):
    return [(a, b) for a in (R, P, *map(Shard, range(len(shape)))) for b in (R, *map(Shard, range(len(shape))))]


def assigned(p, value):
    p.data = value


def set_(p, value):
    with torch.no_grad():
        p.set_(value)


def from_vector(p, value):
    nn.utils.vector_to_parameters(value.reshape(-1), [p])


ASSIGN = {"data": assigned, "set_": set_, "vector_to_parameters": from_vector}
STEPS = {
    "SGD": lambda p: torch.optim.SGD([p], lr=0.5, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW([p], lr=0.5),
    "no foreach": lambda p: torch.optim.Adam([p], lr=0.5, foreach=False),
}


def full(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def course(value, other, x, assign, optimizer):
    """What is seen of a parameter that is trained, given other data between a backward and the step, and trained on."""
    p = nn.Parameter(value)
    steps, seen = STEPS[optimizer](p), []
    for _ in range(2):
        (x * p).sum().backward()
        seen.append(full(p.grad))
        held = p.grad
        ASSIGN[assign](p, other)
        seen += [full(p.grad), full(held), full(p)]
        (x * p * p).sum().backward()
        seen.append(full(p.grad))
        steps.step()
        seen.append(full(p))
        steps.zero_grad()
    return seen


def program(assign, optimizer):
    mesh, wrong = mesh_of(2), []
    for shape in SHAPES:
        draws = [torch.Generator().manual_seed(n) for n in range(3)]
        x, value, other = (torch.randn(4, *shape, generator=draw, dtype=torch.float64) for draw in draws)
        value, other = value[0], other[0]
        want = course(value.clone(), other.clone(), x, assign, optimizer)
        for before, after in layouts(shape):
            ours = [distribute_tensor(t.clone(), mesh, [place]) for t, place in ((value, before), (other, after))]
            try:
                got = course(*ours, distribute_tensor(x, mesh, [Shard(0)]), assign, optimizer)
                torch.testing.assert_close(got, want)
            except Exception as error:
                wrong.append((shape, before, after, f"{type(error).__name__}: {error}"[:300]))
    return wrong


@pytest.mark.parametrize(
    "assign, optimizer", [*((a, "SGD") for a in ASSIGN), *(("data", o) for o in ("AdamW", "no foreach"))]
)
def test_the_gradient_stays_what_it_was(assign, optimizer):
    for wrong in run_ranks(2, program, assign, optimizer):
        assert not wrong


def kinds():
    """A gradient that was reduced, one with a graph, and data of another dtype."""
    mesh = mesh_of(2)
    place = {"R": R, "S(0)": Shard(0), "S(1)": Shard(1)}
    for a in place.values():
        for b in place.values():
            p = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [a]))
            p.grad = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [R])
            p.data = distribute_tensor(torch.ones(4, 6), mesh, [b])
            torch.testing.assert_close(p.grad.full_tensor(), torch.arange(24.0).view(4, 6))
            (p * p).sum().backward()
            torch.testing.assert_close(p.grad.full_tensor(), torch.arange(24.0).view(4, 6) + 2)

            p = nn.Parameter(distribute_tensor(torch.full((4, 6), 2.0), mesh, [a]))
            (p**3).sum().backward(create_graph=True)
            p.data = distribute_tensor(torch.ones(4, 6), mesh, [b])
            torch.testing.assert_close(p.grad.full_tensor().detach(), torch.full((4, 6), 12.0))

            p = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [a]))
            (p * 3).sum().backward()
            p.data = distribute_tensor(torch.ones(4, 6, dtype=torch.float64), mesh, [b])
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.full_tensor(), torch.full((4, 6), 3.0))

            p = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [a]))
            (p * 3).sum().backward()
            p.data = distribute_tensor(torch.ones(2, 3), mesh, [b])  # torch keeps the gradient, whatever its shape
            torch.testing.assert_close(p.grad.full_tensor(), torch.full((4, 6), 3.0))
    return True


def test_reduced_gradients_graphs_dtypes_and_shapes():
    assert all(run_ranks(2, kinds))


def with_a_loss_held(before, after):
    """Returns gradients, what a hook saw, and whether the graph of before is refused, which somebody holds."""
    mesh = mesh_of(2)
    value, x = torch.ones(4, 6), torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(distribute_tensor(value, mesh, [before]))
    batch, seen = distribute_tensor(x, mesh, [Shard(0)]), []
    p.register_hook(lambda gradient: seen.append(full(gradient)))
    held = (batch * p).sum()
    held.backward(retain_graph=True)
    p.data = distribute_tensor(value * 2, mesh, [after])
    (batch * p).sum().backward()
    seen.append(full(p.grad) / 2)
    told = len(seen)
    if before != after:
        with pytest.raises(GradientError, match="before the tensor was given data that lie otherwise"):
            held.backward()
    del seen[told:]  # of what is refused a hook has heard already

    q = nn.Parameter(distribute_tensor(value, mesh, [before]))
    y = q * 1
    y.data = distribute_tensor(value * 2, mesh, [after])
    (batch * y * y).sum().backward()
    seen.append(full(q.grad) / 4)
    for one in seen:
        torch.testing.assert_close(one, x.sum(0))
    return len(seen)


@pytest.mark.parametrize("before, after", layouts((4, 6)))
def test_who_holds_a_loss_keeps_no_shape_of_before(before, after):
    assert run_ranks(2, with_a_loss_held, before, after) == [4, 4]

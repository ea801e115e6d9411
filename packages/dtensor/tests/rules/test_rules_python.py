"""Python's protocols and metadata: values, iteration, copies, data, hooks; what communicates and what never does."""

# ruff: noqa: B023  every function that closes over a loop variable runs within that turn of the loop

import copy
import pickle
import warnings

import numpy
import pytest
import torch
import torch.nn as nn

from vescale_dtensor import DTensor, OperatorError, Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor.debug import comm_trace
from vescale_testkit import assert_ranks_agree, mesh_of, run_ranks
from vescale_testkit.oracle import spread

R, P, S = Replicate(), Partial(), Shard
LAYOUTS = [(R, R), (S(0), R), (S(0), S(1)), (S(1), S(1)), (P, S(0)), (R, P)]


def test_values_are_global_and_alike():
    def on_ranks():
        mesh = mesh_of(2, 2)
        found = []
        matrix = torch.arange(12.0).reshape(4, 3)
        for places in LAYOUTS:
            x = spread(matrix, mesh, places)
            assert x.tolist() == matrix.tolist()
            assert numpy.array_equal(x.numpy(), matrix.numpy())
            assert numpy.array_equal(numpy.asarray(x), matrix.numpy())
            assert 5.0 in x and 99.0 not in x
            assert [row.tolist() for row in x] == matrix.tolist()
            assert [row.tolist() for row in reversed(x)] == matrix.tolist()[::-1]
            assert len(x) == 4
            total = x.sum()
            found += [total.item(), float(total), int(total), bool(total), f"{total:.2f}", complex(total)]
            assert found[-6:] == [66.0, 66.0, 66, True, "66.00", 66 + 0j]
            assert [10, 20, 30][spread(torch.tensor(2), mesh, (R, R))] == 30
            assert torch.is_nonzero(total) and total.is_nonzero()
            a, b = x[0], x[1]
            assert (a < b).all() and not (a > b).any()
        return found

    assert_ranks_agree(run_ranks(4, on_ranks))


def test_values_of_replicated_tensors_do_not_communicate():
    def on_ranks():
        mesh = mesh_of(2, 2)
        x = distribute_tensor(torch.tensor(3.5), mesh, (R, R))
        y = distribute_tensor(torch.ones(4, 2), mesh, (S(0), R))
        with comm_trace() as trace:
            assert x.item() == 3.5 and float(x) == 3.5 and f"{x:.1f}" == "3.5" and x
            repr(x), str(y), repr(y), f"{y}"
            y.shape, y.size(), y.size(0), y.dim(), y.ndim, y.numel(), y.nelement(), len(y), y.dtype, y.device
            y.layout, y.is_leaf, y.requires_grad, y.grad_fn, y.is_floating_point(), y.is_complex(), y.stride()
            y.type(), y.element_size(), y.is_contiguous(), hash(y), dir(y), y.untyped_storage().data_ptr(), y.is_cuda
            torch.is_tensor(y), torch.is_floating_point(y), torch.numel(y), torch.is_same_size(y, y)
        assert len(trace) == 0

    run_ranks(4, on_ranks)


def test_metadata_is_global():
    def on_ranks():
        x = distribute_tensor(torch.zeros(5, 3), mesh_of(2, 2), (S(0), S(1))).requires_grad_()
        assert x.shape == (5, 3) and isinstance(x.shape, torch.Size)
        assert x.size() == (5, 3) and x.size(-1) == 3 and x.numel() == 15 and x.ndim == 2
        assert x.dtype == torch.float32 and x.device.type == "cpu" and x.layout is torch.strided
        assert x.mesh_layout.shape == (5, 3)
        assert x.is_leaf and x.requires_grad and isinstance(x, torch.Tensor)
        assert torch.Tensor.shape.__get__(x) == (5, 3)
        assert (x * 2).grad_fn is not None and not (x * 2).is_leaf
        assert x.detach().requires_grad is False and x.detach().placements == x.placements
        with pytest.raises(TypeError, match="0-d"):
            len(x.sum())
        with pytest.raises(TypeError):
            iter(x.sum())

    run_ranks(4, on_ranks)


def test_numpy_of_a_tensor_with_gradient_raises_as_on_one_device():
    def on_ranks():
        x = distribute_tensor(torch.zeros(4), mesh_of(2, 2), (S(0), R)).requires_grad_()
        with pytest.raises(RuntimeError, match="requires grad"):
            x.numpy()
        assert x.detach().numpy().shape == (4,)
        assert x.sum().item() == 0.0

    run_ranks(4, on_ranks)


def test_identity_and_membership_in_containers():
    def on_ranks():
        mesh = mesh_of(2, 2)
        x, y = (distribute_tensor(torch.zeros(4), mesh, (S(0), R)) for _ in range(2))
        assert {x: 1, y: 2}[x] == 1 and len({x, y, x}) == 2

    run_ranks(4, on_ranks)


def test_deepcopy_of_leaves_modules_and_optimizers():
    def on_ranks():
        mesh = mesh_of(2, 2)
        for places in LAYOUTS:
            x = spread(torch.randn(4, 3), mesh, places).requires_grad_()
            x.note = [1, 2]
            x.grad = torch.ones(4, 3)
            y = copy.deepcopy(x)
            assert type(y) is DTensor and y.placements == places and y.requires_grad and y.is_leaf
            assert y.note == [1, 2] and y.note is not x.note
            assert y.grad is not None and y.grad is not x.grad
            torch.testing.assert_close(y.grad.full_tensor(), torch.ones(4, 3))
            with torch.no_grad():
                y.add_(1)
            assert not torch.equal(x.detach().full_tensor(), y.detach().full_tensor())
            both = copy.deepcopy([x, x])
            assert both[0] is both[1]
        with pytest.raises(OperatorError, match="leaf"):
            copy.deepcopy(x * 2)
        layer = nn.Linear(3, 2)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, (S(0), R)))
        twin = copy.deepcopy(layer)
        assert type(twin.weight) is DTensor or isinstance(twin.weight, nn.Parameter)
        assert twin.weight.placements == (S(0), R) and twin.weight is not layer.weight

    run_ranks(4, on_ranks)


def test_a_dtensor_does_not_travel():
    def on_ranks():
        x = distribute_tensor(torch.zeros(4), mesh_of(2, 2), (S(0), R))
        with pytest.raises(OperatorError, match="full_tensor"):
            pickle.dumps(x)

    run_ranks(4, on_ranks)


def test_data():
    def on_ranks():
        mesh = mesh_of(2, 2)
        x = distribute_tensor(torch.zeros(4, 2), mesh, (S(0), R)).requires_grad_()
        assert x.data.placements == (S(0), R) and not x.data.requires_grad
        x.data.add_(1)
        assert x.detach().full_tensor().sum() == 8
        x.data = torch.full((4, 2), 3.0)
        assert x.placements == (S(0), R) and x.requires_grad and x.detach().full_tensor().sum() == 24
        x.data = distribute_tensor(torch.ones(3, 3), mesh, (R, S(1)))
        assert x.shape == (3, 3) and x.placements == (R, S(1))
        (x * 2).sum().backward()
        assert x.grad.shape == (3, 3)

    run_ranks(4, on_ranks)


def test_hooks_see_the_gradient_of_the_global_tensor():
    def on_ranks():
        mesh = mesh_of(2, 2)
        for places in ((S(0), S(1)), (R, S(0)), (R, R)):
            x = distribute_tensor(torch.ones(4, 2), mesh, places).requires_grad_()
            seen = []
            x.register_hook(lambda grad: seen.append(grad.full_tensor()) or grad * 2)
            x.register_post_accumulate_grad_hook(lambda t: seen.append(t is x))
            (x * 3).sum().backward()
            assert torch.equal(seen[0], torch.full((4, 2), 3.0)) and seen[1] is True
            assert torch.equal(x.grad.full_tensor(), torch.full((4, 2), 6.0))

    run_ranks(4, on_ranks)


def test_numbers_and_arrays_of_numpy():
    def on_ranks():
        with warnings.catch_warnings(action="error"):
            x = distribute_tensor(torch.ones(4), mesh_of(2, 2), (S(0), R))
            for made in (
                numpy.float32(2) * x,
                x * numpy.float64(2),
                numpy.float64(4) / (x + 1),
                1 + x * numpy.int64(1),
            ):
                assert type(made) is DTensor and made.full_tensor().tolist() == [2.0] * 4

    run_ranks(4, on_ranks)

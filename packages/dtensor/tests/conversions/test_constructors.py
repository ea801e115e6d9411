"""Constructors that take a tensor as data without asking its class: one device's answer, in every layout.

Which functions ask nobody is torch's to say: `torch.overrides.get_ignored_functions`. Those of them that make a
tensor of a tensor are called in every way; the ways that users write stand in a table as well.
"""

from __future__ import annotations

import warnings

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import get_ignored_functions

from vescale_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, VescaleError, ViewError
from vescale_testkit import run_ranks
from vescale_testkit.oracle import spread

ON_FULL = torch.arange(15.0).view(5, 3) + 1
PLACES = [Replicate(), Shard(1), Shard(0), RaggedShard((0,), (0, 5)), RaggedShard((0, 1), (7, 8)), Partial()]
ROWS, COLUMNS = torch.arange(0, 18, 3), torch.arange(3).repeat(5)
# name -> function of (the data, a plain tensor)
FORMS = {
    "tensor": lambda d, p: torch.tensor(d),
    "tensor, a dtype": lambda d, p: torch.tensor(d, dtype=torch.float64),
    "tensor, with gradient": lambda d, p: torch.tensor(data=d, requires_grad=True),
    "tensor to integers": lambda d, p: torch.tensor(d, dtype=torch.int64),
    "tensor on a device": lambda d, p: torch.tensor(d, device="cpu"),
    "as_tensor": lambda d, p: torch.as_tensor(d),
    "as_tensor, a dtype": lambda d, p: torch.as_tensor(d, dtype=torch.float64),
    "as_tensor, the same dtype": lambda d, p: torch.as_tensor(d, dtype=torch.float32, device="cpu"),
    "asarray": lambda d, p: torch.asarray(d),
    "asarray, copied": lambda d, p: torch.asarray(d, copy=True),
    "asarray, a dtype": lambda d, p: torch.asarray(d, dtype=torch.float64),
    "asarray, not copied": lambda d, p: torch.asarray(d, copy=False, dtype=torch.float64),
    "asarray, with gradient": lambda d, p: torch.asarray(d, requires_grad=True),
    "new_tensor": lambda d, p: p.new_tensor(d),
    "new_tensor of another dtype": lambda d, p: p.double().new_tensor(d),
    "new_tensor, with gradient": lambda d, p: p.new_tensor(d, requires_grad=True),
    "new_tensor of itself": lambda d, p: d.new_tensor(d),
    "new": lambda d, p: p.new(d),
    "new of another dtype": lambda d, p: p.double().new(d),
    "set_": lambda d, p: p.set_(d),
    "data": lambda d, p: [setattr(p, "data", d), p][1],
    "data of a parameter": lambda d, p: [setattr(q := nn.Parameter(p), "data", d.detach() * 2), q][1],
    "Tensor": lambda d, p: torch.Tensor(d),
    "Tensor.__new__": lambda d, p: Tensor.__new__(Tensor, d),
    "_make_subclass": lambda d, p: Tensor._make_subclass(Tensor, d),
    "Variable": lambda d, p: torch.autograd.Variable(d),
    "Variable with gradient": lambda d, p: torch.autograd.Variable(d.detach(), requires_grad=True),
    "Parameter": lambda d, p: nn.Parameter(d),
    "Parameter without gradient": lambda d, p: nn.Parameter(d, requires_grad=False),
    "Buffer": lambda d, p: nn.Buffer(d.detach()),
    "swap_tensors": lambda d, p: [torch.utils.swap_tensors(q := p.clone(), d.detach().clone()), q][1],
    "from_numpy": lambda d, p: torch.from_numpy(numpy.asarray(d.detach())).clone(),
    "a copy of numpy": lambda d, p: torch.tensor(numpy.array(d.detach())),
    "lists of rows": lambda d, p: torch.tensor([list(row) for row in d.detach()]),
    "a list of tensors": lambda d, p: torch.tensor([d, p]),
    "as_tensor of a list": lambda d, p: torch.as_tensor([d.detach().sum(), p.sum()]),
    "stack": lambda d, p: torch.stack([d, p]),
    "stack, plain first": lambda d, p: torch.stack([p, d, p]),
    "cat": lambda d, p: torch.cat([p, d]),
    "cat in parts": lambda d, p: torch.hstack((p, d[:, :2])),
    "nested": lambda d, p: torch.stack([torch.stack([d, p]), torch.stack([p, d])]),
    "block_diag": lambda d, p: torch.block_diag(d, p),
    "cartesian": lambda d, p: torch.cartesian_prod(d[0], p[0]),
    "pad_sequence": lambda d, p: nn.utils.rnn.pad_sequence([d, p[:2]]),
    "capsule": lambda d, p: torch.from_dlpack(torch.to_dlpack(d.detach())).clone(),
    "dlpack": lambda d, p: torch.from_dlpack(d.detach()).clone(),
    "sparse_coo": lambda d, p: torch.sparse_coo_tensor(torch.arange(5)[None], d.detach()).to_dense(),
    "sparse_csr": lambda d, p: torch.sparse_csr_tensor(ROWS, COLUMNS, d.detach().flatten()).to_dense(),
    "sparse, by name": lambda d, p: torch.sparse_coo_tensor(indices=ROWS[None, :5] // 3, values=d.detach()).to_dense(),
    "copy_": lambda d, p: p.copy_(d.detach()),
    "written": lambda d, p: p.index_copy_(0, torch.tensor([0]), d[1:2].detach()),
    "as_strided": lambda d, p: torch.as_strided(d, (2, 2), (3, 1)),
}
# Draw, read files, or are the machinery of `__torch_function__` itself.
_NOT_CALLED = """
    load save normal uniform kaiming_normal kaiming_uniform xavier_normal xavier_uniform orthogonal rand_like randn_like
    handle_torch_function _disabled_torch_dispatch_impl _disabled_torch_function_impl compile eye
""".split()


def enumerated() -> dict:
    """Every function that asks nobody and makes a tensor of one: by name, and how its data is given."""
    forms = {}
    for function in get_ignored_functions():
        name = getattr(function, "__name__", "")
        if not name or name in _NOT_CALLED or name.startswith("set_"):
            continue
        ways = {
            "alone": lambda d, p, f=function: f(d),
            "of a plain one": lambda d, p, f=function: f(p, d),
            "of a class": lambda d, p, f=function: f(Tensor, d),
            "as data": lambda d, p, f=function: f(data=d),
        }
        for way, call in ways.items():
            try:
                made = call(ON_FULL.clone(), torch.ones(5, 3))
            except Exception:
                continue
            if isinstance(made, Tensor):
                forms[f"{name} {way} ({len(forms)})"] = call
    return forms


def _outcome(call, data):
    """(the error's type or None, dtype, gradient and graph, values, whether a write to the result reaches the data)."""
    try:
        made = call(data, torch.ones(5, 3))
    except VescaleError:
        return "typed"
    except Exception as error:
        return type(error)
    with torch.no_grad():
        full = made.full_tensor() if type(made) is DTensor else made
        full = full.to_dense() if full.layout is not torch.strided else full
        values, facts = full.detach().clone(), (made.dtype, made.requires_grad, made.grad_fn is None, made.shape)
        written = None
        if type(made) is type(data) and made.layout is torch.strided and made.shape == (5, 3):
            try:
                made.mul_(2)
            except ViewError:  # a copy that one device does not need
                return facts, values, None
            written = data.full_tensor() if type(data) is DTensor else data
    return facts, values, None if written is None else written.detach().clone()


def _same(found, expected) -> bool:
    if not isinstance(expected, tuple):
        return found == expected
    if not isinstance(found, tuple):
        return False
    (facts, values, written), (my_facts, my_values, my_written) = expected, found
    alike = written is None or my_written is None or torch.equal(written, my_written)
    return facts == my_facts and torch.equal(values, my_values) and alike


def _with_gradient(data, gradient):
    data = data.requires_grad_(gradient != "none")
    return data * 1 if gradient == "graph" else data


def _wrong(forms, may_refuse=()) -> list:
    warnings.simplefilter("ignore")  # torch's of copying a tensor, of what is deprecated, and of gathers
    forms = enumerated() if forms is None else forms
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong, count = [], 0
    for name, call in forms.items():
        for gradient in ("none", "leaf", "graph"):
            expected = _outcome(call, _with_gradient(ON_FULL.clone(), gradient))
            for place in PLACES:
                data = _with_gradient(spread(ON_FULL.clone(), mesh, [place]), gradient)
                found, count = _outcome(call, data), count + 1
                if not _same(found, expected) and not (found == "typed" and name.split()[0] in may_refuse):
                    wrong.append((name, gradient, str(place), str(found), str(expected)))
    assert count >= 18 * len(forms) > 180
    return [" | ".join(case)[:400] for case in wrong]


def test_what_users_write():
    assert run_ranks(2, _wrong, FORMS, timeout=120) == [[], []]


def test_every_function_that_asks_nobody():
    # sparse forms of dense tensors have no layout on a mesh
    assert run_ranks(2, _wrong, None, ("_to_sparse", "_to_sparse_csc", "_to_sparse_csr"), timeout=120) == [[], []]


def test_another_class_over_a_shard_is_refused():
    class Other(Tensor):
        pass

    def work():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        data = spread(ON_FULL.clone(), mesh, [Shard(0)])
        refusals = []
        for call in (
            lambda: data.as_subclass(Tensor),
            lambda: data.as_subclass(Other),
            lambda: Other(data),
            lambda: Tensor._make_subclass(Other, data),
        ):
            try:
                call()
            except VescaleError as error:
                refusals.append("full_tensor()" in str(error))
        return refusals

    assert run_ranks(2, work) == [[True] * 4] * 2


def test_plain_data_and_modes_for_devices_are_as_before():
    with torch.device("meta"):
        assert torch.tensor(1.0).is_meta and torch.as_tensor([1.0]).is_meta
    assert torch.Tensor(2, 3).shape == (2, 3) and torch.Tensor([1, 2]).tolist() == [1, 2]
    plain = torch.ones(2)
    assert plain.data.data_ptr() == plain.data_ptr() and torch.as_tensor(plain) is plain
    assert torch.jit.script(_scripted)(plain).tolist() == [1, 2]


def _scripted(x: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0]) * x

"""Every name that torch.Tensor has, and what a DTensor answers: the table is the documentation.

    operator    in torch's own operator database: `test_operator_database` holds it against one device
    global      one device's answer, here compared on sharded, uneven, ragged, flat, partial and replicated tensors
    error       a typed error where the shard is not the whole tensor; one device's answer where it is
    local       of this rank's object, by intent: the engine's own handles, or torch's internals
    refused     of kinds of tensors that no DTensor is (sparse, quantized, named): raises, as for a dense plain tensor

A name that torch has and the table lacks fails the first test.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, VescaleError
from vescale_testkit import run_ranks
from vescale_testkit.oracle import spread

ON_FULL = torch.arange(15.0).view(5, 3) + 1
PLACES = {
    "replicated": Replicate(), "sharded": Shard(1), "uneven": Shard(0), "ragged": RaggedShard((0,), (0, 5)),
    "flat": RaggedShard((0, 1), (7, 8)), "partial": Partial(),
}  # fmt: skip

GLOBAL = {
    "__abs__": abs,
    "__add__": lambda t: t + 1,
    "__and__": lambda t: (t > 2) & (t < 9),
    "__array__": numpy.asarray,
    "__array_priority__": lambda t: t.__array_priority__,
    "__array_wrap__": lambda t: t + numpy.ones(3, numpy.float32),
    "__bool__": lambda t: bool(t[1, 1] > 2),
    "__complex__": lambda t: complex(t[1, 1]),
    "__contains__": lambda t: 3.0 in t,
    "__deepcopy__": copy.deepcopy,
    "__dlpack__": lambda t: torch.from_dlpack(t).clone(),
    "__dlpack_device__": lambda t: tuple(map(int, t.__dlpack_device__())),
    "__eq__": lambda t: t == 3,
    "__float__": lambda t: float(t[4, 2]),
    "__floordiv__": lambda t: t // 2,
    "__format__": lambda t: f"{t[1, 1]:.3f}",
    "__ge__": lambda t: t >= 3,
    "__gt__": lambda t: t > 3,
    "__hash__": lambda t: hash(t) == hash(t),
    "__le__": lambda t: t <= 3,
    "__iadd__": lambda t: t.__iadd__(1),
    "__idiv__": lambda t: t.__idiv__(2),
    "__ifloordiv__": lambda t: t.__ifloordiv__(2),
    "__imod__": lambda t: t.__imod__(2),
    "__imul__": lambda t: t.__imul__(2),
    "__ipow__": lambda t: t.__ipow__(2),
    "__isub__": lambda t: t.__isub__(1),
    "__itruediv__": lambda t: t.__itruediv__(2),
    "__iand__": lambda t: (t > 2).__iand__(t > 4),
    "__ior__": lambda t: (t > 2).__ior__(t > 4),
    "__ixor__": lambda t: (t > 2).__ixor__(t > 4),
    "__ilshift__": lambda t: t.long().__ilshift__(1),
    "__irshift__": lambda t: t.long().__irshift__(1),
    "__index__": lambda t: list(range(20))[t.long()[1, 1]],
    "__int__": lambda t: int(t[4, 2]),
    "__invert__": lambda t: ~(t > 3),
    "__iter__": lambda t: torch.stack(list(t)),
    "__len__": len,
    "__long__": lambda t: int(t[4, 1]),
    "__lshift__": lambda t: t.long() << 1,
    "__lt__": lambda t: t < 3,
    "__matmul__": lambda t: t @ t.t(),
    "__mod__": lambda t: t % 2,
    "__mul__": lambda t: t * 2,
    "__ne__": lambda t: t != 3,
    "__neg__": lambda t: -t,
    "__nonzero__": lambda t: t[1, 1].__nonzero__(),
    "__or__": lambda t: (t > 2) | (t > 4),
    "__pos__": lambda t: +t,
    "__pow__": lambda t: t**2,
    "__div__": lambda t: t.__div__(2),
    "__reversed__": lambda t: torch.stack(list(reversed(t))),
    "__rfloordiv__": lambda t: 7 // t,
    "__rlshift__": lambda t: t.long() << 1,
    "__rrshift__": lambda t: t.long() >> 1,
    "__rshift__": lambda t: t.long() >> 1,
    "__rtruediv__": lambda t: 7 / t,
    "__setitem__": lambda t: t.__setitem__(1, 2.0),
    "__sub__": lambda t: t - 1,
    "__truediv__": lambda t: t / 2,
    "__xor__": lambda t: (t > 2) ^ (t > 4),
    "__str__": lambda t: len(str(t)) > 0,
    "__repr__": lambda t: len(repr(t)) > 0,
    "__dir__": lambda t: "view" in dir(t),
    "apply_": lambda t: t.clone().apply_(lambda v: v + 1),
    "_base": lambda t: t._base is None,
    "_version": lambda t: t._version,
    "_conj": lambda t: t._conj(),
    "_is_all_true": lambda t: (t > 0)._is_all_true(),
    "_is_any_true": lambda t: (t > 14)._is_any_true(),
    "_is_view": lambda t: t._is_view(),
    "_is_zerotensor": lambda t: t._is_zerotensor(),
    "_has_symbolic_sizes_strides": lambda t: t._has_symbolic_sizes_strides,
    "copy_": lambda t: t.copy_(t + 1),
    "cpu": lambda t: t.cpu(),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "detach_": lambda t: t.detach_(),
    "device": lambda t: t.device,
    "dim": lambda t: t.dim(),
    "dim_order": lambda t: (t.dim_order(), t.t().dim_order(), t[:, 1].dim_order()),
    "dtype": lambda t: t.dtype,
    "element_size": lambda t: t.element_size(),
    "fill_diagonal_": lambda t: t.clone().fill_diagonal_(7),
    "get_device": lambda t: t.get_device(),
    "grad": lambda t: t.grad,
    "grad_fn": lambda t: t.grad_fn,
    "is_complex": lambda t: t.is_complex(),
    "is_conj": lambda t: t.is_conj(),
    "is_contiguous": lambda t: (
        t.is_contiguous(),
        t.t().is_contiguous(),
        t[:, None].is_contiguous(),
        t.t().contiguous().is_contiguous(),
    ),
    "is_cpu": lambda t: t.is_cpu,
    "is_cuda": lambda t: t.is_cuda,
    "is_floating_point": lambda t: t.is_floating_point(),
    "is_inference": lambda t: t.is_inference(),
    "is_leaf": lambda t: t.is_leaf,
    "is_meta": lambda t: t.is_meta,
    "is_mkldnn": lambda t: t.is_mkldnn,
    "is_neg": lambda t: t.is_neg(),
    "is_nested": lambda t: t.is_nested,
    "is_nonzero": lambda t: t[1, 1].is_nonzero(),
    "is_pinned": lambda t: t.is_pinned(),
    "is_quantized": lambda t: t.is_quantized,
    "is_same_size": lambda t: t.is_same_size(t),
    "is_set_to": lambda t: (t.is_set_to(t), t.is_set_to(t + 1)),
    "is_shared": lambda t: t.is_shared(),
    "has_names": lambda t: t.has_names() if hasattr(t, "has_names") else False,  # dims have names in torch 2.11
    "names": lambda t: getattr(t, "names", None),
    "is_signed": lambda t: t.is_signed(),
    "is_sparse": lambda t: t.is_sparse,
    "is_sparse_csr": lambda t: t.is_sparse_csr,
    "itemsize": lambda t: t.itemsize,
    "layout": lambda t: t.layout,
    "name": lambda t: t.name,
    "nbytes": lambda t: t.nbytes,
    "ndim": lambda t: t.ndim,
    "ndimension": lambda t: t.ndimension(),
    "nelement": lambda t: t.nelement(),
    "new": lambda t: tuple(t.new(2, 3).shape),
    "new_tensor": lambda t: t.new_tensor([1.0, 2.0]),
    "numel": lambda t: t.numel(),
    "numpy": lambda t: torch.as_tensor(t.numpy().copy()),
    "output_nr": lambda t: t.output_nr,
    "requires_grad": lambda t: t.requires_grad,
    "requires_grad_": lambda t: t.requires_grad_(False),
    "retain_grad": lambda t: t.clone().requires_grad_().retain_grad(),
    "retains_grad": lambda t: t.retains_grad,
    "shape": lambda t: t.shape,
    "size": lambda t: (t.size(), t.size(0), t.size(-1)),
    "stride": lambda t: (
        t.stride(),
        t.stride(0),
        t.t().stride(),
        t[:, None].stride(),
        t.view(5, 3, 1).stride(),
        t.t().contiguous().stride(),
    ),
    "storage_offset": lambda t: (t.storage_offset(), t.t().storage_offset()),
    "to_sparse_coo": lambda t: t.to_sparse_coo().to_dense(),
    "tolist": lambda t: t.tolist(),
    "type": lambda t: (t.type(), t.type(torch.float64).dtype),
    "type_as": lambda t: t.type_as(t.double()),
    "backward": lambda t: t.clone().requires_grad_().sum().backward(),
    "grad_dtype": lambda t: t.grad_dtype,
    "is_distributed": lambda t: t.is_distributed(),
    "_conj_physical": lambda t: t._conj_physical(),
    "_neg_view": lambda t: t._neg_view() + 0,
    "_lazy_clone": lambda t: t._lazy_clone(),
    "resize": lambda t: t.resize(3, 5),
    "resize_as": lambda t: t.resize_as(torch.ones(3, 5)),
    "unsafe_split_with_sizes": lambda t: t.unsafe_split_with_sizes([2, 3])[0],
    "volatile": lambda t: t.volatile,
    "map_": lambda t: t.clone().map_(t, lambda a, b: a + b),
    "_addmm_activation": lambda t: t._addmm_activation(t[:, :2], torch.ones(2, 3)),
    "random_": lambda t: tuple(t.clone().random_().shape),
    "register_hook": lambda t: t.clone().requires_grad_().register_hook(print) is not None,
    "__sizeof__": lambda t: t.__sizeof__() > 0,
}
ERRORS = {
    "data_ptr": lambda t: t.data_ptr() > 0,
    "const_data_ptr": lambda t: t.const_data_ptr() > 0,
    "__reduce_ex__": pickle.dumps,
    "__reduce__": lambda t: t.__reduce__(),
    "_reduce_ex_internal": lambda t: t._reduce_ex_internal(2),
    "untyped_storage": lambda t: bytes(t.untyped_storage()),
    "storage": lambda t: t.storage()[0],
    "_typed_storage": lambda t: t._typed_storage()[0],
    "set_": lambda t: t.set_(torch.ones(15).untyped_storage(), 0, (5, 3), (3, 1)),
}
# What these do, they do to this rank's object or shard; each says why.
LOCAL = {
    "the object itself, or Python's protocol of classes": """
        __annotations__ __class__ __delattr__ __dict__ __doc__ __getattribute__ __getstate__ __init__ __init_subclass__
        __module__ __new__ __setattr__ __setstate__ __subclasshook__ __torch_dispatch__ __torch_function__ __weakref__
        __slotnames__ __firstlineno__ __static_attributes__ __annotate__ __annotate_func__ __annotations_cache__
        _make_subclass _make_wrapper_subclass _dtensor__new__ as_subclass
        _clear_non_serializable_cached_data""",
    "handles of C++, for who keeps objects apart": """
        _cdata _use_count _fix_weakref __dlpack_c_exchange_api__ record_stream share_memory_ storage_type""",
    "autograd's own bookkeeping": """
        _backward_hooks _post_accumulate_grad_hooks _grad _grad_fn _has_grad_dtype_override _view_func
        _view_func_unsafe _rev_view_func_unsafe register_post_accumulate_grad_hook _python_dispatch""",
    "moves or allocates by device: the tests of devices hold them": """
        cuda xpu ipu mtia pin_memory module_load _philox_normal_ _philox_randint_ _philox_uniform_""",
    "flags of devices": "is_ipu is_maia is_mps is_mtia is_vulkan is_xla is_xpu",
}
REFUSED = """
    __cuda_array_interface__ __delitem__ _autocast_to_full_precision _autocast_to_reduced_precision _coalesced_
    _dimI _dimV _indices _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides _nnz
    _sparse_mask_projection _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _values
    ccol_indices coalesce col_indices crow_indices dense_dim dequantize index indices int_repr is_coalesced map2_
    q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point qscheme reinforce
    resize_as_sparse_ row_indices smm sparse_dim slice_inverse sparse_mask sparse_resize_ sparse_resize_and_clear_
    rename rename_ refine_names align_as align_to _update_names
    sspaddmm symeig to_dense to_mkldnn to_padded_tensor to_sparse_bsc to_sparse_bsr to_sparse_csc to_sparse_csr
    values
""".split()


def _operators() -> set[str]:
    from torch.testing._internal.common_methods_invocations import op_db

    names: set[str] = set()
    for op in op_db:
        names |= {name.split(".")[-1] for name in (op.name, *[alias.name for alias in op.aliases])}
        for variant in (op.method_variant, op.inplace_variant, op.operator_variant, op.inplace_operator_variant):
            names.add(getattr(variant, "__name__", ""))
    return names


def test_every_name_of_a_tensor_is_in_the_table():
    operators = _operators()
    known = {*GLOBAL, *ERRORS, *REFUSED, *(name for names in LOCAL.values() for name in names.split())}
    missing = {
        name
        for name in dir(torch.Tensor)
        if name not in known and name not in operators and (name.endswith("__") or name.rstrip("_") not in operators)
    }
    assert not missing, "say in the table what a DTensor answers"


def _plain(value):
    if type(value) is DTensor:
        return value.full_tensor().detach()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _same(found, expected):
    found, expected = _plain(found), _plain(expected)
    if isinstance(expected, (torch.Tensor, numpy.ndarray)):
        found, expected = torch.as_tensor(found), torch.as_tensor(expected)
        return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected)
    return found == expected


class Late:
    """The owner of a tensor whose values are on their way: they are there once somebody waits."""

    hooks = None

    def __init__(self, tensor):
        self.tensor, self.full_layout, self.values = tensor, tensor.mesh_layout, tensor.to_local().clone()
        tensor.to_local().data.fill_(float("nan"))
        tensor._owner = self
        del tensor._layout

    def wait(self):
        self.tensor._layout = self.full_layout
        del self.tensor._owner
        self.tensor.to_local().data.copy_(self.values)

    def end_pass(self):
        """No backward has raised."""

    def replace(self, tensor, value):
        self.wait()
        tensor.data = value


def _answers(calls, refused, late=False):
    warnings.simplefilter("ignore")  # of functions that gather, and torch's of what is deprecated
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong = []
    for name, call in calls.items():
        for place, placement in PLACES.items():
            plain = ON_FULL.clone()
            tensor = spread(plain.clone(), mesh, [placement])
            if late:
                Late(tensor)
            error = expected = None
            try:
                expected = call(plain)
            except Exception as raised:
                error = type(raised)
            try:
                found = call(tensor)
            except VescaleError as raised:
                if (
                    not refused
                    or (place == "replicated" and name != "set_")
                    or not any(remedy in str(raised) for remedy in ("full_tensor", "x.data = y"))
                ):
                    wrong.append((name, place, repr(raised)[:300]))
                continue
            except Exception as raised:
                if type(raised) is not error:
                    wrong.append((name, place, repr(raised)[:300]))
                continue
            if refused and place != "replicated":
                wrong.append((name, place, "is not refused"))
            elif not refused and (error is not None or not _same(found, expected) or not _same(tensor, plain)):
                wrong.append((name, place, str(_plain(found)), str(expected), error))
    return wrong


def test_global_answers_are_those_of_one_device():
    assert run_ranks(2, _answers, GLOBAL, False, timeout=120) == [[], []]


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
def test_what_is_on_its_way_is_waited_for_whatever_is_asked(grad_mode):
    def answers(calls, refused):
        with grad_mode():
            return _answers(calls, refused, late=True)

    assert run_ranks(2, answers, GLOBAL, False, timeout=120) == [[], []]
    assert run_ranks(2, answers, {n: c for n, c in ERRORS.items() if "educe" not in n}, True) == [[], []]


def test_bytes_and_addresses_of_a_part_are_refused():
    assert run_ranks(2, _answers, {n: c for n, c in ERRORS.items() if "educe" not in n}, True) == [[], []]


def test_what_a_storage_answers():
    def answered():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for placement in PLACES.values():
            tensor, other = (spread(ON_FULL.clone(), mesh, [placement]) for _ in range(2))
            storage = tensor.untyped_storage()
            assert storage.nbytes() == storage.size() == len(storage) == 60 and storage.device == torch.device("cpu")
            assert (
                storage.data_ptr()
                == tensor.detach().untyped_storage().data_ptr()
                == tensor.detach().storage().data_ptr()
            )
            assert storage.data_ptr() != other.untyped_storage().data_ptr() and len(tensor.storage()) == 15
            for form in (pickle.dumps, lambda t: torch.save(t, io.BytesIO())):
                with pytest.raises(VescaleError, match="full_tensor"):
                    form(tensor)
        return True

    warnings.simplefilter("ignore")
    assert run_ranks(2, answered) == [True, True]


# How those of REFUSED are called that want operands; all others are called without.
GIVEN = {
    "__delitem__": lambda t: t.__delitem__(0),
    "_nested_tensor_size": lambda t: t._nested_tensor_size(),
    "_sparse_mask_projection": lambda t: t._sparse_mask_projection(torch.eye(5, 3).to_sparse()),
    "_to_sparse": lambda t: t._to_sparse(2).to_dense(),
    "_to_sparse_bsc": lambda t: t._to_sparse_bsc((5, 3)).to_dense(),
    "_to_sparse_bsr": lambda t: t._to_sparse_bsr((5, 3)).to_dense(),
    "_to_sparse_csc": lambda t: t._to_sparse_csc().to_dense(),
    "_to_sparse_csr": lambda t: t._to_sparse_csr().to_dense(),
    "_to_dense": lambda t: t._to_dense(),
    "_autocast_to_full_precision": lambda t: t._autocast_to_full_precision(False, False),
    "_autocast_to_reduced_precision": lambda t: t._autocast_to_reduced_precision(
        False, True, torch.float16, torch.bfloat16
    ),
    "_coalesced_": lambda t: t._coalesced_(True),
    "index": lambda t: t.index(0),
    "map2_": lambda t: t.clone().map2_(t, t, lambda a, b, c: a + b * c),
    "reinforce": lambda t: t.reinforce(1.0),
    "resize_as_sparse_": lambda t: t.clone().resize_as_sparse_(torch.eye(5, 3).to_sparse()),
    "smm": lambda t: t.smm(torch.ones(3, 2)),
    "slice_inverse": lambda t: t.slice_inverse(torch.ones(9, 3), 0, 2, 7, 1),
    "sparse_mask": lambda t: t.sparse_mask(torch.eye(5, 3).to_sparse()).to_dense(),
    "sparse_resize_": lambda t: t.clone().sparse_resize_((5, 3), 2, 0),
    "sparse_resize_and_clear_": lambda t: t.clone().sparse_resize_and_clear_((5, 3), 2, 0),
    "sspaddmm": lambda t: t.sspaddmm(t, t.t()),
    "to_mkldnn": lambda t: t.to_mkldnn().to_dense(),
    "to_padded_tensor": lambda t: t.to_padded_tensor(0.0),
    "to_sparse_bsc": lambda t: t.to_sparse_bsc((5, 3)).to_dense(),
    "to_sparse_bsr": lambda t: t.to_sparse_bsr((5, 3)).to_dense(),
    "to_sparse_csc": lambda t: t.to_sparse_csc().to_dense(),
    "to_sparse_csr": lambda t: t.to_sparse_csr().to_dense(),
}


def _asked(name):
    """The attribute, or what its call gives."""

    def ask(tensor):
        value = getattr(tensor, name)
        return value() if callable(value) else value

    return GIVEN.get(name, ask)


def _refused(names):
    """Where a dense plain tensor raises, so does a DTensor; else it gives the same, or a typed error."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong = []
    for name in names:
        for place, placement in PLACES.items():
            tensor, plain = spread(ON_FULL.clone(), mesh, [placement]), ON_FULL.clone()
            outcomes = []
            for one in (plain, tensor):
                try:
                    outcomes.append(_asked(name)(one))
                except Exception as raised:
                    outcomes.append(raised)
            expected, found = outcomes
            if isinstance(found, VescaleError):
                continue
            if isinstance(expected, Exception) or isinstance(found, Exception):
                if not (isinstance(expected, Exception) and isinstance(found, Exception)):
                    wrong.append((name, place, repr(found)[:200], repr(expected)[:200]))
            elif not _same(found, expected) or not _same(tensor, plain):
                wrong.append((name, place, repr(found)[:200], repr(expected)[:200]))
    return wrong


def test_other_kinds_of_tensors_are_refused_as_on_one_device():
    assert run_ranks(2, _refused, REFUSED, timeout=120) == [[], []]


# Of LOCAL: what can be asked for without operands, and is then the object's own; and what else is called, with what it
# gives of a plain tensor and of a DTensor alike.
_CALLED = {
    "__getattribute__": lambda t: t.__getattribute__("ndim"),
    "__setattr__": lambda t: (t.__setattr__("mine", 3), t.mine),
    "__delattr__": lambda t: (t.__setattr__("mine", 3), t.__delattr__("mine"), hasattr(t, "mine")),
    "__class__": lambda t: isinstance(t, torch.Tensor),
    "__getstate__": lambda t: None,
    "__subclasshook__": lambda t: t.__subclasshook__(int) is NotImplemented,
    "as_subclass": lambda t: None,  # `test_constructors` holds it
    "share_memory_": lambda t: t.clone().share_memory_(),
    "register_post_accumulate_grad_hook": lambda t: (
        t.detach().clone().requires_grad_().register_post_accumulate_grad_hook(print) is not None
    ),
    "storage_type": lambda t: t.storage_type() is not None,
    "_use_count": lambda t: t._use_count() > 0,
    "module_load": lambda t: t.module_load(t + 1),
    "pin_memory": lambda t: t.pin_memory() if torch.cuda.is_available() else None,
    "cuda": lambda t: t.cuda() if torch.cuda.is_available() else None,
    "_clear_non_serializable_cached_data": lambda t: t._clear_non_serializable_cached_data(),
}
_VALUES = (
    "_backward_hooks _post_accumulate_grad_hooks _grad _grad_fn is_ipu is_maia is_mps is_mtia is_vulkan is_xla is_xpu"
).split()


def test_what_is_local_by_intent_answers():
    names = [name for group in LOCAL.values() for name in group.split()]
    calls = _CALLED | {name: lambda t, name=name: getattr(t, name) for name in _VALUES}
    late = ("__slotnames__", "__annotations__")  # by who asks; Python 3.14 has the second of some classes only
    others = {n: lambda t, n=n: hasattr(t, n) for n in names if n not in calls and n not in late}
    assert set(calls) <= set(names)
    assert run_ranks(2, _answers, calls | others, False, timeout=120) == [[], []]

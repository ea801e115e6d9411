"""Functions that read or set what is the same for a shard and its global tensor, and those that need neither."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._communication.events import function_name
from ..._conversions.convert import describe
from ..._errors import OperatorError
from ..._tensor.backward import backward, grad
from ..._tensor.gradient import accumulate_hook, register_hook
from ..._tensor.nodes import node_of
from ..._tensor.tensor import DTensor, local_only
from ..._torch_private import _has_compatible_shallow_copy_type
from ..registry import Call, Decision, handler, rule
from ..traits import VIEWS, Trait

_PROPERTIES = """dtype device requires_grad is_leaf is_cpu is_cuda is_meta is_mps is_xpu is_sparse is_sparse_csr
    is_quantized is_nested is_mkldnn is_vulkan is_ipu is_xla is_mtia is_maia output_nr itemsize names name _version
    retains_grad _backward_hooks _post_accumulate_grad_hooks volatile layout _python_dispatch is_ort""".split()
_METHODS = """is_floating_point is_signed is_inference is_conj is_neg element_size get_device is_pinned is_shared
    has_names _is_view _is_zerotensor retain_grad requires_grad_ __hash__ _has_symbolic_sizes_strides storage_type
    is_coalesced is_sparse is_nonzero_""".split()


def _local_functions():
    for name in _PROPERTIES:
        descriptor = getattr(Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, accessor):
                yield getattr(descriptor, accessor)
    for name in _METHODS:
        for owner in (Tensor, torch):
            function = getattr(owner, name, None)
            if callable(function):
                yield function


@handler(list(_local_functions()), _has_compatible_shallow_copy_type)
def local(function, args, kwargs):
    """Answered by the shard."""
    with local_only():
        out = function(*args, **kwargs)
    return out


handler(Tensor.backward, torch.autograd.backward)(backward)
handler(torch.autograd.grad)(grad)
handler(Tensor.register_hook)(register_hook)
handler(Tensor.grad_fn.__get__)(node_of)
handler(Tensor.register_post_accumulate_grad_hook)(accumulate_hook)


_NAMING = [
    getattr(Tensor, name)
    for name in "rename rename_ refine_names align_to align_as _update_names".split()
    if hasattr(Tensor, name)
]
if hasattr(Tensor, "names"):  # dims with names: an experiment that torch 2.11 has still
    _NAMING.append(Tensor.names.__set__)
    handler(Tensor.names.__get__)(lambda function, args, kwargs: (None,) * len(args[0].shape))


@handler(_NAMING)
def naming(function, args, kwargs):
    raise OperatorError(
        function_name(function),
        "the dims of a DTensor have no names: torch takes the names of dims away, and no rule asks for them",
        [describe("tensor", tensor, tensor._layout) for tensor in args if type(tensor) is DTensor],
        [("dims by number", "as torch from 2.13 on wants them"), ("tensor.full_tensor()", "the whole tensor, plain")],
    )


@handler(torch.is_same_size, traits=Trait.METADATA)
def is_same_size(function, args, kwargs):
    return tuple(args[0].shape) == tuple(args[1].shape)


@rule(Tensor.detach, torch.detach, traits=Trait.ELEMENTWISE | VIEWS)
def detach(call: Call) -> Decision:
    return Decision(out=call.operands[0].layout)


@rule(Tensor.detach_, torch.detach_, traits=Trait.ELEMENTWISE | VIEWS)
def detach_(call: Call) -> Decision:
    return Decision(out=call.operands[0].layout)


@handler(Tensor.numel, Tensor.nelement, torch.numel, traits=Trait.METADATA)
def numel(function, args, kwargs):
    return args[0].numel()


@handler(Tensor.dim, Tensor.ndimension, Tensor.ndim.__get__, traits=Trait.METADATA)
def dim(function, args, kwargs):
    return args[0]._layout.ndim


@handler(Tensor.size, traits=Trait.METADATA)
def size(function, args, kwargs):
    return args[0].size(*args[1:], **kwargs)


@handler(Tensor.shape.__get__, traits=Trait.METADATA)
def shape(function, args, kwargs):
    return args[0].shape


@handler(Tensor.__len__, traits=Trait.METADATA)
def length(function, args, kwargs):
    return len(args[0])


@handler(Tensor.__repr__, Tensor.__str__)
def representation(function, args, kwargs):
    return DTensor.__repr__(args[0])


@handler(Tensor.__format__)
def formatted(function, args, kwargs):
    return DTensor.__format__(*args)


@handler(Tensor.grad.__get__)
def grad_get(function, args, kwargs):
    return DTensor.grad.__get__(args[0])


@handler(Tensor.grad.__set__)
def grad_set(function, args, kwargs):
    return DTensor.grad.__set__(*args)


@handler(Tensor.grad.__delete__)
def grad_delete(function, args, kwargs):
    return DTensor.grad.__delete__(*args)


@handler(Tensor.__dir__)
def directory(function, args, kwargs):
    return sorted(set(dir(DTensor)) | set(args[0].__dict__))

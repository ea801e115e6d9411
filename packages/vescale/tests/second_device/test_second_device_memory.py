"""What backward keeps on an accelerator, by bytes, and what a norm takes: on the second device."""

import pytest
import torch
import torch.nn.functional as F

import vescale
from vescale_dtensor import Replicate, Shard, distribute_tensor, from_local
from vescale_dtensor.testing import mesh_of, run_ranks, warm_up

warm_up("vescale", "vescale_dtensor._second")


def kept_by_backward(function, x):
    """The result, the gradient of x, and the bytes that backward keeps besides x."""
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            kept[tensor.untyped_storage().data_ptr()] = tensor, tensor.nbytes  # alive, so that no address comes again
        return tensor

    x = x.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(x)
    (gradient,) = torch.autograd.grad(out, x, torch.full_like(out, 0.7))
    return out.detach(), gradient, sum(size for _, size in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_stands_for_cudas_own_dropout_keeps_a_byte_per_element(dtype):
    def on_rank():
        from vescale_rng._draws.dropout import _fused

        p, x = 0.3, torch.linspace(-3, 3, 120).to(dtype)
        layout = distribute_tensor(x, mesh_of(1), [Replicate()]).mesh_layout
        torch.manual_seed(4)
        out, gradient, kept = kept_by_backward(lambda x: _fused(x, layout, p), x)
        torch.manual_seed(4)
        mask = torch.native_dropout(torch.ones_like(x), p, True)[1]
        return x, out, gradient, kept, mask

    ((x, out, gradient, kept, mask),) = run_ranks(1, on_rank)
    assert kept == x.numel() and 0 < mask.sum() < mask.numel()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    noise = mask.to(wide) * torch.tensor(0.7, dtype=wide).to(torch.float64).reciprocal().to(wide)
    assert torch.equal(out, (x.to(wide) * noise).to(dtype))
    assert torch.equal(gradient, (torch.full_like(x, 0.7).to(wide) * noise).to(dtype))


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_an_accelerator_keeps_a_byte_per_element_and_is_a_cpus(inplace):
    def on_rank(device, dtype):
        local = torch.linspace(-3, 3, 60).view(6, 10).to(dtype).to(device)

        def drop(local):
            given = from_local(local * 1, mesh_of(2), [Shard(0)])
            return F.dropout(given, 0.3, True, inplace).to_local()

        torch.manual_seed(4)
        with vescale.use_rng_stream("philox"):
            out, gradient, kept = kept_by_backward(drop, local)
        return out.cpu(), gradient.cpu(), kept

    for dtype in (torch.float32, torch.bfloat16):
        wanted, found = (run_ranks(2, on_rank, device, dtype, device=device) for device in ("cpu", "second"))
        for (out, gradient, _), (other, its, kept) in zip(wanted, found):
            assert torch.equal(out, other) and torch.equal(gradient, its) and (out == 0).any()
            assert kept == out.numel()

"""Packed sequences: heads stay where they are. There is no kernel on a CPU: stand-ins are registered for it."""

import pytest
import torch

from vescale_dtensor import Replicate, Shard, comm_trace, distribute_tensor, register_function
from vescale_testkit import mesh_of, run_ranks, warm_up

warm_up("torch.nn.attention.varlen")
TOKENS, WIDTH, BEGIN = 12, 8, (0, 5, 9, 12)


def attended(q, k, v, begin):
    """By the formula, sequence by sequence: [T, H, D], and the logarithms of sums [H, T]."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    outs, sums = [], []
    for start, stop in zip(begin[:-1].tolist(), begin[1:].tolist()):
        scores = torch.einsum("thd,shd->hts", q[start:stop], k[start:stop]) * q.shape[-1] ** -0.5
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), v[start:stop]))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def gradients(grad, q, k, v, begin):
    """Of q, k and v, written out: a kernel runs below autograd."""
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    keys, values = (one.repeat_interleave(groups, 1) for one in (k, v))
    found = []
    for start, stop in zip(begin[:-1].tolist(), begin[1:].tolist()):
        one, other, third, last = (each[start:stop] for each in (q, keys, values, grad))
        weights = (torch.einsum("thd,shd->hts", one, other) * scale).softmax(-1)
        moved = torch.einsum("thd,shd->hts", last, third)
        scores = weights * (moved - (moved * weights).sum(-1, keepdim=True)) * scale
        dq, dk = torch.einsum("hts,shd->thd", scores, other), torch.einsum("hts,thd->shd", scores, one)
        found.append((dq, dk, torch.einsum("hts,thd->shd", weights, last)))
    dq, dk, dv = (torch.cat(parts) for parts in zip(*found))
    return dq, *(one.unflatten(1, (-1, groups)).sum(2) for one in (dk, dv))


def with_kernels():
    import torch.nn.attention.varlen

    if getattr(torch, "_has_stand_ins", False):
        return torch.nn.attention.varlen.varlen_attn

    @torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
    def forward(query, key, value, cu_seq_q, *args):
        out, sums = attended(query, key, value, cu_seq_q)
        return out, sums.float(), torch.zeros(2, dtype=torch.uint64)

    @torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
    def backward(grad, query, key, value, out, lse, cu_seq_q, *args):
        return gradients(grad, query, key, value, cu_seq_q)

    torch._has_stand_ins = True
    return torch.nn.attention.varlen.varlen_attn


def operands(heads, shared):
    torch.manual_seed(0)
    shapes = [(TOKENS, heads, WIDTH), (TOKENS, shared, WIDTH), (TOKENS, shared, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def compared(heads, shared, layouts, attend):
    """What is sent forward; values and gradients equal one device's."""
    whole = operands(heads, shared)
    place = lambda one, layout: distribute_tensor(one, mesh_of(2, 2), layout).requires_grad_()
    leaves = [place(one, layout) for one, layout in zip(whole, layouts)]
    plain = [one.clone().requires_grad_() for one in whole]
    with comm_trace() as trace:
        out = attend(*leaves)
    wanted = attend(*plain)
    torch.testing.assert_close(out.full_tensor(), wanted, rtol=1e-9, atol=1e-9)
    for one in (out, wanted):
        (one * torch.linspace(-1, 1, WIDTH)).square().sum().backward()
    for leaf, other in zip(leaves, plain):
        torch.testing.assert_close(leaf.grad.full_tensor(), other.grad, rtol=1e-9, atol=1e-9)
    return trace.count()


CUT = [Replicate(), Shard(1)]
CASES = {
    "heads": (4, 4, [CUT] * 3, 0),
    "grouped": (4, 2, [CUT] * 3, 0),
    "one shared": (4, 1, [CUT, [Replicate()] * 2, [Replicate()] * 2], 0),
    "groups cut through": (6, 3, [[Shard(1), Shard(1)], [Replicate()] * 2, [Replicate()] * 2], 0),
    "fewer heads than ranks": (3, 3, [[Shard(1), Shard(1)]] * 3, 0),
    "tokens": (4, 4, [[Replicate(), Shard(0)]] * 3, 3),
    "whole": (4, 4, [[Replicate()] * 2] * 3, 0),
}


def by_torch(name):
    varlen_attn = with_kernels()
    begin = torch.tensor(BEGIN, dtype=torch.int32)
    heads, shared, layouts, _ = CASES[name]
    attend = lambda q, k, v: varlen_attn(q, k, v, begin, begin, 5, 5, enable_gqa=shared < heads)
    return compared(heads, shared, layouts, attend)


@pytest.mark.parametrize("name", CASES)
def test_packed_attention_of_torch(name):
    assert run_ranks(4, by_torch, name, timeout=240) == [CASES[name][3]] * 4


def sums():
    from torch.nn.attention.varlen import AuxRequest

    varlen_attn, begin = with_kernels(), torch.tensor(BEGIN, dtype=torch.int32)
    given = {"return_aux": AuxRequest(lse=True)}
    q, k, v = operands(4, 4)
    _, wanted = varlen_attn(q, k, v, begin, begin, 5, 5, **given)
    out, lse = varlen_attn(
        *[distribute_tensor(one, mesh_of(2, 2), CUT) for one in (q, k, v)], begin, begin, 5, 5, **given
    )
    torch.testing.assert_close(lse.full_tensor(), wanted)
    return out.placements, lse.placements


def test_sums_lie_as_the_heads_do():
    assert run_ranks(4, sums, timeout=240) == [((Replicate(), Shard(1)), (Replicate(), Shard(0)))] * 4


def flash_attn(batched):
    """A Function that is taken for flash-attn's: its name, its module, its arguments."""

    class FlashAttnVarlenFunc(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, cu_seqlens_q, dropout_p, alibi_slopes, return_softmax):
            ctx.save_for_backward(q, k, v, cu_seqlens_q)
            return attended(q, k, v, cu_seqlens_q)[0]

        @staticmethod
        def backward(ctx, grad):
            *leaves, begin = ctx.saved_tensors
            leaves = [one.detach().requires_grad_() for one in leaves]
            with torch.enable_grad():
                out, _ = attended(*leaves, begin)
            return *torch.autograd.grad(out, leaves, grad), None, None, None, None

    class FlashAttnFunc(FlashAttnVarlenFunc):
        @staticmethod
        def forward(ctx, q, k, v, dropout_p, alibi_slopes, return_softmax):
            batch, length, *_rest = q.shape
            begin = torch.arange(0, batch * length + 1, length)
            ctx.save_for_backward(q, k, v, begin)
            flat = [one.reshape(-1, *one.shape[2:]) for one in (q, k, v)]
            return attended(*flat, begin)[0].view(q.shape)

        @staticmethod
        def backward(ctx, grad):
            *leaves, begin = ctx.saved_tensors
            flat = [one.detach().reshape(-1, *one.shape[2:]).requires_grad_() for one in leaves]
            with torch.enable_grad():
                out, _ = attended(*flat, begin)
            found = torch.autograd.grad(out, flat, grad.reshape(out.shape))
            return *(one.view(leaf.shape) for one, leaf in zip(found, leaves)), None, None, None

    kind = FlashAttnFunc if batched else FlashAttnVarlenFunc
    kind.__module__, kind.__qualname__ = "flash_attn.flash_attn_interface", kind.__name__
    return register_function(kind)


def by_flash_attn(name, dropout=0.0):
    kind, begin = flash_attn(batched=False), torch.tensor(BEGIN, dtype=torch.int32)
    heads, shared, layouts, _ = CASES[name]
    return compared(heads, shared, layouts, lambda q, k, v: kind.apply(q, k, v, begin, dropout, None, False))


@pytest.mark.parametrize("name", ["heads", "grouped", "one shared", "tokens"])
def test_packed_attention_of_flash_attn(name):
    assert run_ranks(4, by_flash_attn, name, timeout=240) == [CASES[name][3]] * 4


def batched():
    kind, mesh = flash_attn(batched=True), mesh_of(2, 2)
    whole = [one.view(4, 3, *one.shape[1:]) for one in operands(4, 2)]
    leaves = [distribute_tensor(one, mesh, [Shard(0), Shard(2)]).requires_grad_() for one in whole]
    plain = [one.clone().requires_grad_() for one in whole]
    with comm_trace() as trace:
        out = kind.apply(*leaves, 0.0, None, False)
    wanted = kind.apply(*plain, 0.0, None, False)
    torch.testing.assert_close(out.full_tensor(), wanted, rtol=1e-9, atol=1e-9)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for leaf, other in zip(leaves, plain):
        torch.testing.assert_close(leaf.grad.full_tensor(), other.grad, rtol=1e-9, atol=1e-9)
    return out.placements, trace.count()


def test_batch_and_heads_of_flash_attn():
    assert run_ranks(4, batched, timeout=240) == [((Shard(0), Shard(2)), 0)] * 4


def test_what_draws_runs_whole():
    assert run_ranks(4, by_flash_attn, "heads", 0.5, timeout=240) == [3] * 4  # q, k, v

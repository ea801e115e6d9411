"""flex_attention on shards equals one device's: values, and the gradients of q, k, v and of what its functions hold.

torch refuses gradients on a CPU, though the formula that it runs there has them: the tests take that check away.
"""

import functools

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

from vescale_dtensor import (
    OperatorError,
    Replicate,
    ReproducibleError,
    ShapeError,
    Shard,
    comm_trace,
    distribute_tensor,
    reproducible,
)
from vescale_testkit import in_turns, mesh_of, raises_on_all, run_ranks, warm_up

warm_up("torch._dynamo", "torch.nn.attention.flex_attention")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")

BATCH, HEADS, LENGTH, WIDTH = 4, 4, 256, 8


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_place(b, h, q_idx, kv_idx):
    """Another window for each sequence and head."""
    return (q_idx - kv_idx).abs() <= 20 + 30 * b + 7 * h


def documents(ids):
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def sloped(score, b, h, q_idx, kv_idx):
    return score - 0.01 * (h + 1) * (b + 1) * (q_idx - kv_idx).abs() + 0.001 * q_idx


MASKS = {
    "none": None,
    "causal": (causal, None, None),
    "of each": (by_place, BATCH, HEADS),
    "of each sequence": (lambda b, h, q_idx, kv_idx: (q_idx + b) % 7 != kv_idx % 5, BATCH, None),
    "of each head": (lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % (h + 2) == 0, None, HEADS),
}
LAYOUTS = {
    "batch": [Shard(0), Replicate()],
    "heads": [Replicate(), Shard(1)],
    "both": [Shard(0), Shard(1)],
    "batch twice": [Shard(0), Shard(0)],
    "whole": [Replicate(), Replicate()],
}


def operands(kv_heads=HEADS, batch=BATCH, heads=HEADS, length=LENGTH):
    torch.manual_seed(1)
    shapes = [(batch, heads, length, WIDTH), (batch, kv_heads, length, WIDTH), (batch, kv_heads, length, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def trained():
    torchs._validate_device = lambda *operands: None


def masked(name, length=LENGTH):
    if MASKS[name] is None:
        return None
    mod, b, h = MASKS[name]
    return create_block_mask(mod, b, h, length, length, device="cpu")


def run(whole, layouts, given, held=(), held_layouts=()):
    """The result and all gradients, whole, and what was sent forward."""
    trained()
    mesh = mesh_of(2, 2)
    place = lambda one, layout: one.clone() if layout is None else distribute_tensor(one, mesh, layout)
    leaves = [place(one, layout).requires_grad_() for one, layout in zip(whole, layouts)]
    more = [place(one, layout).requires_grad_() for one, layout in zip(held, held_layouts)]
    with comm_trace() as trace:
        out = flex_attention(*leaves, **given(*more))
    outs = list(out) if isinstance(out, tuple) else [out]
    outs = [outs[0], *outs[1]] if isinstance(outs[-1], tuple) else outs
    outs = [one for one in outs if one is not None]
    sum((one * torch.linspace(-1, 1, one.shape[2]).view(-1, *[1] * (one.ndim - 3))).sum() for one in outs).backward()
    found = [*outs, *[leaf.grad for leaf in (*leaves, *more)]]
    return [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in found], trace.count()


def compared(layouts, given, kv_heads=HEADS, held=(), held_layouts=(), sizes=None):
    whole = operands(kv_heads, **(sizes or {}))
    found, sent = run(whole, layouts, given, held, held_layouts)
    wanted, _ = run(whole, [None] * 3, given, held, [None] * len(held))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    return sent


def local(name):
    """The collectives of each case. What a mask looks at alternates with what a score_mod does."""
    sent = []
    for at, mask in enumerate(MASKS):
        given = {"block_mask": masked(mask), "score_mod": sloped if at % 2 == 0 else None}
        sent.append(compared([LAYOUTS[name]] * 3, lambda given=given: given))
    return sent


@in_turns(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_batch_and_heads_stay_where_they_are(name):
    assert run_ranks(4, local, name, timeout=240) == [[0] * len(MASKS)] * 4


def grouped():
    """kv heads that divide, that do not, and one for all; by q's heads alone and beside the batch."""
    given = lambda: {"block_mask": masked("of each head"), "score_mod": sloped, "enable_gqa": True}
    alike = [[Shard(0), Shard(1)]] * 3
    found = [compared(alike, given, kv_heads=2)]
    q_alone = [[Replicate(), Shard(1)], [Replicate()] * 2, [Replicate()] * 2]
    found.append(compared(q_alone, given, kv_heads=1))
    found.append(compared([[Shard(1), Shard(1)], *[[Shard(1), Replicate()]] * 2], given, kv_heads=2))
    return found


def test_grouped_queries():
    for sent in run_ranks(4, grouped, timeout=240):
        assert sent[:2] == [0, 0]


def uneven():
    """3 sequences and 5 heads on two ranks each, and one sequence on four: a rank without any."""
    sizes = {"batch": 3, "heads": 5}
    mask = create_block_mask(by_place, 3, 5, LENGTH, LENGTH, device="cpu")
    given = lambda: {"block_mask": mask, "score_mod": sloped}
    sent = [compared([[Shard(0), Shard(1)]] * 3, given, kv_heads=5, sizes=sizes)]
    sent.append(compared([[Shard(0), Shard(0)]] * 3, given, kv_heads=5, sizes=sizes))
    return sent


def test_sizes_that_do_not_divide():
    assert run_ranks(4, uneven, timeout=240) == [[0, 0]] * 4


def statistics():
    heads = [[Shard(0), Shard(1)]] * 3
    given = {"block_mask": masked("of each"), "score_mod": sloped}
    sent = [compared(heads, lambda: dict(return_lse=True, **given))]
    sent.append(compared(heads, lambda: dict(return_aux=AuxRequest(lse=True), **given)))
    sent.append(compared(heads, lambda: dict(return_aux=AuxRequest(), scale=0.3, **given)))
    return sent


def test_statistics_lie_as_the_rows_do():
    assert run_ranks(4, statistics, timeout=240) == [[0, 0, 0]] * 4


def by_sequence():
    """What is sent forward, where q's rows are cut: k and v are gathered, and q where blocks would be cut through."""
    rows, whole = [Replicate(), Shard(2)], [Replicate(), Replicate()]
    each = lambda: {"block_mask": masked("of each"), "score_mod": sloped}
    sent = [compared([rows, whole, whole], each)]  # two blocks of 128 on two ranks
    sent.append(compared([[Shard(1), Shard(2)]] * 3, each))
    one = lambda: {"block_mask": create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")}
    sent.append(compared([rows] * 3, one, kv_heads=3, sizes={"batch": 1, "heads": 3}))
    sent.append(compared([rows, whole, whole], lambda: {"score_mod": sloped}, sizes={"length": 30}))
    mask = masked("of each", 192)
    sent.append(compared([rows, whole, whole], lambda: {"block_mask": mask}, sizes={"length": 192}))
    listed = BlockMask.from_kv_blocks(  # which blocks are seen is all that it says, and to torch's formula nothing
        torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
        seq_lengths=(LENGTH, LENGTH),
    )  # fmt: skip
    sent.append(compared([rows, whole, whole], lambda: {"block_mask": listed}))
    return sent


def test_rows_stay_where_blocks_are_whole():
    for own, context, single, plain, through, listed in run_ranks(4, by_sequence, timeout=240):
        assert own == plain == listed == 0  # k and v are whole already
        assert context == 3  # an all-to-all each: the axis cuts the batch then
        assert single == 2  # k and v: one sequence, and heads that do not divide
        assert through == 1  # q


def cut_lists():
    """The lists of a rank's mask are those that torch makes of a mask for its places alone."""
    from vescale_dtensor._flex.blocks import Places, at_global, cut

    whole = create_block_mask(by_place, BATCH, HEADS, 512, 512, device="cpu")
    places = Places(((1, 3),), ((2, 4),), ((0, 128), (384, 512)))
    mod = at_global(by_place, places, torch.device("cpu"), scores=False)
    found, wanted = cut(whole, places, mod), create_block_mask(mod, 2, 2, 256, 512, device="cpu")
    assert found.shape == wanted.shape == (2, 2, 256, 512)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for name in ("kv", "q", "full_kv", "full_q"):
        assert torch.equal(getattr(found, f"{name}_num_blocks"), getattr(wanted, f"{name}_num_blocks")), name


def test_lists_are_those_of_the_places():
    cut_lists()


def holding():
    """Gradients of a bias by head and of a table by distance, cut, whole and plain; the documents of a mask."""
    heads = [[Shard(0), Shard(1)]] * 3
    torch.manual_seed(2)
    bias, table = torch.randn(HEADS).double(), torch.randn(BATCH, LENGTH).double()
    ids = torch.arange(LENGTH).div(50, rounding_mode="floor").expand(BATCH, LENGTH).clone()
    ids += torch.arange(BATCH).view(-1, 1) * (torch.arange(LENGTH) > 100)
    cut_ids = distribute_tensor(ids, mesh_of(2, 2), [Shard(0), Replicate()])

    def score(bias, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * bias[h] + table[b, kv_idx]

        return score_mod

    def given(bias, table):
        own = ids if type(bias) is torch.Tensor and type(table) is torch.Tensor else cut_ids
        mod = and_masks(causal, documents(own))
        mask = create_block_mask(mod, BATCH, None, LENGTH, LENGTH, device="cpu")
        return {"score_mod": score(bias, table), "block_mask": mask}

    for layouts in (
        ([Replicate(), Shard(0)], [Shard(0), Replicate()]), ([Replicate()] * 2, [Shard(1), Shard(0)]),
        (None, [Replicate()] * 2),
    ):  # fmt: skip
        compared(heads, given, held=(bias, table), held_layouts=layouts)
    compared([[Replicate()] * 2] * 3, given, held=(bias, table), held_layouts=([Replicate()] * 2, [Shard(1), Shard(0)]))
    partial = functools.partial  # a closure: of a name in a module torch's compiler would import the module
    scaled = partial(lambda factor, score, b, h, q_idx, kv_idx: score * factor[h])
    compared(
        heads, lambda bias: {"score_mod": lambda *args: partial(scaled, bias)(*args)},
        held=(bias,), held_layouts=([Replicate(), Shard(0)],),
    )  # fmt: skip


def test_what_functions_hold_is_whole_and_has_a_gradient():
    run_ranks(4, holding, timeout=240)


class Slopes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(distribute_tensor(torch.ones(HEADS), mesh_of(2), [Shard(0)]))
        self.window = 3

    def by_method(self, score, b, h, q_idx, kv_idx):
        return score * self.slope[h]

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.slope[h]

    def by_closure(self, what):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * self.slope[h]

        def windowed(score, b, h, q_idx, kv_idx):
            return score + (q_idx - kv_idx < self.window)

        return {"slope": score_mod, "window": windowed}[what]


def refused(how):
    heads = distribute_tensor(torch.randn(2, HEADS, 16, WIDTH), mesh_of(2), [Shard(1)])
    slopes, given = Slopes(), {}
    if how == "lists":
        given["block_mask"] = create_block_mask(by_place, 1, 2, 16, 16, device="cpu")
    elif how in ("attribute", "window"):
        given["score_mod"] = slopes.by_closure("slope" if how == "attribute" else how)
    elif how == "method":
        given["score_mod"] = slopes.by_method
    if how == "reproducible":
        with reproducible():
            flex_attention(heads, heads, heads)
    return flex_attention(heads, heads, heads, **given).placements


@pytest.mark.parametrize(
    "how, kind, text",
    [
        ("lists", ShapeError, "a block mask of [1, 2] sequences and heads does not fit queries of [2, 4]"),
        ("attribute", OperatorError, "the attribute 'slope' of Slopes"),
        ("method", OperatorError, "bias = Slopes.slope"),
        ("reproducible", ReproducibleError, "attn_implementation='sdpa'"),
    ],
)
def test_what_is_refused(how, kind, text):
    assert text in raises_on_all(2, kind, refused, how)


def test_a_module_is_held_for_what_is_plain():
    assert run_ranks(2, refused, "window", timeout=120) == [(Shard(1),)] * 2

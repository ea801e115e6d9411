"""Structure without names: models that resemble none, their groups, atoms and plans; the same under any naming."""

import resource
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vescale_dtensor import InterleavedShard, Replicate, Shard
from vescale_dtensor.engine import cut_ranges
from vescale_plans import PlanError, generate_plan
from vescale_plans._dry.meter import Meter
from vescale_plans.search import sample_of, structure_of, tensor_parallel_plan
from vescale_plans.search.progress import Bar
from vescale_plans.search.structure import Group, Source
from vescale_testkit import unnamed

WIDTH, WORDS = 48, 37


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class Attention(nn.Module):
    """Grouped heads; `packed` keeps q, k and v in one weight, `normed` puts a norm over all heads' queries."""

    def __init__(self, heads, shared, size, *, packed=False, normed=False, width=WIDTH):
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, size
        widths = [heads * size, shared * size, shared * size]
        self.inward = nn.ModuleList(
            [nn.Linear(width, sum(widths))] if packed else [nn.Linear(width, w) for w in widths]
        )
        self.widths = widths
        self.norm = Norm(heads * size) if normed else nn.Identity()
        self.outward = nn.Linear(heads * size, width)

    def forward(self, x):
        parts = [one(x) for one in self.inward]
        q, k, v = parts if len(parts) == 3 else parts[0].split(self.widths, -1)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (self.norm(q), k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.outward(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated unit with one packed weight, the parameters held by itself, and their output features first or last."""

    def __init__(self, inner, *, transposed=False, width=WIDTH):
        super().__init__()
        self.transposed = transposed
        shape = (width, 2 * inner) if transposed else (2 * inner, width)
        self.wide = nn.Parameter(torch.randn(shape) * 0.1)
        self.back = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        wide = x @ self.wide if self.transposed else F.linear(x, self.wide)
        gate, value = wide.chunk(2, -1)
        return self.back(F.silu(gate) * value)


class Experts(nn.Module):
    """Each position goes to two of the experts, chosen by value."""

    def __init__(self, count, inner, *, width=WIDTH):
        super().__init__()
        self.choose = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, inner, width) * 0.1)
        self.down = nn.Parameter(torch.randn(count, width, inner) * 0.1)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.choose(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for expert in range(self.up.shape[0]):
            rows, slot = torch.where(chosen == expert)
            hidden = F.gelu(F.linear(flat[rows], self.up[expert]))
            out = out.index_add(0, rows, F.linear(hidden, self.down[expert]) * weights[rows, slot, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, attention, mixer, width=WIDTH):
        super().__init__()
        self.one, self.two = Norm(width), nn.LayerNorm(width)
        self.attention, self.mixer = attention, mixer

    def forward(self, x):
        x = x + self.attention(self.one(x))
        return x + self.mixer(self.two(x))


class Words(nn.Module):
    def __init__(self, blocks, *, tied=False, width=WIDTH, words=WORDS):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.places = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def structure(model, batch=None):
    ids = torch.arange(5)[None] * 5 % WORDS
    return structure_of(model, sample_of(model, ids if batch is None else batch))


def words(make_attention, make_mixer, layers=2, **settings):
    torch.manual_seed(0)
    return Words([Block(make_attention(), make_mixer()) for _ in range(layers)], **settings)


def test_a_structure_without_prices_is_the_same_but_for_what_is_held():
    model = words(lambda: Attention(6, 3, 8), lambda: Gated(40))
    found = structure(model)
    bare = structure_of(model, sample_of(model, torch.arange(5)[None] * 5 % WORDS), priced=False)
    assert found.holding and bare == replace(found, holding={})


# --------------------------------------------------------------------- groups


def test_modules_registered_in_another_order_than_called_are_told_with_the_block_before_them():
    model = words(lambda: Attention(6, 3, 8), lambda: Gated(40), layers=3)
    assert not structure(model).blocks[0].called
    moved = {name: model._modules.pop(name) for name in ("head", "last")}
    model._modules.update({**moved, **{name: model._modules.pop(name) for name in list(model._modules)}})
    assert list(model._modules)[:2] == ["head", "last"]
    found = structure(model)
    assert found.cut_points == ("blocks.1", "blocks.2")
    assert dict(found.blocks[0].called) == {"head": 2, "last": 2}


def test_heads_and_neurons_are_found_with_their_groups():
    found = structure(words(lambda: Attention(6, 3, 8), lambda: Gated(40)))
    attention, gated = found.groups[:2]
    assert attention.sink == "blocks.0.attention.outward.weight"
    assert [source.parameter[-8:] for source in attention.sources] == ["0.weight", "1.weight", "2.weight"]
    assert (attention.atoms, attention.degrees) == (3, (2, 3, 6))
    assert attention.bias == "blocks.0.attention.outward.bias"
    assert gated.sources[0].parameter == "blocks.0.mixer.wide"
    assert gated.atoms == 40
    assert found.cut_points == ("blocks.1",)
    assert found.position_dim == 1
    assert [one.parameter for one in found.lookups] == ["table.weight"]  # positions are no data
    assert [one.parameter for one in found.heads] == ["head.weight"]
    assert found.coupled == ()


@pytest.mark.parametrize("word", [0, 3])
def test_a_sample_of_one_word_shows_as_much(word):
    model = words(lambda: Attention(6, 3, 8), lambda: Gated(40))
    assert structure(model, torch.full((1, 5), word)) == structure(model)


class Masked(Words):
    def forward(self, mask, ids):
        return super().forward(ids * (mask > 0))


def test_the_words_are_told_from_a_mask_of_ones():
    model = Masked([Block(Attention(6, 3, 8), Gated(40))])
    found = structure(model, {"mask": torch.ones(1, 5, dtype=torch.long), "ids": torch.zeros(1, 5, dtype=torch.long)})
    assert [one.parameter for one in found.lookups] == ["table.weight"]
    assert [one.parameter for one in found.heads] == ["head.weight"]


def test_shared_keys_stay_whole_where_ranks_outnumber_them():
    found = structure(words(lambda: Attention(6, 3, 8), lambda: Gated(40)))
    assert len(found.groups[0].split(3)) == 3
    assert list(found.groups[0].split(6)) == ["blocks.0.attention.inward.0.weight"]
    assert list(found.groups[0].split(2)) == ["blocks.0.attention.inward.0.weight"]  # three of them on two ranks


def test_one_shared_key_is_kept_whole():
    found = structure(words(lambda: Attention(6, 1, 8), lambda: Gated(40)))
    group = found.groups[0]
    assert [source.parameter for source in group.sources] == [
        "blocks.0.attention.inward.0.weight",
        "blocks.0.attention.inward.2.weight",
    ]
    assert group.kept == ("blocks.0.attention.inward.1.weight",)
    assert list(group.split(6)) == ["blocks.0.attention.inward.0.weight"]


def test_packed_weights_are_segments():
    found = structure(words(lambda: Attention(4, 4, 12, packed=True), lambda: Gated(40, transposed=True)))
    attention, gated = found.groups[:2]
    assert attention.split(2)["blocks.0.attention.inward.0.weight"][1] == InterleavedShard(0, 3)
    assert gated.split(4)["blocks.0.mixer.wide"][1] == InterleavedShard(1, 2)
    plan = tensor_parallel_plan(found, 2)
    assert plan.parameters["blocks.*.attention.inward.*.bias"] == {"tp": InterleavedShard(0, 3)}
    assert plan.parameters["blocks.*.mixer.wide"] == {"tp": InterleavedShard(1, 2)}


@pytest.mark.parametrize("heads, shared, size", [(6, 3, 8), (4, 2, 12), (8, 4, 4), (4, 1, 8), (12, 2, 4)])
def test_segments_of_unequal_size_are_dealt_out(heads, shared, size):
    found = structure(words(lambda: Attention(heads, shared, size, packed=True), lambda: Gated(48)))
    group, weight = found.groups[0], "blocks.0.attention.inward.0.weight"
    assert (group.atoms, group.degrees) == (shared, tuple(d for d in range(2, shared + 1) if shared % d == 0))
    for degree in group.degrees:
        placement = group.split(degree)[weight][1]
        held, at = [[] for _ in range(degree)], 0
        for width in (heads * size, shared * size, shared * size):
            for rank, ranges in enumerate(cut_ranges(Shard(0), width, degree)):
                held[rank] += [i + at for i in range(*ranges[0])]
            at += width
        assert [[i for span in ranges for i in range(*span)] for ranges in cut_ranges(placement, at, degree)] == held
        plan = tensor_parallel_plan(found, degree)
        assert plan.parameters["blocks.*.attention.inward.*.weight"] == {"tp": placement}
        assert plan.parameters["blocks.*.attention.inward.*.bias"] == {"tp": placement}
        assert "blocks.*.attention.inward.*" not in plan.boundaries
    assert set(group.degrees) <= set(found.degrees)


def test_segments_too_few_for_the_ranks_are_split_by_their_weights_alone():
    found = structure(words(lambda: Attention(6, 3, 8, packed=True), lambda: Gated(40)))
    assert found.groups[0].degrees == (3,)
    assert found.degrees == (2, 4, 8)  # what 3 heads hinder is gathered, not given up
    plan = tensor_parallel_plan(found, 2)
    assert plan.parameters["blocks.*.attention.inward.*.weight"] == {"tp": Shard(0)}
    assert plan.boundaries["blocks.*.attention.inward.*"].output == {"tp": Replicate()}
    assert plan.parameters["blocks.*.attention.outward.weight"] == {"tp": Shard(1)}


def test_a_norm_over_all_heads_is_a_bridge():
    found = structure(words(lambda: Attention(6, 3, 8, normed=True), lambda: Gated(40)))
    by_norm = {source.parameter: source.by_norm for source in found.groups[0].sources if not source.companion}
    assert [source.parameter for source in found.groups[0].sources if source.companion] == [
        "blocks.0.attention.norm.scale"
    ]
    assert by_norm == {
        "blocks.0.attention.inward.0.weight": True,
        "blocks.0.attention.inward.1.weight": False,
        "blocks.0.attention.inward.2.weight": False,
    }


class Normed(nn.Module):
    """A norm over all that the second product sums over; `latent`: what comes before is fed through one, too."""

    def __init__(self, inner, *, latent=0, width=WIDTH):
        super().__init__()
        self.latent = nn.Sequential(nn.Linear(width, latent), Norm(latent)) if latent else nn.Identity()
        self.up, self.norm, self.down = nn.Linear(latent or width, inner), Norm(inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.down(self.norm(F.relu(self.up(self.latent(x)))))


def test_a_norm_that_only_its_own_source_enters_is_a_bridge():
    found = structure(words(lambda: Normed(40), lambda: Normed(40)))
    assert [(group.sink, group.sources[0].parameter, group.sources[0].by_norm) for group in found.groups[:2]] == [
        ("blocks.0.attention.down.weight", "blocks.0.attention.up.weight", True),
        ("blocks.0.mixer.down.weight", "blocks.0.mixer.up.weight", True),
    ]
    assert 2 in found.degrees


def test_what_is_split_behind_a_norm_is_no_sink_of_what_comes_before_it():
    class Latent(Attention):
        def __init__(self):
            super().__init__(6, 3, 8, width=12)
            self.outward = nn.Linear(48, WIDTH)
            self.latent = nn.Sequential(nn.Linear(WIDTH, 12), Norm(12))

        def forward(self, x):
            return super().forward(self.latent(x))

    found = structure(words(Latent, lambda: Gated(40)))
    sinks = [group.sink for group in found.groups]
    assert sinks == [
        f"blocks.{at}.{name}" for at in (0, 1) for name in ("attention.outward.weight", "mixer.back.weight")
    ]


def test_where_nothing_can_be_split_the_vocabulary_is():
    class Blurred(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x).softmax(-1)

    found = structure(words(Blurred, Blurred, words=36))
    assert found.degrees == (2, 3, 4, 6, 9, 12, 18, 36) and not found.groups
    plan = tensor_parallel_plan(found, 2)
    assert set(plan.split) == {"table.weight", "head.weight"}
    with pytest.raises(PlanError, match="can be split 5 ways"):
        tensor_parallel_plan(found, 5)


def test_a_companion_of_several_sizes_stays_whole():
    alone, shared = [(at, at + 1) for at in range(8)], [(at, at + 2) for at in range(0, 8, 2)]
    weight = Source("weight", None, 0, 16, 1, (*alone, *shared, *shared))
    group = Group("sink", 1, 8, None, (weight, replace(weight, parameter="bias of channels", companion=True)))
    assert group.split(2) == {"weight": (weight, InterleavedShard(0, 1, (0, 0, 1, 1, 0, 1, 0, 1)))}


class Mixed(nn.Module):
    """A gate, a value, a number per head, and `shared` numbers that all heads use, of one weight."""

    def __init__(self, shared=0):
        super().__init__()
        self.sizes = (32, 32, 8, shared)
        self.inward, self.outward = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(32, WIDTH)

    def forward(self, x):
        gate, value, heads, shared = self.inward(x).split(self.sizes, -1)
        value = (gate.sigmoid() * value).unflatten(-1, (8, 4)).mul(heads[..., None]).flatten(-2)
        return self.outward(value * shared.square().sum(-1, keepdim=True).cos())


def test_unequal_segments_alone_are_a_plan():
    found = structure(words(Mixed, Mixed))
    assert found.degrees == (2, 4, 8)
    plan = tensor_parallel_plan(found, 2)
    order = (*[0] * 4, *[1] * 4) * 2 + (0, 1)
    assert plan.parameters["blocks.*.mixer.inward.weight"] == {"tp": InterleavedShard(0, 1, order)}
    assert "blocks.*.mixer.inward" not in plan.boundaries


def test_what_all_heads_share_is_gathered_with_the_weight_that_holds_it():
    found = structure(words(lambda: Mixed(8), lambda: Mixed(8)))
    assert found.degrees == (2, 4, 8, 16)
    plan = tensor_parallel_plan(found, 2)
    assert plan.parameters["blocks.*.mixer.inward.weight"] == {"tp": Shard(0)}
    assert plan.boundaries["blocks.*.mixer.inward"].output == {"tp": Replicate()}


def test_a_parameter_may_be_what_attention_asks_with():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, WIDTH))
            self.outward = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            stack = torch.stack([x, x.roll(1, -1)], -2)
            asked = self.query.expand(*x.shape[:-1], 1, WIDTH)
            return self.outward(F.scaled_dot_product_attention(asked, stack, stack)[..., 0, :])

    assert [group.sink for group in structure(words(Pooled, lambda: Gated(40))).groups] == [
        "blocks.0.mixer.back.weight",
        "blocks.1.mixer.back.weight",
    ]


def test_experts_and_their_router():
    found = structure(words(lambda: Attention(4, 2, 12), lambda: Experts(4, 32)))
    assert found.routers == ("blocks.0.mixer.choose.weight", "blocks.1.mixer.choose.weight")
    assert [(one.parameters, one.count) for one in found.experts] == [
        ((f"blocks.{at}.mixer.up", f"blocks.{at}.mixer.down"), 4) for at in range(2)
    ]
    group = found.groups[1]
    assert (group.sink, group.dim, group.experts) == ("blocks.0.mixer.down", 2, 4)
    assert group.split(2)["blocks.0.mixer.up"][1] == Shard(1)


def test_tied_weights_are_split_alike():
    found = structure(words(lambda: Attention(4, 2, 12), lambda: Gated(40), tied=True))
    assert found.tied == (("table.weight", "head.weight"),)
    plan = tensor_parallel_plan(found, 2)
    assert plan.split["table.weight"] == plan.split["head.weight"] == Shard(0)


def test_a_custom_kernel_is_seen_through():
    class Mix(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    class Kernel(Attention):
        def forward(self, x):
            q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in self.inward)
            return self.outward(Mix.apply(q, k, v).transpose(1, 2).flatten(2))

    found = structure(words(lambda: Kernel(4, 4, 12), lambda: Gated(40)))
    assert (found.groups[0].atoms, found.groups[0].degrees) == (4, (2, 4))


def test_rows_of_a_batch_that_meet_are_reported():
    class Meeting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            h = torch.relu(self.up(x))
            return self.down(h - h.mean(0, keepdim=True))

    found = structure_of(Meeting(), sample_of(Meeting(), torch.randn(4, 5, 8)))
    assert found.coupled == ("down.weight",)


def test_positions_that_meet_outside_the_groups_forbid_sequence_parallelism():
    class Smeared(Block):
        def forward(self, x):
            return super().forward(x + x.roll(1, 1))

    torch.manual_seed(0)
    found = structure(Words([Smeared(Attention(4, 2, 12), Gated(40)) for _ in range(2)]))
    assert found.position_dim is None
    with pytest.raises(PlanError, match="positions that interact only inside the groups"):
        tensor_parallel_plan(found, 2, sequence_parallel=True)


def test_control_flow_by_value_is_followed_on_both_ways():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            h = torch.relu(self.up(x))
            return self.a(h) if h.nan_to_num().mean() * 1000 % 2 < 1 else self.b(h)

    found = structure_of(Either(), sample_of(Either(), torch.randn(4, 5, 8)))
    assert {group.sink for group in found.groups} >= {"a.weight"} or {group.sink for group in found.groups} >= {
        "b.weight"
    }


# ---------------------------------------------------------------------- plans


def test_the_plan_is_written_with_few_patterns():
    found = structure(words(lambda: Attention(4, 2, 12), lambda: Gated(40), layers=5))
    plan = tensor_parallel_plan(found, 2, sequence_parallel=True)
    assert plan.parameters == {
        "table.weight": {"tp": Shard(0)},
        "blocks.*.attention.inward.*.weight": {"tp": Shard(0)},
        "blocks.*.attention.inward.*.bias": {"tp": Shard(0)},
        "blocks.*.attention.outward.weight": {"tp": Shard(1)},
        "blocks.*.mixer.wide": {"tp": InterleavedShard(0, 2)},
        "blocks.*.mixer.back.weight": {"tp": Shard(1)},
        "head.weight": {"tp": Shard(0)},
        "*": {},
    }
    assert plan.boundaries["blocks.*.attention.outward"].output == {"tp": Shard(1)}
    assert plan.boundaries["blocks.*.attention.inward.*"].input == {"tp": Replicate()}
    assert plan.boundaries["table"].output == {"tp": Shard(1)}


def test_a_degree_that_splits_nothing_says_what_would():
    found = structure(words(lambda: Attention(4, 2, 12), lambda: Gated(40)))
    with pytest.raises(PlanError, match="no group of the model can be split 7 ways") as raised:
        tensor_parallel_plan(found, 7)
    assert "degree=4" in str(raised.value)


# --------------------------------------------------------------- names, and sizes


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_wrapping_and_renaming_change_nothing_but_names():
    model = words(lambda: Attention(6, 3, 8), lambda: Gated(40))
    plain = structure(model)
    for block in model.blocks:
        block.attention = Wrapped(Wrapped(block.attention))
        block.mixer = Wrapped(block.mixer)
    nested = structure(Wrapped(model))
    assert unnamed(nested) == unnamed(plain)
    assert [(g.dim, g.degrees) for g in nested.groups] == [(g.dim, g.degrees) for g in plain.groups]


def test_a_model_is_left_as_it_was():
    model = words(lambda: Attention(4, 2, 12), lambda: Gated(40)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    structure(model)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Pooled(nn.Module):
    """Lists of blocks in a list: between two lists every other position goes, and blocks know the list that they are
    in."""

    def __init__(self, lists, length, width=WIDTH):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.lists = nn.ModuleList(
            nn.ModuleList(Block(Attention(4, 2, 12), Gated(40)) for _ in range(length)) for _ in range(lists)
        )
        for at, blocks in enumerate(self.lists):
            for block in blocks:
                block.stage = at

    def forward(self, ids):
        x = self.table(ids)
        for at, blocks in enumerate(self.lists):
            x = x[:, ::2] if at else x
            for block in blocks:
                x = block(x)
        return self.head(x)


class Pairs(nn.Module):
    """A list of lists of an attention and a mixer, which the model itself adds to the stream."""

    def __init__(self, layers, width=WIDTH):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Sequential(Norm(width), one) for one in (Attention(4, 2, 12), Gated(40)))
            for _ in range(layers)
        )

    def forward(self, ids):
        x = self.table(ids)
        for attention, mixer in self.layers:
            x = x + attention(x)
            x = x + mixer(x)
        return self.head(x)


class Counted(Bar):
    """Counts the steps that it is told."""

    steps = 0

    def tick(self, what, total=None):
        self.steps += 1


def forwards(model):
    """What is found of a model, and in how many forwards."""
    bar = Counted()
    return structure_of(model, sample_of(model, torch.arange(9)[None] * 5 % WORDS), bar), bar.steps


@pytest.mark.parametrize("made, layers", [(lambda lists: Pooled(lists, 3), 3), (Pairs, 1)])
def test_more_lists_in_a_list_cost_no_more_forwards(made, layers):
    (few, first), (many, second) = (forwards(made(lists)) for lists in (2, 4))
    assert first == second
    (chain,) = many.blocks
    assert chain.chained and len(chain.names) == 2 * len(few.blocks[0].names)
    assert len(many.groups) == 4 * layers * 2
    kinds = {tuple((s.size, s.spans) for s in group.sources) for group in many.groups}
    assert kinds == {tuple((s.size, s.spans) for s in group.sources) for group in few.groups}
    assert len(kinds) == 2  # attention's and the mixer's, in all blocks alike


def test_blocks_of_lists_that_differ_are_told_apart():
    model = Pooled(3, 2)
    for at, blocks in enumerate(model.lists):
        for block in blocks:
            block.stage = (0, 7, 3)[at]  # no place
    assert structure(model).blocks[0].kinds == (0, 0, 1, 1, 2, 2)
    for at, blocks in enumerate(model.lists):
        for block in blocks:
            block.stage = 5 + at
    assert structure(model).blocks[0].kinds == (0,) * 6


def test_a_model_of_405_billion_parameters_is_probed_without_its_weights():
    layers, width, inner = 126, 16384, 53248
    with torch.device("meta"):
        blocks = [
            Block(Attention(128, 8, 128, width=width), Gated(inner, width=width), width=width) for _ in range(layers)
        ]
        model = Words(blocks, width=width, words=128256)
    began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = structure(model)
    assert found.parameters > 400e9
    assert len(found.groups) == 2 * layers
    assert found.groups[0].degrees == (2, 4, 8, 16, 32, 64)
    assert len(found.groups[0].split(8)) == 3
    assert list(found.groups[0].split(16)) == ["blocks.0.attention.inward.0.weight"]
    assert found.groups[1].split(8)["blocks.0.mixer.wide"][1] == InterleavedShard(0, 2)
    print(f"probed in {time.process_time() - began:.1f} s of CPU")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2 * 2**20  # KiB


def test_inputs_that_nothing_describes_are_asked_for():
    with pytest.raises(PlanError, match="nothing says what they look like"):
        sample_of(Gated(8))


def test_what_a_dict_of_modules_names_is_no_list_of_blocks():
    """nanoGPT's `transformer` holds its tables, its blocks and its last norm by name."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = nn.ModuleList(Block(Attention(4, 2, 12), Gated(40)) for _ in range(3))
            parts = {"table": nn.Embedding(WORDS, WIDTH), "blocks": blocks, "after": Norm(WIDTH)}
            self.parts, self.head = nn.ModuleDict(parts), nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, ids):
            x = self.parts.table(ids)
            for block in self.parts.blocks:
                x = block(x)
            return self.head(self.parts.after(x))

    (chain,) = structure(Named()).blocks
    assert chain.names == tuple(f"parts.blocks.{at}" for at in range(3))


class Flexible(Attention):
    """The same by flex_attention, compiled or not, with a bias by head and distance that is a parameter, or without."""

    def __init__(self, *args, biased=False, compiled=False, **settings):
        super().__init__(*args, **settings)
        self.call = torch.compile(flex_attention) if compiled else flex_attention
        self.bias = nn.Parameter(torch.zeros(self.heads, 8)) if biased else None

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in self.inward)
        length, bias = x.shape[1], self.bias

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + bias[h, (q_idx - kv_idx).clamp(0, 7)]

        mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, length, length, x.device)
        given = {} if bias is None else {"score_mod": score_mod}
        return self.outward(self.call(q, k, v, block_mask=mask, enable_gqa=True, **given).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("settings", [{}, {"compiled": True}, {"biased": True}], ids=str)
def test_flex_attention_is_planned_as_attention_is(settings):
    alike = structure(words(lambda: Attention(6, 3, 4), lambda: Gated(40)))
    found = structure(words(lambda: Flexible(6, 3, 4, **settings), lambda: Gated(40)))
    of = lambda structure: [(one.sink, one.sources, one.atoms, one.degrees) for one in structure.groups]
    assert of(found) == of(alike)


def test_an_operator_that_takes_functions_is_refused_by_name():
    operator, rest = torch.ops.higher_order.flex_attention, (lambda score, *_: score, (None,), 1.0, {})

    class Direct(Attention):
        def forward(self, x):
            q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in self.inward)
            return self.outward(operator(q, k, v, *rest)[0].transpose(1, 2).flatten(2))

    with pytest.raises(PlanError, match="calls flex_attention, an operator that torch compiles") as refused:
        generate_plan(Direct(4, 4, 4), world_size=2, batch=4, sample=torch.zeros(4, 16, WIDTH))
    assert "sdpa" in str(refused.value)
    with Meter(), torch.no_grad(), pytest.raises(PlanError, match="dry_run: the model calls flex_attention"):
        operator(*torch.zeros(3, 2, 4, 16, 8), *rest)


def test_what_the_first_block_makes_for_all_is_in_each_ones_group():
    """T5's bias by distance: a parameter of the first block, in the attention of all, of encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 4, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    structure = structure_of(model, sample_of(model, {"input_ids": ids, "labels": ids}))
    groups = {group.sink: [source.parameter for source in group.sources] for group in structure.groups}
    for stack in ("encoder", "decoder"):
        for at in range(4):
            attention = f"{stack}.block.{at}.layer.0.SelfAttention"
            sources = groups[f"{attention}.o.weight"]
            assert {f"{attention}.{name}.weight" for name in "qkv"} < set(sources)
            assert f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" in sources

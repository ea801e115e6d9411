"""Masks that are described: proved to treat every pair of places by itself, and made tile by tile."""

import pytest
import torch

from vescale_dtensor import Shard, distribute_tensor
from vescale_dtensor._context.described import EDGE, Description, NotDescribedError
from vescale_dtensor._layouts.region import cut
from vescale_dtensor._layouts.state import sharded
from vescale_dtensor.engine import DescribedMask
from vescale_testkit import mesh_of, run_ranks

SIZE = 2 * EDGE + 100
DOCUMENT = torch.randint(5, (2, SIZE), generator=torch.Generator().manual_seed(0)).sort(-1).values
PADDING = torch.arange(SIZE) < torch.tensor([[SIZE - 70], [40]])
DESCRIBED = {
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (k <= q) & (k > q - 100),
    "away": lambda b, h, q, k: abs(q - k) <= 30,
    "chunks": lambda b, h, q, k: q // 128 == k // 128,
    "padding": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & PADDING[b, k],
    "documents": lambda b, h, q, k: (DOCUMENT[b, q] == DOCUMENT[b, k]).to(q.device) & (k <= q),
    "nothing": lambda b, h, q, k: (q < 0) & (k < 0),
    "all": lambda b, h, q, k: (q >= 0) & (k >= 0),
}
OFFSETS = torch.arange(SIZE)
REFUSED = {
    "a greatest place": lambda b, h, q, k: k <= q.max(),
    "a running sum": lambda b, h, q, k: k <= q.cumsum(2),
    "a branch on a place": lambda b, h, q, k: k <= (q if q > 0 else -q),
    "a branch on a shape": lambda b, h, q, k: k <= q * (q.shape[2] > 1),
    "a number of a place": lambda b, h, q, k: k <= q.item(),
    "chance": lambda b, h, q, k: (k <= q) & torch.bernoulli((k + q) * 0.5).bool(),
    "a write": lambda b, h, q, k: k <= q.clone().add_(1),
    "a row of a table": lambda b, h, q, k: (k <= q) & PADDING[b.view(-1)][:, None, None],
    "a tensor of all places": lambda b, h, q, k: k <= q + OFFSETS[:1],
    "a turn": lambda b, h, q, k: k.flip(3) <= q,
    "numbers": lambda b, h, q, k: q - k,
    "a constant": lambda b, h, q, k: torch.ones(1, 1, 1, 1, dtype=torch.bool),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_tiles_of_a_description_are_those_of_the_mask(name):
    function = DESCRIBED[name]
    places = torch.arange(SIZE)
    batch = torch.arange(2).view(-1, 1, 1, 1)
    whole = function(batch, batch[:1] * 0, places.view(1, 1, -1, 1), places.view(1, 1, 1, -1)).expand(2, 1, SIZE, SIZE)
    description = Description(function, tuple(whole.shape), torch.device("cpu"))
    for count, groups in ((2, 1), (3, 1), (2, 2)):
        cuts = cut(sharded(0, groups), SIZE - SIZE % (count * groups), count)
        for mine in cuts:
            held = description.held(((1, 2),), mine)
            rows = torch.cat([places[slice(*one)] for one in mine])
            for block, tiles in zip(cuts, held.tiles(cuts)):
                columns = torch.cat([places[slice(*one)] for one in block])
                wanted = whole[1:][:, :, rows][..., columns]
                found = torch.zeros_like(wanted, dtype=torch.long)
                for tile in tiles:
                    assert torch.equal(columns[slice(*tile.columns)], places[slice(*tile.places)])
                    part, seen = held.part(tile), found[:, :, slice(*tile.rows), slice(*tile.columns)]
                    seen += 1 if part is None else part.long()
                assert torch.equal(found, wanted.long()), (count, groups)


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_tell_one_place_from_another_is_not_described(name):
    with pytest.raises(NotDescribedError):
        Description(REFUSED[name], (2, 1, SIZE, SIZE), torch.device("cpu"))


def test_a_described_mask_is_a_mask():
    """For whoever asks for more than its description: cut by rows, as the places were when it was described."""

    def check():
        mesh = mesh_of(2)
        padding, places, batch = PADDING.clone(), torch.arange(SIZE), torch.arange(2)
        indices = (
            batch.view(-1, 1, 1, 1),
            batch[:1].view(1, 1, 1, 1),
            places.view(1, 1, -1, 1),
            places.view(1, 1, 1, -1),
        )
        layout = distribute_tensor(torch.zeros(2, 1, SIZE, SIZE, dtype=torch.bool), mesh, [Shard(2)]).mesh_layout

        def window(b, h, q, k):
            return DESCRIBED["window"](b, h, q, k) & padding[b, k]

        expected = window(*indices)
        mask = DescribedMask.of(window, indices, layout)
        padding.zero_()
        both = mask & distribute_tensor(PADDING[:, None, None], mesh, [Shard(3)])
        assert type(mask) is type(both) is DescribedMask and mask.shape == (2, 1, SIZE, SIZE)
        assert mask.expand(2, -1, SIZE, SIZE) is mask[:, :, :, :SIZE] is mask.to(mask.device) is mask
        for one in (mask, both):
            assert torch.equal((~one).made().full_tensor(), ~expected)
            assert torch.equal(one.sum(-1).full_tensor(), expected.sum(-1))
        assert torch.equal(mask[:, :, :50].full_tensor(), expected[:, :, :50])
        value = distribute_tensor(torch.randn(2, 1, SIZE, 4), mesh, [Shard(2)])
        weights = torch.where(mask, 1.0, 0.0) @ value
        torch.testing.assert_close(weights.full_tensor(), expected.float() @ value.full_tensor())
        refused = DescribedMask.of(REFUSED["a greatest place"], indices, layout)
        assert refused is None

    run_ranks(2, check)

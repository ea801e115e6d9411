"""pad, roll, flip, rot90, tril, triu and diagonals."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import FallbackWarning, InterleavedShard, Partial, Replicate, Shard
from vescale_testkit import mesh_of, run_ranks
from vescale_testkit.oracle import compare, placements_for

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


def real(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


CALLS = {
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad value": lambda x: F.pad(x, (0, 0, 2, 1), value=1.0),
    "pad other value": lambda x: F.pad(x, (0, 0, 2, 1), "constant", 0.0),
    "pad all": lambda x: F.pad(x, (1, 0, 0, 1, 2, 0), value=-2.0),
    "crop": lambda x: F.pad(x, (-1, 1, 0, -2)),
    "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 1), mode="circular"),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (1, 1), 3.0),
    "roll": lambda x: x.roll(2, 1),
    "roll dims": lambda x: torch.roll(x, (1, -1), (0, 2)),
    "roll all": lambda x: x.roll(4),
    "flip": lambda x: x.flip(0, 2),
    "flip list": lambda x: torch.flip(x, [1]),
    "fliplr": lambda x: x.fliplr(),
    "flipud": torch.flipud,
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "rot180": lambda x: torch.rot90(x, 2, [1, 2]),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, -1),
    "tril keyword": lambda x: torch.tril(input=x, diagonal=2),
    "tril_": lambda x: (x * 1).tril_(-1),
    "diagonal": lambda x: x.diagonal(1, 0, 1),
    "diagonal last": lambda x: torch.diagonal(x, dim1=-2, dim2=-1),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(x),
    "diag": lambda x: x.sum(0).diag(1),
    "trace": lambda x: x.sum(1).trace(),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_placement(name):
    call = CALLS[name]

    def work():
        warnings.simplefilter("error", FallbackWarning)
        for given in placements_for((5, 6, 3), 2):
            try:
                compare(call, [real(5, 6, 3)], [given], mesh_of(2, 2))
            except Exception as error:
                error.add_note(f"{given}")
                raise

    run_ranks(4, work)


def test_free_on_other_dims():
    def work():
        warnings.simplefilter("error", FallbackWarning)
        free = [
            (lambda x: F.pad(x, (1, 1)), (S0, S1)), (lambda x: F.pad(x, (1, 1)), (P, S1)),
            (lambda x: x.roll(1, 0), (S1, S2)), (lambda x: x.flip(0), (S1, P)), (lambda x: x.tril(), (S1, S2)),
            (lambda x: x.triu(1), (S2, S2)), (lambda x: x.triu(1), (P, S1)), (lambda x: x.diagonal(0, 1, 2), (S0, R)),
        ]  # fmt: skip
        for call, given in free:
            assert compare(call, [real(4, 5, 6)], [given], mesh_of(2, 2)) == [], given
        assert compare(lambda x: x.tril(), [real(6, 8)], [(S0, InterleavedShard(1, 2))], mesh_of(2, 2)) != []
        assert compare(lambda x: x.tril(), [real(7, 5)], [(S0,)], mesh_of(4)) == []

    run_ranks(4, work)

"""What ranks agree on, folded axis by axis, is what a look at all of them at once would say."""

import random

import torch.distributed as dist

from vescale_dtensor import CommunicationError
from vescale_dtensor.engine import (
    first_apart,
    fold_objects,
    gather_objects,
    line_numbers,
    line_objects,
    mesh_of,
    world_objects,
)
from vescale_testkit import mesh_of as device_mesh_of
from vescale_testkit import raises_on_all, run_ranks


def _verdicts(seed):
    rng, rank = random.Random(seed), dist.get_rank()
    for sizes in ((4,), (2, 2), (1, 4), (2, 1, 2)):
        mesh = mesh_of(device_mesh_of(*sizes))
        for _ in range(6):
            said = [rng.choice("aab") for _ in range(4)]
            wanted = next(((at, one, said[0]) for at, one in enumerate(said) if one != said[0]), None)
            found = first_apart(said[rank], mesh)
            assert (found and tuple(found)) == wanted
            assert gather_objects(said[rank], mesh) == said
            assert fold_objects(said[rank], max, mesh) == max(said)
        axis = len(sizes) - 1
        assert line_objects(mesh.coordinate[axis], mesh, axis) == list(range(sizes[axis]))
        numbers = [mesh.coordinate[axis], -(2**61)]
        assert line_numbers(numbers, mesh, axis) == [[at, -(2**61)] for at in range(sizes[axis])]


def test_what_is_folded_is_what_all_say():
    run_ranks(4, _verdicts, 0)


def test_the_world_is_heard_in_rank_order_with_no_mesh():
    def told():
        return world_objects({"rank": dist.get_rank()}, "test", "it was asked")

    assert run_ranks(3, told) == [[{"rank": rank} for rank in range(3)]] * 3
    assert world_objects("alone", "test", "it was asked") == ["alone"]


def test_a_rank_that_is_gone_is_named_by_what_was_asked():
    def lost():
        before = dist.all_gather_object

        def gone(*args):
            raise RuntimeError("Connection closed by peer")

        dist.all_gather_object = gone
        try:
            world_objects(1, "test", "it was asked")
        finally:
            dist.all_gather_object = before

    text = raises_on_all(2, CommunicationError, lost)
    assert "test: a rank went away, or did not answer in time, while it was asked" in text and "closed by peer" in text

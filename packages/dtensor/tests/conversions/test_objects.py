"""What ranks agree on, folded axis by axis, is what a look at all of them at once would say."""

import random

import torch.distributed as dist

from vescale_dtensor.engine import first_apart, fold_objects, gather_objects, line_objects, mesh_of
from vescale_dtensor.testing import mesh_of as device_mesh_of
from vescale_dtensor.testing import run_ranks


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


def test_what_is_folded_is_what_all_say():
    run_ranks(4, _verdicts, 0)

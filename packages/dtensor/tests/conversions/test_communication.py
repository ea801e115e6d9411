"""torch.distributed called on DTensors: what is global already is counted once, all else is refused."""

import contextlib
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import GlobalValueWarning, OperatorError, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_testkit import raises_on_all, run_ranks
from vescale_testkit.oracle import spread

PLACES = {
    "replicated": Replicate(), "sharded": Shard(0), "partial": Partial(), "uneven": Shard(1),
    "ragged": RaggedShard((0,), (0, 4)), "flat": RaggedShard((0, 1), (5, 7)),
}  # fmt: skip


def _spread(place, value=None):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return spread(torch.arange(12.0).view(4, 3) if value is None else value, mesh, [PLACES[place]])


ALIKE = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "all_reduce of an operation": lambda t: dist.all_reduce(t, dist.ReduceOp.AVG),
    "all_reduce in a group": lambda t: dist.all_reduce(t, group=dist.group.WORLD),
    "all_reduce later": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "reduce": lambda t: dist.reduce(t, 0),
    "broadcast": lambda t: dist.broadcast(t, 1),
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([t, t]),
}
PARTS = {
    "all_gather": lambda t: dist.all_gather([torch.empty(4, 3) for _ in range(2)], t),
    "all_gather into DTensors": lambda t: dist.all_gather([t, t], torch.ones(4, 3)),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(torch.empty(8, 3), t),
    "gather": lambda t: dist.gather(t, [torch.empty(4, 3)] * 2 if dist.get_rank() == 0 else None, 0),
    "scatter": lambda t: dist.scatter(t, [torch.ones(4, 3)] * 2 if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, [torch.ones(4, 3)] * 2),
    "reduce_scatter of DTensors": lambda t: dist.reduce_scatter(torch.ones(4, 3), [t, t]),
    "reduce_scatter of one": lambda t: dist.reduce_scatter(output=torch.ones(4, 3), input_list=[torch.ones(4, 3), t]),
    "differentiable reduce_scatter": lambda t: differentiable.reduce_scatter(torch.ones(4, 3), [t, t]),
    "all_to_all into DTensors": lambda t: dist.all_to_all([t, t], [torch.ones(4, 3)] * 2),
    "differentiable all_to_all": lambda t: differentiable.all_to_all([torch.ones(4, 3)] * 2, [t, t]),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(torch.empty(2, 3), t),
    "all_to_all_single": lambda t: dist.all_to_all_single(torch.empty(4, 3), t),
    "all_to_all": lambda t: dist.all_to_all([torch.empty(4, 3)] * 2, [t, t]),
    "send": lambda t: dist.send(t, 1 - dist.get_rank()),
    "recv": lambda t: dist.recv(t, 1 - dist.get_rank()),
    "isend": lambda t: dist.isend(t, 1 - dist.get_rank()),
    "irecv": lambda t: dist.irecv(t, 1 - dist.get_rank()),
    "functional all_reduce": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD),
    "functional all_gather": lambda t: functional.all_gather_tensor(t, 0, dist.group.WORLD),
    "functional reduce_scatter": lambda t: functional.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD),
    "functional broadcast": lambda t: functional.broadcast(t, 0, dist.group.WORLD),
    "differentiable all_reduce": lambda t: differentiable.all_reduce(t),
    "differentiable all_gather": lambda t: differentiable.all_gather(t),
    "differentiable broadcast": lambda t: differentiable.broadcast(t, 0),
    "pickled": lambda t: dist.all_gather_object([None, None], {"loss": t}),
    "pickle": lambda t: pickle.dumps(t),
    "saved": lambda t: torch.save({"x": t}, io.BytesIO()),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_global_already_is_left_as_it_is(place):
    def left(place):
        for call in ALIKE.values():
            for value in (None, torch.tensor(1.1)):
                if value is not None and place not in ("replicated", "partial"):
                    continue
                for grad in (False, True):
                    tensor = _spread(place, value)
                    before = tensor.full_tensor().clone()
                    tensor.requires_grad_(grad)
                    with pytest.warns(GlobalValueWarning, match="counted once"):
                        call(tensor * 1 if grad else tensor)
                    assert torch.equal(tensor.full_tensor().detach(), before)
        return True

    assert run_ranks(2, left, place) == [True, True]


@pytest.mark.parametrize("name", PARTS)
def test_what_takes_parts_is_refused(name):
    def refused(name):
        warnings.simplefilter("ignore", category=FutureWarning)
        for place in PLACES:
            for grad in (False, True):
                if name == "pickled" and (place, grad) != ("sharded", False):
                    continue
                tensor = _spread(place).requires_grad_(grad)
                with contextlib.suppress(OperatorError):
                    PARTS[name](tensor * 1 if grad else tensor)
                    raise AssertionError((name, place, grad))
        PARTS[name](_spread("sharded"))

    raises_on_all(2, OperatorError, refused, name, match=r"full_tensor")


def test_ranks_outside_of_the_mesh_are_refused():
    def refused():
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = distribute_tensor(torch.ones(4), grid["tp"], [Shard(0)])
        dist.all_reduce(tensor, group=grid.get_group("dp"))

    with pytest.raises(Exception, match="outside of its mesh"):
        run_ranks(4, refused)

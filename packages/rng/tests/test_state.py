"""The generator's state: one on all ranks and meshes; ranks out of step are named."""

import pytest
import torch
import torch.nn.functional as F

import vescale_rng
from vescale_dtensor import Replicate, Shard, distribute_tensor
from vescale_testkit import assert_ranks_agree, mesh_of, raises_on_all, run_ranks

R, S = Replicate(), Shard


def drawn(mesh, placements):
    x = vescale_rng.randn(6, 10, device_mesh=mesh, placements=placements)
    return F.dropout(x, 0.3).full_tensor()


def test_a_state_resumes_on_another_mesh_and_world_size():
    def first():
        torch.manual_seed(3)
        drawn(mesh_of(2, 2), (S(0), S(1)))
        return vescale_rng.get_state(), drawn(mesh_of(2, 2), (S(0), S(1)))

    state, wanted = assert_ranks_agree(run_ranks(4, first))

    def second(sizes, placements):
        vescale_rng.set_state(state)
        return drawn(mesh_of(*sizes), placements)

    assert torch.equal(assert_ranks_agree(run_ranks(4, second, (4,), (S(1),))), wanted)
    assert torch.equal(assert_ranks_agree(run_ranks(2, second, (2,), (S(0),))), wanted)
    assert torch.equal(assert_ranks_agree(run_ranks(1, second, (1,), (R,))), wanted)


def test_a_generator_of_the_user_has_its_own_state():
    own = torch.Generator().manual_seed(1)
    state = vescale_rng.get_state(own)
    first = torch.rand(3, generator=own)
    vescale_rng.set_state(state, own)
    assert torch.equal(torch.rand(3, generator=own), first)


def test_fork_leaves_no_trace():
    def forked():
        mesh, before = mesh_of(4), vescale_rng.get_state()
        with vescale_rng.fork(seed=7) as generator:
            assert generator is torch.default_generator
            seeded = drawn(mesh, (S(0),))
        with vescale_rng.fork():
            followed = drawn(mesh, (S(0),))
        with pytest.raises(KeyError), vescale_rng.fork(seed=1):
            raise KeyError
        assert torch.equal(vescale_rng.get_state(), before)
        assert torch.equal(drawn(mesh, (S(0),)), followed)
        torch.manual_seed(7)
        assert torch.equal(drawn(mesh, (S(0),)), seeded)

    run_ranks(4, forked)


def test_ranks_in_step_pass():
    def in_step():
        for mesh, placements in ((mesh_of(2, 2), (S(0), S(1))), (mesh_of(4), (S(0),))):
            drawn(mesh, placements)
            vescale_rng.check_in_step(mesh)

    run_ranks(4, in_step)


def test_the_rank_that_drifted_is_named_with_the_draws_around_it():
    def drift():
        mesh = mesh_of(4)
        x = distribute_tensor(torch.ones(8, 8), mesh, (S(0),))
        torch.manual_seed(1)
        x.uniform_()
        if mesh.get_rank() == 2:
            torch.rand(1)
        x.normal_()
        if mesh.get_rank() == 1:
            torch.rand(1)
        vescale_rng.check_in_step(mesh)

    text = raises_on_all(4, vescale_rng.RandomStateError, drift, match="rank 2 drifted first")
    assert "uniform_ at " in text and "normal_ at " in text and "test_state.py" in text


def test_a_drift_after_the_last_draw():
    def drift():
        mesh = mesh_of(2, 2)
        distribute_tensor(torch.ones(8, 8), mesh, (S(0), R)).uniform_()
        if mesh.get_rank() == 3:
            torch.rand(1)
        vescale_rng.check_in_step(mesh)

    assert "this check" in raises_on_all(4, vescale_rng.RandomStateError, drift, match="rank 3 drifted first")

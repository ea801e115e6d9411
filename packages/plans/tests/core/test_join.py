"""Where a world's tensors lie, and who has which device: on machines that this one is not."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_dtensor import MeshError
from vescale_dtensor._communication import endings, namespace
from vescale_plans._apply import join


class Group(SimpleNamespace):
    """A process group with a backend per type of device."""

    def _get_backend(self, device):
        if device.type not in self.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: self.backends[device.type])

    __hash__ = object.__hash__


@pytest.fixture
def a_gpu(monkeypatch):
    """A machine that looks as if it had two GPUs; notes how the world is joined."""
    noted = {}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: noted.update(index=index))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: noted.update(backend=backend))
    monkeypatch.setattr(join.atexit, "register", lambda function: None)
    monkeypatch.setattr(join, "tell_endings", lambda: None)
    monkeypatch.setattr(join, "watch_for_hangs", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return noted


def torchrun(monkeypatch, local, ranks):
    for name, value in {"RANK": local, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))


def test_the_world_has_a_backend_for_the_host_and_for_the_device(a_gpu, monkeypatch):
    torchrun(monkeypatch, 1, 2)
    join.join()
    assert a_gpu == {"backend": "cpu:gloo,cuda:nccl", "index": 1}


def test_without_torchrun_a_line_says_which_device_is_used(a_gpu, capsys):
    join.join()
    assert a_gpu == {"backend": "cpu:gloo,cuda:nccl"}
    assert capsys.readouterr().err == "vescale: not started by torchrun: one rank, on cuda:1\n"


def test_more_ranks_than_devices_is_an_error_on_every_rank(a_gpu, monkeypatch):
    said = set()
    for local in range(4):
        torchrun(monkeypatch, local, 4)
        with pytest.raises(MeshError, match="4 ranks on a machine with 2 devices") as caught:
            join.join()
        said.add(str(caught.value))
    assert len(said) == 1 and not a_gpu


def test_ranks_that_are_shown_one_device_each_take_it(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    torchrun(monkeypatch, 3, 4)
    join.join()
    assert a_gpu["index"] == 0


@pytest.mark.parametrize(
    "backends, wanted",
    [
        ({"cuda": "nccl"}, "cuda"),  # what init_process_group() makes without a backend
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda"),
        ({"cpu": "gloo"}, "cpu"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu"),  # what init_process_group("gloo") makes
        ({"cpu": "fake", "cuda": "fake"}, "cpu"),
        ({"cpu": "gloo", "cuda": "some vendor's"}, "cuda"),
    ],
)
def test_tensors_lie_where_the_world_has_a_backend_of_its_own(a_gpu, monkeypatch, backends, wanted):
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group(backends=backends)))
    assert join.device_type() == wanted == join.choose_device(nn.Linear(2, 2))


@pytest.mark.parametrize("backends", [{"cpu": "gloo", "cuda": "gloo"}, {"cpu": "fake", "cuda": "fake"}])
def test_a_backend_of_both_leaves_it_to_the_model(a_gpu, monkeypatch, backends):
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group(backends=backends)))
    there = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))]))
    assert join.choose_device(there) == "cuda" == join.device_type()


def test_nothing_changes_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    noted = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: noted.append(backend))
    monkeypatch.setattr(join.atexit, "register", lambda function: None)
    monkeypatch.setattr(join, "tell_endings", lambda: None)
    monkeypatch.setattr(join, "watch_for_hangs", lambda: None)
    monkeypatch.setattr(os, "environ", {})
    join.join()
    assert noted == ["gloo"] and join.accelerator() == "cpu"


def test_a_world_that_a_thread_ends_meanwhile_is_no_error_at_the_end_of_the_program(monkeypatch):
    """`leave` asks whether another rank raised while a thread of its own ends the groups: the default one is gone."""
    word = SimpleNamespace(namespace=None, said=bytearray(16) + b"\1")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="a world"))
    monkeypatch.setattr(namespace, "_words", {"a world": word})
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        namespace.namespace()
    assert endings.raised_anywhere() is False

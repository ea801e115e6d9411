"""`vescale doctor` finds each fault that it is there to find, and says what mends it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import types
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from vescale import doctor
from vescale._machine import device_check, interfaces
from vescale.cli import app
from vescale.doctor import BAD, GOOD, NOTE, examine
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("vescale")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def _of(check):
    (finding, *_) = check()
    return finding


def test_this_environment_can_train(monkeypatch):
    with socket.socket() as free:
        free.bind(("", 0))
        number = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(number))
    examination = examine()
    assert examination.healthy, str(examination)
    assert str(examination).endswith("ready to train")
    assert {"python", "torch", "packages", "devices", "gloo", "network", "port", "threads", "shared memory",
            "open files", "clock"} <= {finding.check for finding in examination.findings}  # fmt: skip


def test_a_port_in_use_and_one_that_is_free_instead(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        finding = _of(doctor.port)
        assert finding.state == BAD and str(taken.getsockname()[1]) in finding.found
        instead = int(finding.fix.rpartition(" ")[2])
        with socket.socket() as other:
            other.bind(("", instead))


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope7")
    finding = _of(doctor.network)
    assert finding.state == BAD and "nope7" in finding.found and "export GLOO_SOCKET_IFNAME=" in finding.fix
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    assert _of(doctor.network).state != BAD


def test_an_interface_that_is_down(monkeypatch):
    """It is never advised, is said to be down, and is a fault where it is named."""
    monkeypatch.setattr(
        socket, "if_nameindex", lambda: [(1, "lo"), (2, "ifb0"), (3, "eth7"), (4, "eth8"), (5, "veth9")]
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    monkeypatch.setattr(interfaces, "is_up", lambda name: name != "ifb0")
    for with_address, advised in ((("eth7", "eth8"), "eth7"), (("lo", "eth8", "veth9"), "eth8"), (("lo",), "eth7")):
        monkeypatch.setattr(interfaces, "has_address", lambda name, ones=with_address: name in ones)
        finding = _of(doctor.network)
        assert finding.fix.endswith(f"GLOO_SOCKET_IFNAME={advised}") and "ifb0 (down), eth7, eth8" in finding.found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ifb0")
    finding = _of(doctor.network)
    assert finding.state == BAD and "names ifb0, which is down" in finding.found and finding.fix.endswith("=eth7")


def test_interfaces_as_the_system_has_them():
    assert interfaces.is_up("lo") and interfaces.has_address("lo") and not interfaces.has_address("nope7")
    for name in interfaces.names():
        with open(f"/sys/class/net/{name}/flags") as flags:
            assert interfaces.is_up(name) is bool(int(flags.read(), 16) & 1), name


def test_the_version_is_said():
    said = CliRunner().invoke(app, ["--version"])
    assert said.exit_code == 0
    assert said.output == f"vescale {metadata.version('vescale')}, torch {torch.__version__}\n"


def test_a_host_name_without_an_address(monkeypatch):
    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    finding = _of(doctor.network)
    assert finding.state == BAD and "/etc/hosts" in finding.fix


def test_packages_of_other_versions(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.9" if name == "vescale-rng" else real(name))
    finding = _of(doctor.packages)
    (supported,) = {one.removeprefix("vescale-rng") for one in metadata.requires("vescale") if "vescale-rng" in one}
    assert finding.state == BAD and finding.found == f"vescale-rng 0.0.9, not {supported}"
    assert finding.fix == f'pip install "vescale=={real("vescale")}"'


@pytest.mark.parametrize(
    "version, state",
    [("2.9.1", BAD), ("2.11.0", GOOD), ("2.13.0+cpu", GOOD), ("2.15.1", GOOD), ("2.16.0", NOTE)],
)
def test_torch_of_other_versions(monkeypatch, version, state):
    monkeypatch.setattr(torch, "__version__", version)
    assert {finding.check: finding.state for finding in doctor.python_and_torch()}["torch"] == state


def _driver():
    """nvidia-ml-py's module, of a machine with one GPU."""
    return types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda card: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda card: types.SimpleNamespace(free=130 << 30, total=140 << 30),
    )


def test_gpus_that_torch_cannot_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _driver())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = _of(doctor.devices)
    assert finding.state == BAD and "the driver has 1 GPU" in finding.found and "CUDA" in finding.fix
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "NVIDIA H200, 130 of 140 GiB free" in _of(doctor.devices).found


def test_little_shared_memory_few_files_and_too_many_threads(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=64 << 20))
    assert "--shm-size" in _of(doctor.shared_memory).fix
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 8192))
    assert _of(doctor.open_files).fix == "ulimit -n 8192"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert _of(doctor.threads).state == GOOD
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _of(doctor.threads).fix == "export OMP_NUM_THREADS=2"


def test_what_cannot_be_read_is_a_finding(monkeypatch):
    def broken(path):
        raise FileNotFoundError(2, "no such folder", path)

    monkeypatch.setattr(shutil, "disk_usage", broken)
    (finding,) = [each for each in examine().findings if each.check == "shared memory"]
    assert finding.state == BAD and "FileNotFoundError" in finding.found


def test_the_command(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope7")
    said = CliRunner().invoke(app, ["doctor"])
    assert said.exit_code == 1 and "fix: export GLOO_SOCKET_IFNAME=" in said.output
    said = CliRunner().invoke(app, ["doctor", "--json"])
    assert {"check", "state", "found", "fix"} == set(json.loads(said.output)[0])


def _alike(odd):
    import torch.distributed as dist

    if odd and dist.get_rank() == 1:
        torch.__version__ = "2.12.0"
    try:
        return [(each.check, each.state, each.found) for each in doctor.between_ranks()]
    finally:
        torch.__version__ = torch.version.__version__


def test_ranks_that_differ_are_named_on_all_of_them():
    for found in run_ranks(2, _alike, False):
        assert found[0][:2] == ("ranks", GOOD) and all(state == GOOD for _, state, _ in found)
    first, second = run_ranks(2, _alike, True)
    assert first == second
    (wrong,) = [found for check, state, found in first if state == BAD]
    assert wrong.endswith("on ranks 0; 2.12.0 on ranks 1")


def test_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = subprocess.run([*command, "-m", "vescale", "doctor"], capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.count("2 reach each other, on 1 machine(s)") == 1


def test_groups_that_are_tried_are_the_axes_of_meshes():
    assert device_check.lines(4, 4) == {"the world": [[0, 1, 2, 3]]}
    assert device_check.lines(4, 2) == {
        "the world": [[0, 1, 2, 3]],
        "each machine": [[0, 1], [2, 3]],
        "one rank per machine": [[0, 2], [1, 3]],
    }


@in_turns(3)
def test_accelerators_are_tried_by_their_own_backend():
    def run():
        return [(one.check, one.state, one.found) for one in doctor.between_ranks() if one.check == "second"]

    found = run_ranks(2, run, device="second", timeout=120)
    said = "an all-reduce over the world; a send and a receive between neighbours"
    assert found == [[("second", "good", said)]] * 2


def test_a_collective_that_hangs_is_named_within_its_bound():
    def run():
        before, device_check.waited = device_check.waited, lambda works: before(works) or "not done after 30 s"
        try:
            return [(one.state, one.found) for one in doctor.between_ranks() if one.check == "second"]
        finally:
            device_check.waited = before

    ((state, said),) = run_ranks(2, run, device="second", timeout=120)[1]
    assert state == "bad" and said == "an all-reduce over the world failed on rank 0: not done after 30 s (2 ranks)"


def test_a_rank_that_does_not_join_a_collective_is_found_within_the_bound():
    def run():
        import torch.distributed as dist

        done = types.SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
        bound, device_check.BOUND_S, joins = device_check.BOUND_S, 1.0, dist.all_reduce
        if dist.get_rank() == 1:
            dist.all_reduce = lambda *args, **kwargs: done
        try:
            return [(one.state, one.found) for one in doctor.between_ranks() if one.check == "second"]
        finally:
            device_check.BOUND_S, dist.all_reduce = bound, joins

    for found in run_ranks(2, run, device="second", timeout=120):
        said = "an all-reduce over the world failed on rank 0: not done after 1 s (2 ranks)"
        assert found == [("bad", said)]


def test_groups_of_every_mesh_axis_are_tried():
    def run():
        before = os.environ.get("LOCAL_WORLD_SIZE")
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # as of two machines
        try:
            return [(one.state, one.found) for one in doctor.between_ranks() if one.check == "second"]
        finally:
            os.environ.pop("LOCAL_WORLD_SIZE")
            os.environ |= {} if before is None else {"LOCAL_WORLD_SIZE": before}

    (found, *others) = run_ranks(4, run, device="second", timeout=120)
    assert all(other == found for other in others) and found[0][0] == "good", found
    for name in ("the world", "each machine", "one rank per machine", "a send and a receive between neighbours"):
        assert name in found[0][1], found

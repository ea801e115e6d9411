"""The second device and its process group: what a GPU and NCCL refuse, delay or count, they do."""

import contextlib
import json
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_testkit import RankError, WorldStartError, in_turns, mesh_of, raises_on_all, run_ranks
from vescale_testkit.second import _queue, _work, host_waits

DEVICE = "second"
# torch 2.11 has them under the names that 2.13 warns of
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def on_one(function, *args, **kwargs):
    return run_ranks(1, function, *args, device=DEVICE, **kwargs)[0]


def on_two(function, *args, **kwargs):
    return run_ranks(2, function, *args, device=DEVICE, **kwargs)


def refused(match, function, *, world=2, error=Exception):
    """The message of what all ranks raise."""
    return raises_on_all(world, error, function, match=match, device=DEVICE)


# --- the device


@in_turns(3)
def test_computes_what_the_cpu_does():
    def differences():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        x = torch.randn(5, 8)
        found = []
        for device in ("cpu", DEVICE):
            model.to(device)
            model.zero_grad()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            loss = model(x.to(device)).square().sum()
            loss.backward()
            optimizer.step()
            found.append([loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters())])
            found[-1] += [optimizer.state[p]["exp_avg_sq"].cpu() for p in model.parameters()]
        return [(one - other).abs().max().item() for one, other in zip(*found)]

    assert not any(on_one(differences))


def test_refuses_tensors_of_two_devices_as_cuda_does():
    def attempts():
        there, here = torch.randn(4, 5, device=DEVICE), torch.randn(5, 3)
        messages = []
        calls = [
            lambda: there @ here,
            lambda: torch.cat([there, torch.randn(1, 5)]),
            lambda: there.add_(torch.randn(4, 5)),
            lambda: nn.functional.embedding(torch.tensor([1, 2]), there),
            lambda: there.set_(torch.randn(3).untyped_storage()),
            lambda: torch.randn(2, device=DEVICE, generator=torch.Generator()),
        ]
        for call in calls:
            try:
                call()
                messages.append("accepted")
            except RuntimeError as error:
                messages.append(str(error))
        scalar = (there * torch.tensor(2.0)).sum() + there[torch.tensor([0, 1])].sum()  # as CUDA does
        return messages, scalar.device.type

    messages, device = on_one(attempts)
    assert device == DEVICE
    assert all(DEVICE in message for message in messages), messages


OUT_OF_BOUNDS = """
import torch
from vescale_testkit.second import register

register()
table, index = torch.randn(3, 2, device="second"), torch.tensor([1, 7], device="second")
for attempt in (
    lambda: table[index],
    lambda: torch.nn.functional.embedding(index, table),
    lambda: torch.nn.functional.cross_entropy(table, torch.tensor([0, 1, 2], device="second")),
    lambda: table + 1,
):
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


def test_an_index_out_of_bounds_is_the_end_of_the_device_in_this_process():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", OUT_OF_BOUNDS], env=environment, capture_output=True, text=True, check=True
    )
    said = ran.stdout.splitlines()
    assert len(said) == 4 and len(set(said)) == 1, ran.stdout
    assert "device-side assert triggered: aten::index.Tensor" in said[0]


def test_a_module_moves_in_place_and_keeps_its_ties():
    def moved():
        model = nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)])
        model[1].weight = model[0].weight
        before = model[0].weight
        model.to(DEVICE)
        return before is model[0].weight is model[1].weight, before.device.type

    assert on_one(moved) == (True, DEVICE)


def test_views_alias_and_storages_grow():
    def values():
        x = torch.zeros(4, 6, device=DEVICE)
        x[1:3].transpose(0, 1).add_(1)
        x.view(2, 2, 6).unfold(2, 2, 2)[0, 0].fill_(5)
        storage = torch.empty(8, device=DEVICE)
        storage.untyped_storage().resize_(0)
        storage.untyped_storage().resize_(32)
        storage.fill_(2)
        grown = torch.empty(0, device=DEVICE)
        torch.add(torch.ones(3, device=DEVICE), 1, out=grown)
        return x.cpu(), storage.sum().item(), grown.cpu()

    x, total, grown = on_one(values)
    expected = torch.zeros(4, 6)
    expected[1:3] = 1
    expected[0] = 5
    assert torch.equal(x, expected)
    assert total == 16
    assert grown.tolist() == [2, 2, 2]


def test_fresh_memory_is_not_zero():
    assert on_one(lambda: bool(torch.empty(64, device=DEVICE).any()))


def test_backward_runs_on_a_thread_of_the_device():
    def threads():
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        found = []
        x.register_hook(lambda grad: found.append(threading.get_ident()))
        x.sum().backward()
        return found[0] != threading.get_ident()

    assert on_one(threads)


def test_random_numbers_are_the_cpus_from_a_generator_of_its_own():
    def drawn():
        found = []
        for device in ("cpu", DEVICE):
            torch.manual_seed(3)
            values = [torch.dropout(torch.ones(999, device=device), 0.1, True), torch.randn(5, device=device)]
            values += [torch.randperm(7, device=device), torch.randint(9, (4,), device=device)]
            found.append([value.cpu() for value in values])
        same = [torch.equal(one, other) for one, other in zip(*found)]
        before = torch.get_rng_state()
        torch.rand(3, device=DEVICE)
        apart = torch.equal(before, torch.get_rng_state())
        state = torch.second.get_rng_state()
        first = torch.rand(3, device=DEVICE)
        torch.second.set_rng_state(state)
        return same, apart, torch.equal(first, torch.rand(3, device=DEVICE))

    assert on_one(drawn) == ([True] * 4, True, True)


def test_counts_what_the_host_waits_for_by_call_site():
    def waiting():
        x = torch.arange(6.0, device=DEVICE)
        pinned = torch.ones(3).pin_memory()
        down = torch.empty(6).pin_memory()
        with host_waits() as found:
            x.sum().item()
            x.cpu()
            x[x > 2]
            torch.nonzero(x)
            bool((x > 0).all())
            torch.equal(x, x)
            torch.tensor([1.0, 2.0], device=DEVICE)
            torch.accelerator.synchronize()
        with host_waits() as none:
            (x * 2 + 1).relu().max()
            x[x > 2] = 0
            torch.full((3,), 1.5, device=DEVICE)
            pinned.to(DEVICE, non_blocking=True)
            down.copy_(x, non_blocking=True)
            torch.accelerator.current_stream().record_event()
        return dict(found.sites), dict(none.sites)

    found, none = on_one(waiting)
    site = "test_second_device.py:waiting"
    assert none == {}
    assert found == {
        f"item  {site}": 2,
        f"copy to the host  {site}": 1,
        f"index by a mask  {site}": 1,
        f"nonzero  {site}": 1,
        f"equal  {site}": 1,
        f"copy from the host  {site}": 1,
        f"synchronize the device  {site}": 1,
    }


def test_waits_within_backward_are_counted_on_its_thread():
    def waiting():
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        x.register_hook(lambda grad: print(end=str(grad.sum().item())[:0]))
        with host_waits() as found:
            x.sum().backward()
        return found.total

    assert on_one(waiting) == 1


def test_a_wait_that_no_function_of_python_asked_for_is_counted():
    def waiting():
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        with host_waits() as found:
            x.prod().backward()  # where x is zero: nonzero(), on autograd's thread, from C++
        return dict(found.sites)

    assert on_one(waiting) == {"nonzero  autograd": 1}


def test_without_a_compiler_one_sentence_says_so(monkeypatch, tmp_path):
    from vescale_testkit.second import _build

    monkeypatch.setattr(_build, "_folders", lambda: [tmp_path])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(_build.BuildError, match=r"no compiler: install g\+\+"):
        _build.library()
    assert issubclass(WorldStartError, RuntimeError)


# --- the process group: what it computes


def test_collectives_give_what_gloos_do():
    def results(device):
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.arange(8.0, device=device).add_(rank)
        total = x.clone()
        dist.all_reduce(total)
        largest = x.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        gathered = x.new_empty(size * 8)
        all_gather_single(gathered, x)
        listed = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(listed, x)
        part = x.new_empty(8 // size)
        reduce_scatter_single(part, x)
        exchanged = x.new_empty(4 + 2 * rank if size == 2 else 8)
        splits = ([2 + rank, 2 + rank], [2, 3]) if size == 2 else ([8 // size] * size, [8 // size] * size)
        dist.all_to_all_single(exchanged, x[: sum(splits[1])].clone(), *splits)
        root = x.clone()
        dist.broadcast(root, size - 1)
        at_root = [torch.empty_like(x) for _ in range(size)]
        dist.gather(x, at_root if rank == 0 else None, 0)
        scattered = torch.empty_like(x)
        dist.scatter(scattered, [x + other for other in range(size)] if rank == 0 else None, 0)
        objects = [None] * size
        dist.all_gather_object(objects, rank)
        dist.barrier(device_ids=[0] if device == DEVICE else None)
        values = [total, largest, gathered, *listed, part, exchanged, root, scattered, *(at_root if rank == 0 else [])]
        return [value.cpu() for value in values], objects

    for size in (1, 2, 4):
        there = run_ranks(size, results, DEVICE, device=DEVICE)
        here = run_ranks(size, results, "cpu")
        for (ours, objects), (gloos, others) in zip(there, here):
            assert objects == others == list(range(size))
            assert all(torch.equal(one, other) for one, other in zip(ours, gloos))


def test_groups_of_a_mesh_are_communicators_of_their_own():
    def sums():
        mesh = mesh_of(2, 2, names=("dp", "tp"))
        found = []
        for name in ("tp", "dp"):
            x = torch.tensor([float(dist.get_rank())], device=mesh.device_type)
            dist.all_reduce(x, group=mesh.get_group(name))
            found.append(x.item())
        return found

    assert run_ranks(4, sums, device=DEVICE) == [[1, 2], [1, 4], [5, 2], [5, 4]]


def test_sends_and_receives():
    def exchanged():
        rank = dist.get_rank()
        mine, theirs = torch.full((3,), float(rank), device=DEVICE), torch.empty(3, device=DEVICE)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, theirs, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
        )
        for work in works:
            work.wait()
        if rank:
            dist.send(mine + 5, 0)
        else:
            dist.recv(mine, 1)
        return theirs.tolist(), mine.tolist()

    assert on_two(exchanged) == [([1, 1, 1], [6, 6, 6]), ([0, 0, 0], [1, 1, 1])]


# --- the process group: its manners


def test_outputs_are_poison_until_the_wait():
    def seen():
        x = torch.ones(4, device=DEVICE)
        out, ints = torch.zeros(8, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
        works = [all_gather_single(out, x, async_op=True), dist.all_reduce(ints, async_op=True)]
        early = out.cpu().isnan().all().item(), ints.cpu().max().item()
        for work in works:
            work.wait()
        return early, out.cpu().tolist(), ints.cpu().tolist()

    for (poison, number), out, ints in on_two(seen):
        assert poison and number < -(1 << 40)
        assert out == [1] * 8
        assert ints == [0] * 4


def test_each_wait_delivers_its_own():
    def seen():
        first, second = torch.ones(2, device=DEVICE), torch.ones(3, device=DEVICE)
        one, other = dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)
        other.wait()
        late = first.isnan().all().item(), second.tolist()
        one.wait()
        return *late, first.tolist()

    assert on_two(seen) == [(True, [2, 2, 2], [2, 2])] * 2


def test_without_async_op_the_result_is_there_for_what_comes_next():
    def seen():
        x = torch.ones(2, device=DEVICE)
        options = dist.AllreduceOptions()
        options.asyncOp = False
        dist.group.WORLD.allreduce([x], options)
        return x.tolist()

    assert on_two(seen) == [[2, 2]] * 2


def test_an_in_place_gather_keeps_its_own_part_readable():
    def seen():
        rank = dist.get_rank()
        out = torch.full((4,), float(rank), device=DEVICE)
        work = all_gather_single(out, out[2 * rank : 2 * rank + 2], async_op=True)
        early = out.isnan().tolist()
        work.wait()
        return early, out.tolist()

    expected = [0, 0, 1, 1]
    assert on_two(seen) == [([False, False, True, True], expected), ([True, True, False, False], expected)]


@pytest.mark.parametrize("what", ["input", "output", "in place", "sent", "received", "batch"])
def test_memory_in_flight_that_was_written_is_an_error_that_says_so(what):
    def overwrite():
        peer = 1 - dist.get_rank()
        x, out = torch.ones(4, device=DEVICE), torch.ones(8, device=DEVICE)
        if what in ("input", "output"):
            work = all_gather_single(out, x, async_op=True)
        elif what == "in place":
            work = dist.all_reduce(x, async_op=True)
        elif what == "batch":
            kinds = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out[:4], peer)]
            (work,) = dist.batch_isend_irecv(kinds)
        else:
            send = (what == "sent") == (peer == 1)
            work = dist.isend(x, peer) if send else dist.irecv(x, peer)
        (out if what == "output" else x).add_(1)
        work.wait()

    with pytest.raises(RankError, match=r"was written while it was in flight"):
        on_two(overwrite)


def test_what_nobody_waited_for_is_an_error_at_the_end():
    def leave():
        dist.all_reduce(torch.ones(4, device=DEVICE), async_op=True)

    refused(r"never waited for:\s+all_reduce\(sum of float32\[4\]\).*test_second_device.py:leave", leave)


def test_collectives_in_another_order_name_both():
    def differ():
        x = torch.ones(4, device=DEVICE)
        if dist.get_rank():
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 0)

    message = refused("different collectives", differ)
    assert "rank 0  broadcast(float32[4] from 0)" in message
    assert "rank 1  all_reduce(sum of float32[4])" in message


@pytest.mark.parametrize("kind", ["size", "dtype", "op"])
def test_collectives_of_other_tensors_name_both(kind):
    def differ():
        odd = dist.get_rank() == 1
        x = torch.ones(
            5 if odd and kind == "size" else 4, dtype=torch.float64 if odd and kind == "dtype" else None, device=DEVICE
        )
        dist.all_reduce(x, dist.ReduceOp.MAX if odd and kind == "op" else dist.ReduceOp.SUM)

    refused("different collectives", differ)


def test_two_receives_that_face_each_other_are_a_deadlock():
    def wait():
        x = torch.ones(4, device=DEVICE)
        peer = 1 - dist.get_rank()
        receive = dist.irecv(x, peer)
        send = dist.isend(torch.ones(4, device=DEVICE), peer)
        receive.wait()
        send.wait()

    message = refused("a deadlock on NCCL", wait)
    assert "rank 0  recv(float32[4]) from rank 1" in message


def test_tags_find_nothing():
    def crossed():
        rank = dist.get_rank()
        small, large = torch.ones(2, device=DEVICE), torch.ones(3, device=DEVICE)
        if rank:
            works = [dist.irecv(large, 0, tag=2), dist.irecv(small, 0, tag=1)]
        else:
            works = [dist.isend(small, 1, tag=1), dist.isend(large, 1, tag=2)]
        for work in works:
            work.wait()

    refused("what is sent is not what is received", crossed)


def test_a_send_ends_when_its_receive_was_reached():
    def early():
        rank = dist.get_rank()
        x = torch.ones(4, device=DEVICE)
        store = dist.distributed_c10d._get_default_store()
        store.delete_key("reached")
        if rank:
            store.get("sent")
            work = dist.irecv(x, 0)
        else:
            work = dist.isend(x, 1)
            before = any(work.is_completed() for _ in range(50))
            store.set("sent", "")
            work.wait()
            return before
        work.wait()
        return False

    assert on_two(early) == [False, False]


def test_a_send_waits_for_its_turn_in_the_queue_of_the_pair():
    """Rank 0 receives and then sends, rank 1 sends twice and receives: its second send never meets a receive."""

    def crossed():
        one, other = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
        if dist.get_rank():
            works = [dist.isend(one, 0), dist.isend(other, 0)]
        else:
            works = [dist.irecv(one, 1), dist.isend(other, 1)]
        for work in works:
            work.wait()

    refused("a deadlock on NCCL", crossed)


def test_a_wait_with_a_bound_and_a_barrier_block_the_host():
    from datetime import timedelta

    def waits():
        x = torch.ones(2, device=DEVICE)
        with host_waits() as found:
            dist.all_reduce(x, async_op=True).wait()
            dist.all_reduce(x)
        quiet = found.total
        with host_waits() as found:
            dist.all_reduce(x, async_op=True).wait(timedelta(seconds=5))
            dist.barrier(device_ids=[0])
        return quiet, sorted(site.split("  ")[0] for site in found.sites)

    assert on_two(waits) == [(0, ["barrier", "wait(timeout)"])] * 2


@pytest.mark.parametrize("what", ["cpu", "strided", "int16", "uint16"])
def test_takes_what_nccl_takes(what):
    def attempt():
        x = {
            "cpu": lambda: torch.ones(4),
            "strided": lambda: torch.ones(4, 4, device=DEVICE)[:, 0],
            "int16": lambda: torch.ones(4, dtype=torch.int16, device=DEVICE),
            "uint16": lambda: torch.ones(4, dtype=torch.uint16, device=DEVICE),
        }[what]()
        dist.broadcast(x, 0)

    matches = {"cpu": "No backend type associated with device type cpu", "strided": "must be contiguous"}
    refused(matches.get(what, "not supported for NCCL"), attempt)


def test_who_waits_too_long_is_told_for_what():
    def alone():
        if dist.get_rank() == 0:
            with mock.patch.object(_work, "HANG_SECONDS", 0.3):
                dist.all_reduce(torch.ones(4, device=DEVICE))

    with pytest.raises(RankError, match=r"waited 0.3 s for all_reduce\(sum of float32\[4\]\)[\s\S]*not there  rank 1"):
        on_two(alone)


def test_abort_ends_what_is_pending_here_and_nothing_elsewhere():
    def aborted():
        group = dist.new_group([0, 1])
        if dist.get_rank():
            return "not called"
        work = dist.all_reduce(torch.ones(4, device=DEVICE), group=group, async_op=True)
        threading.Timer(0.1, group.abort).start()
        try:
            work.wait()
        except _queue.DeviceError as error:
            return str(error)

    assert on_two(aborted) == ["second: NCCL communicator was aborted on this rank", "not called"]


def test_to_destroy_a_group_with_something_pending_hangs_until_the_bound():
    def destroyed():
        group = dist.new_group([0, 1])
        if dist.get_rank():
            return ""
        dist.all_reduce(torch.ones(4, device=DEVICE), group=group, async_op=True)
        try:
            with mock.patch.object(_work, "HANG_SECONDS", 0.3):
                dist.destroy_process_group(group)
        except _queue.DeviceError as error:
            return str(error)

    hung, _ = on_two(destroyed)
    assert "hangs while something is queued" in hung and "all_reduce" in hung


def test_many_megabytes_both_ways_at_once():
    def total():
        x = torch.ones(1 << 20, device=DEVICE)
        works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(4)]
        for work in works:
            work.wait()
        dist.all_reduce(x)
        return x.sum().item()

    assert on_two(total) == [2.0 * (1 << 20)] * 2


# --- other users of the machine

STRANGER = 65534


def may_be_others():
    """Whether this is root, and other users exist here: a sandbox may map one alone."""
    if os.geteuid() != 0:
        return False
    mapped = [line.split() for line in pathlib.Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= STRANGER < int(first) + int(count) for first, _, count in mapped)


def as_stranger(act):
    """Runs `act` in a process of another user; only root may."""
    child = os.fork()
    if not child:
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        with contextlib.suppress(BaseException):
            act()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not may_be_others(), reason="only root can act as another user, where there is one")
def test_what_a_stranger_sends_is_not_read():
    from vescale_testkit.second import _wire

    arrived = threading.Event()
    ours, other = _wire.Wire(arrived.set), _wire.Wire(lambda: None)

    def send():
        with socket.socket(socket.AF_UNIX) as to:
            to.connect("\0" + ours.address)
            head = json.dumps(("key", "a stranger's")).encode()
            to.sendall(_wire._LENGTHS.pack(len(head), 0) + head)
            to.shutdown(socket.SHUT_WR)
            assert to.recv(1) == b""  # it was read to its end, and dropped

    as_stranger(send)
    assert not arrived.is_set() and not ours.has("key")
    other.send(ours.address, ("key", (1, "a")), ("kind", "a 'label'\n", 3), b"bytes")
    assert arrived.wait(30) and ours.take(("key", (1, "a"))) == (("kind", "a 'label'\n", 3), b"bytes")


def test_what_a_message_holds_is_data_and_no_code(tmp_path):
    from vescale_testkit.second import _wire

    for head in (
        pickle.dumps((1, pathlib.Path())),
        b"__import__('os').mkdir(" + repr(str(tmp_path / "x")).encode() + b")",
    ):
        ours = _wire.Wire(lambda: None)
        near, far = socket.socketpair()
        near.sendall(_wire._LENGTHS.pack(len(head), 0) + head)
        near.close()
        with pytest.raises((ValueError, SyntaxError)):
            ours._read(far)
        assert not ours._messages and not (tmp_path / "x").exists()


@pytest.mark.skipif(not may_be_others(), reason="only root can act as another user, where there is one")
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_folder_that_others_can_write_to_holds_no_library(monkeypatch, tmp_path, how):
    from vescale_testkit.second import _build

    named, other = tmp_path / "named", tmp_path / "other"
    other.mkdir()
    (other / f"{_build.MODULE}-{_build._fingerprint()}.so").write_text("a stranger's")
    if how == "mode":
        other.chmod(0o777)
    else:
        os.chown(other, STRANGER, STRANGER)
    if how == "link":
        named.symlink_to(other)
    else:
        other.rename(named)
    monkeypatch.setattr(_build, "_compile", lambda folder, target: target.write_text("built"))
    monkeypatch.setattr(_build, "_folders", lambda: [named])
    with pytest.raises(_build.BuildError, match="this user's alone"):
        _build.library()
    monkeypatch.setattr(_build, "_folders", lambda: [named, tmp_path / "own", tmp_path / "next"])
    assert _build.library().read_text() == "built" and _build.library().parent == tmp_path / "own"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "next").exists()  # a place is made only where no better one is

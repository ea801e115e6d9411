"""What ranks tell each other: how many requests it takes, and how every wait ends."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from vescale_checkpoint import CheckpointError, load, save
from vescale_checkpoint.sync import _presence, _sync
from vescale_checkpoint.sync._presence import Presence
from vescale_checkpoint.sync._sync import Session, _packed, _unpacked, forget_finished
from vescale_dtensor import Shard, distribute_tensor
from vescale_testkit import in_turns, mesh_of, run_ranks

RANKS = 4096


class Counted:
    """A store in this process, as torch's server answers; counts the requests of each client."""

    def __init__(self):
        self.values, self.counts, self.client = {}, {}, None

    def of(self, client):
        return Client(self, client)

    def requests(self):
        found, self.counts = self.counts, {}
        return found


class Client:
    def __init__(self, store, name):
        self._store, self._name = store, name

    def _counted(self):
        counts = self._store.counts
        counts[self._name] = counts.get(self._name, 0) + 1
        return self._store.values

    def has_extended_api(self):
        return True

    def set(self, key, value):
        self._counted()[key] = value if isinstance(value, bytes) else value.encode()

    def multi_set(self, keys, values):
        self._counted().update((key, value.encode()) for key, value in zip(keys, values, strict=True))

    def get(self, key):
        return self._counted()[key]

    def multi_get(self, keys):
        values = self._counted()
        return [values[key] for key in keys]

    def check(self, keys):
        values = self._counted()
        return all(key in values for key in keys)

    def delete_key(self, key):
        del self._counted()[key]

    def compare_set(self, key, expected, desired):
        values = self._counted()
        if key in values or expected == "":
            return values.setdefault(key, desired.encode())
        return expected.encode()


def gathered(sessions, name, payload_of):
    """A gather of all: everyone offers, rank 0 collects and answers, everyone is answered (unpacked for a few)."""
    for session in sessions[1:]:
        session._offer(name, payload_of(session.rank))
    first = sessions[0].gather(name, payload_of(0))
    found = [session._answered(name, payload_of(session.rank)) for session in sessions[1:]]
    assert len(set(found)) == 1 and _unpacked(found[0]) == first
    return first


def test_three_requests_per_rank_and_gather_at_4096_ranks(monkeypatch):
    monkeypatch.setattr(_sync, "_unpacked", bytes)  # 4,096 lists of 4,096
    store, made = Counted(), []
    _sync._finished.clear()
    for number in range(2):
        sessions = [Session("save", rank, RANKS, store.of(rank), number) for rank in range(RANKS)]
        store.requests()
        payloads = [lambda r: b"x" * 150, lambda r: b"rank %d" % r, lambda r: b"%d" % (r // 64)]
        for name, payload_of in zip(("same", "each", "stages"), payloads):
            assert gathered(sessions, name, payload_of) == [payload_of(rank) for rank in range(RANKS)]
        for session in sessions[1:]:
            session.to_first("done", b"bye")
        assert sessions[0].to_first("done", b"bye") == [b"bye"] * RANKS
        if made:  # what the first session left is deleted in the second, by those who wrote it
            for session in made:
                _sync._finished.append(session)
                forget_finished(session)
        else:
            made = sessions
    counts = store.requests()
    gathers = 4
    assert set(counts) == set(range(RANKS)) and max(counts.values()) <= 3 * gathers
    answers = [value for key, value in store.values.items() if "/answer/" in key]
    assert max(map(len, answers)) < 100_000 and min(map(len, answers)) < 300  # equal payloads are told once
    assert not [key for key in store.values if key.startswith("vescale_checkpoint/0/")]


def test_three_requests_per_rank_and_beat_at_4096_ranks():
    store = Counted()
    ranks = [Presence(store.of(rank), rank, RANKS) for rank in range(RANKS)]
    ranks[0].store.multi_set([f"{_presence._ROOT}/{rank}" for rank in range(RANKS)], ["\0"] * RANKS)
    for presence in ranks:
        presence.enter(0, "save")
    for _ in range(2):
        store.requests()
        for presence in ranks:
            presence.beat()
            presence.watch()
        counts = store.requests()
        assert set(counts) == set(range(RANKS)) and max(counts.values()) <= 2
    assert all(ranks[0].last(rank).operation == "save" for rank in range(1, RANKS)) and ranks[7].last(0) is not None


def test_a_beat_from_before_the_first_rank_began_is_seen():
    """It may be the last one of a rank that died since."""
    store = Counted()
    first, early = (Presence(store.of(rank), rank, 3) for rank in (0, 1))
    early.enter(0, "save")
    early.beat()
    first.begin()
    try:
        first.watch()
        assert first.last(1).operation == "save" and first.last(2) is None
    finally:
        first.end()


@pytest.mark.parametrize("is_back", [False, True])
def test_who_died_at_an_operations_end_is_not_waited_for_again_in_the_next(is_back):
    store = Counted()
    first, other = (Presence(store.of(rank), rank, 2) for rank in (0, 1))
    other.enter(0, "save")
    other.beat()
    first.enter(0, "save")
    first.watch()
    first.watched += _presence.SILENT_S + 0.1
    assert "fell silent" in first.reason_against(1, 7.0)
    first.leave()  # all had succeeded
    first.enter(1, "save")
    assert first.reason_against(1, 0.1) is None  # what it knows is of before
    if is_back:  # it was only stopped
        other.enter(1, "save")
        other.beat()
    first.watch()
    assert (first.reason_against(1, 0.1) is None) == is_back


@pytest.mark.parametrize("values", [[b""] * 5, [b"a", b"a", b"b", b"a"], [b"%d:[" % i for i in range(9)], [b"", b"\0"]])
def test_payloads_are_packed_and_unpacked(values):
    assert _unpacked(_packed(values)) == values


def test_large_payloads_and_every_rank_hears_all(tmp_path):
    def run():
        found = []
        for size in (0, 10, (4 << 20) + 1, 9 << 20):
            with _sync.session_of("test") as session:
                found.append([len(set(v)) <= 1 and len(v) for v in session.gather("a", bytes([session.rank]) * size)])
                assert session.agree("b", b"%d" % (session.rank // 2)) == [2]
        return found

    assert run_ranks(3, run) == [[[0] * 3, [10] * 3, [(4 << 20) + 1] * 3, [9 << 20] * 3]] * 3


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_other_stores_of_torch(tmp_path, kind):
    """A file on a shared disk, which reads no two keys at once; and one of a single process."""
    store = dist.FileStore(str(tmp_path / "store"), 2) if kind == "file" else dist.HashStore()
    assert _presence.peek(store, "nothing") is None
    found = {}

    def run(rank):
        session = Session("save", rank, 2, store, 0)
        found[rank] = session.gather("a", b"%d" % rank), session.to_first("b", b"x")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: ([b"0", b"1"], [b"x", b"x"]), 1: ([b"0", b"1"], None)}
    _sync._finished.clear()


# --- who is not there ----------------------------------------------------------------


def state_of(step):
    value = torch.arange(24.0).view(6, 4) + step
    return {"w": distribute_tensor(value, mesh_of(dist.get_world_size()), [Shard(0)]), "step": step}


def timed(call):
    """The error's text, and after how many seconds it came."""
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value), time.monotonic() - started


def alone(rank, path, who, how):
    """`who` saves or loads; the other is at a line of its own."""
    _presence.PATIENCE_S = 2.0
    state = state_of(1)
    if how != "first":
        save(path, state)
    if rank == who:
        call = (lambda: load(path, state)) if how == "load" else (lambda: save(path, state | {"step": 2}))
        found = timed(call)
        dist.barrier()
        return found
    dist.barrier()  # HERE IT STANDS
    return None


@in_turns(3)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["first", "second", "load"])
def test_save_on_one_rank_alone_says_who_is_where(tmp_path, start_world, who, how):
    answers = start_world(2, alone, tmp_path, who, how).answers()
    assert [answer[0] for answer in answers] == ["returned"] * 2, answers
    text, seconds = answers[who][1]
    assert seconds < 15 and f"rank {1 - who} did not come within" in text
    if how == "first":
        assert "never called save or load" in text
    else:  # by the line at which it stands
        assert "not in save, at test_sync.py:" in text and " in alone for" in text


def slow_but_moving(rank, path):
    save(path, state_of(1))
    _presence.PATIENCE_S = 3.0
    if rank:
        end = time.monotonic() + 7
        while time.monotonic() < end:  # as an evaluation that one rank does
            torch.ones(10).sum()
            time.sleep(0.01)
    return save(path, state_of(2)).path


@in_turns(3)
def test_a_rank_that_moves_is_waited_for(tmp_path, start_world):
    answers = start_world(2, slow_but_moving, tmp_path).answers()
    assert [answer[0] for answer in answers] == ["returned"] * 2, answers


def dies_between(rank, path, victim, how):
    save(path, state_of(1))
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        _presence._end_all()  # as at the end of a program
        return "ended"
    time.sleep(0.5)
    return timed(lambda: save(path, state_of(2)))


@in_turns(3)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_a_rank_that_dies_between_two_saves_is_named_within_seconds(tmp_path, start_world, victim, how):
    answers = start_world(3, dies_between, tmp_path, victim, how).answers()
    texts = [answer[1] for rank, answer in enumerate(answers) if rank != victim]
    for text, seconds in texts:
        assert f"rank {victim} " in text.split("\n")[0] and seconds < 14, (text, seconds)
        assert ("no sign of life" if how == "killed" else "has ended its program") in text
    assert len({text for text, _ in texts}) == 1
    assert os.listdir(tmp_path) == ["step-00000001"]


def different(rank, path):
    save(path, state_of(1))
    return timed(lambda: load(path, state_of(0)) if rank else save(path, state_of(2)))


def test_ranks_that_call_different_operations(tmp_path, start_world):
    answers = start_world(2, different, tmp_path).answers()
    assert [answer[0] for answer in answers] == ["returned"] * 2, answers
    (text, seconds), other = answers[0][1], answers[1][1]
    assert text == other[0] and seconds < 10
    assert "calls load where this one calls save" in text or "calls save where this one calls load" in text


def dead_while_first_writes(rank, path):
    """Rank 0 is busy for long; rank 1 dies; rank 2 waits for rank 0's answer."""
    from vescale_checkpoint._job import SaveJob

    save(path, state_of(1))
    write = SaveJob._write

    def slow(job):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            time.sleep(12)
        return write(job)

    SaveJob._write = slow
    return timed(lambda: save(path, state_of(2)))


@in_turns(3)
def test_who_waits_for_a_busy_rank_hears_of_a_dead_one(tmp_path, start_world):
    answers = start_world(3, dead_while_first_writes, tmp_path).answers()
    (text, seconds), (first, _) = answers[2][1], answers[0][1]
    assert "rank 1 fell silent" in text and seconds < 10 and "rank 1 fell silent" in first
    assert os.listdir(tmp_path) == ["step-00000001"]


def caught_and_again(rank, path):
    """A save of one rank alone, caught. The other learns of it by its next call, and then both are in step again."""
    save(path, state_of(1))
    if rank == 0:
        _presence.PATIENCE_S = 1.0
        timed(lambda: save(path, state_of(2)))
        _presence.PATIENCE_S = 25.0
    dist.barrier()
    if rank:
        timed(lambda: save(path, state_of(2)))
    dist.barrier()
    return save(path, state_of(3)).path


def test_after_a_save_of_one_rank_alone(tmp_path, start_world):
    answers = start_world(2, caught_and_again, tmp_path).answers()
    assert [answer[0] for answer in answers] == ["returned"] * 2, answers
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def first_save_without_rank_0(rank, path):
    os.environ["VESCALE_CHECKPOINT_PATIENCE_S"] = "2"
    if rank:
        return timed(lambda: save(path, state_of(1)))
    time.sleep(8)
    return None


def test_the_first_save_waits_for_rank_0_as_long_as_the_environment_says(tmp_path, start_world):
    """25 s, whatever it said: the wait for the world's name knew the default alone."""
    answers = start_world(2, first_save_without_rank_0, tmp_path).answers()
    assert "rank 0 did not come within 2 s" in answers[1][1][0]

"""All that ranks write into their store lies under one random name, and no later world in that store reads it."""

import re

import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale_dtensor._communication import endings
from vescale_dtensor._communication.hangs import hang
from vescale_dtensor._debugger.session import Wire
from vescale_dtensor.engine import namespace
from vescale_testkit import World

PLANS = {
    "zero": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2),
    "stages": vescale.Plan(
        mesh={"pp": 2}, parameters={"*": {}}, pipeline=vescale.Pipeline("pp", ["1"], microbatches=2)
    ),
}


class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def words(rank, folder):
    """Trains, saves and loads; leaves every word that ranks leave. What it finds first, and the names of its worlds."""
    torch.manual_seed(0)
    found, names = [], []
    for again in range(2):
        if again:
            store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        for kind, plan in PLANS.items():
            model = Net(nn.Linear(4, 8), nn.Linear(8, 4))
            model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
            found.append([endings.first_ending(), hang.verdict(), Wire().get("open")])
            model(torch.ones(4, 4)).backward()
            optimizer.step()
            state = {"model": model, "optimizer": optimizer, "step": 1}
            vescale.save(f"{folder}/{kind}", state, overwrite=True, asynchronous=True).wait()
            vescale.load(f"{folder}/{kind}", state)
            if kind == "zero":
                names.append(namespace().name)
        endings.tell_first("it is told")
        Wire().put("open", "0")
        dist.barrier()
        hang._watch._report(0.05)
        found.append([endings.first_ending(), hang.verdict() is not None, Wire().get("open")])
        dist.barrier()
    return found, names


def test_each_world_has_words_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("VESCALE_HANG_DIR", str(tmp_path / "hangs"))
    seen, before = [], None
    for _ in range(2):
        world = World(2, words, [tmp_path], before, ["vescale"])
        try:
            answers = world.answers()
        finally:
            world.close()
        assert [answer[0] for answer in answers] == ["returned"] * 2, answers
        (found, names), other = (answer[1] for answer in answers)
        assert (found, names) == other
        assert found == [[None] * 3, [None] * 3, ["it is told", True, "0"]] * 2
        seen += names
        before = world
    assert len(set(seen)) == 4
    ours = [key for key in before.store.list_keys() if "vescale" in key]
    name, told = re.compile(r"/(?:again/)?(?:default_pg/)?\w*/?/?(vescale/[0-9a-f]{32})/(.+)$"), {}
    for key in ours:
        match = name.search(key)
        assert match and match[1] in seen, key
        told.setdefault(match[1], set()).add(match[2].split("/")[0])
    kinds = {"hang", "processes", "raised", "stop", "vescale_checkpoint", "word"}
    assert set(told) == set(seen) and all(kinds <= each for each in told.values()), told

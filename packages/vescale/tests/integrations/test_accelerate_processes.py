"""What accelerate does between processes goes over all ranks; what is global stays global."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vescale
from vescale_testkit import run_ranks, warm_up

pytest.importorskip("accelerate", reason="these tests are of accelerate")
warm_up("vescale", "vescale.integrations.accelerate")

SPLIT = {"weight": {"tp": vescale.Shard(0)}, "bias": {"tp": vescale.Shard(0)}, "*": {}}
PLANS = {
    "dp2": vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}),
    "tp2": vescale.Plan(mesh={"tp": 2}, parameters=SPLIT),
    "dp2 tp2 zero 3": vescale.Plan(mesh={"dp": 2, "tp": 2}, parameters=SPLIT, zero=3),
}


def made(name, by_torchrun=True):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from vescale.integrations.accelerate import parallelize

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    rank = dist.get_rank()
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    for key, value in {**known, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        os.environ[key] = str(value)
        if not by_torchrun:
            del os.environ[key]
    return parallelize(PLANS[name], Accelerator(cpu=True))


def between_processes(name, by_torchrun):
    from accelerate import PartialState
    from accelerate.utils import broadcast, broadcast_object_list, gather_object, reduce

    accelerator, rank, world = made(name, by_torchrun), dist.get_rank(), dist.get_world_size()
    found = {"triggers": [accelerator.check_trigger()]}
    if rank == 1:
        accelerator.set_trigger()
    found["triggers"] += [accelerator.check_trigger(), accelerator.check_trigger()]
    objects = [f"of {rank}"]
    broadcast_object_list(objects)
    found["objects"] = objects, gather_object([rank])
    found["tensors"] = broadcast(torch.tensor([rank])).tolist(), reduce(torch.tensor([1.0 + rank]), "sum").tolist()
    nested = accelerator.gather({"a": torch.tensor([rank]), "b": [torch.tensor(rank)]})
    found["nested"] = nested["a"].tolist(), nested["b"][0].tolist()
    found["reduced"] = [accelerator.reduce(torch.tensor([float(rank)]), how).tolist() for how in ("sum", "mean")]
    padded = accelerator.pad_across_processes(torch.ones(1 + rank))
    found["padded"] = len(padded)
    with accelerator.split_between_processes(list(range(2 * world + 1))) as part:
        found["split"] = gather_object(part)
    order = []
    with accelerator.main_process_first():
        time.sleep(0.2 * (rank == 0))
        order.append(time.time())
    found["first"] = gather_object(order)[0] == min(gather_object(order))
    time.sleep(0.2 * (rank == 1))
    before = time.time()
    PartialState().wait_for_everyone()
    found["waited"] = max(gather_object([before])) <= min(gather_object([time.time()]))
    ran = []
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_process(lambda: ran.append("one"), process_index=1)()
    found["ran"] = gather_object([ran])
    found["who"] = gather_object([(accelerator.is_main_process, accelerator.is_last_process)])
    return found


@pytest.mark.parametrize(("name", "by_torchrun"), [("dp2", True), ("dp2", False), ("dp2 tp2 zero 3", True)])
def test_what_one_rank_says_reaches_all(name, by_torchrun):
    world = PLANS[name].world_size
    ranks = list(range(world))
    ran = [["main"], ["one"], *([] for _ in ranks[2:])]
    ran[-1] = ["last", *ran[-1]]
    for found in run_ranks(world, between_processes, name, by_torchrun, timeout=120):
        assert found == {
            "triggers": [False, True, False],
            "objects": (["of 0"], ranks),
            "tensors": ([0], [world * (world + 1) / 2]),
            "nested": (ranks, ranks),
            "reduced": [[float(sum(ranks))], [sum(ranks) / world]],
            "padded": world,
            "split": list(range(2 * world + 1)),
            "first": True,
            "waited": True,
            "ran": ran,
            "who": [(rank == 0, rank == world - 1) for rank in ranks],
        }


def as_one_device(name):
    """Loaders whose batches are loaded in parts, and whole ones: rows are counted once, schedules step once."""
    accelerator = made(name)
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rows = TensorDataset(torch.arange(30.0).reshape(10, 3), torch.arange(10))
    whole = DataLoader(rows, batch_size=4, collate_fn=lambda batch: [torch.stack(one) for one in zip(*batch)])
    model, optimizer, schedule, parts, whole = accelerator.prepare(
        model, optimizer, schedule, DataLoader(rows, batch_size=4), whole
    )
    found = []
    for loader in (parts, whole):
        labels, metrics, outs = [], [], 0
        for x, y in loader:
            out = model(x)
            outs += len(accelerator.gather(out))
            assert accelerator.reduce(out, "sum").shape == out.shape
            labels += accelerator.gather(y).tolist()
            metrics += accelerator.gather_for_metrics((out, y))[1].tolist()
            out.square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append((labels, metrics, outs))
    return found, schedule.get_last_lr(), accelerator.num_processes


@pytest.mark.parametrize("name", PLANS)
def test_what_is_global_stays_global(name):
    rows = list(range(10))
    for found, rate, processes in run_ranks(PLANS[name].world_size, as_one_device, name, timeout=120):
        assert found == [(rows, rows, 10)] * 2 and rate == [0.5**6] and processes == 1


EXCEPTIONS = {
    "check_seedable_sampler_in_batch_sampler_shard": "is of a loader whose batches are dealt out to processes",
    "process_execution_check": "counts lines by Accelerator.num_processes, of those that compute",
    "training_check": "compares with batches that are larger by the number of ranks",
}
"""What of accelerate's own script does not hold under a plan, and why. A loader's batch is that of all ranks."""


def own_scripts():
    """Runs accelerate's own functions, as they are, with `Accelerator.__init__` followed by `parallelize`."""
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.test_utils.scripts import test_ops, test_script

    from vescale.integrations.accelerate import parallelize

    made("dp2")
    plan = vescale.Plan(mesh={"dp": dist.get_world_size()}, parameters={"*": {}})
    init = Accelerator.__init__

    def planned(self, *args, **kwargs):
        init(self, *args, **{"cpu": True, **kwargs})
        parallelize(plan, self)

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    failed = []
    Accelerator.__init__ = planned
    try:
        Accelerator()
        for module in (test_script, test_ops):
            for name, function in vars(module).items():
                if not (name.startswith(("test_", "check_")) or name.endswith("_check")):
                    continue
                if name == "test_reinstantiated_state" or name in EXCEPTIONS or "dataset" in name:
                    continue
                try:
                    function(*([PartialState()] if module is test_ops else []))
                except Exception as error:
                    failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    finally:
        Accelerator.__init__ = init
        AcceleratorState._reset_state(True)
    return failed


def test_accelerates_own_scripts_hold():
    """On two ranks: its `test_split_between_processes_tensor` is of no more."""
    assert run_ranks(2, own_scripts, timeout=300) == [[]] * 2


def own_sync_and_metrics():
    """accelerate's own scripts of gradient accumulation and of metrics: as on one device gradients are always in sync,
    so that of its cases those run which ask for that. Its `test_dataloader_break` also asks which object the active
    loader is: here it is the one within the prepared one."""
    import sys
    import types
    from importlib.util import find_spec

    from accelerate import Accelerator
    from accelerate.test_utils.scripts import test_sync

    missing = [
        name for name in ("evaluate", "datasets") if find_spec(name) is None
    ]  # of its cases with data of the hub
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].load_dataset = None
    try:
        from accelerate.test_utils.scripts.external_deps import test_metrics
    finally:
        for name in missing:
            del sys.modules[name]
    from vescale.integrations.accelerate import parallelize

    made("dp2" if dist.get_world_size() == 2 else "dp2 tp2 zero 3")
    plan = vescale.Plan(mesh={"dp": dist.get_world_size()}, parameters={"*": {}})
    init = Accelerator.__init__

    def planned(self, *args, **kwargs):
        init(self, *args, **{"cpu": True, **kwargs})
        parallelize(plan, self)

    Accelerator.__init__ = planned
    try:
        accelerator = Accelerator()
        test_sync.test_noop_sync(accelerator)
        for splits in (False, True):
            test_sync.test_gradient_accumulation(splits, False, True)
            test_sync.test_gradient_accumulation_with_opt_and_scheduler(splits, False, True)
        for samples in (99, 82, 1):
            test_metrics.test_torch_metrics(accelerator, samples)
        test_metrics.test_gather_for_metrics_drop_last()
    finally:
        Accelerator.__init__ = init


@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerates_own_accumulation_and_metrics_hold(ranks):
    run_ranks(ranks, own_sync_and_metrics, timeout=300)

"""Every public function and method, called with a wrong value for each of its parameters: it returns, or raises an
error of ours, and soon.

The names are those of test_exports: who adds one to them says here what its parameters are, if nothing here does yet.
"""

import contextlib
import importlib
import inspect
import io
import itertools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vescale
import vescale_pipeline
from vescale_testkit import mesh_of, run_ranks
from vescale_trace import VescaleError

PUBLIC = runpy.run_path(str(Path(__file__).with_name("test_exports.py")))["PUBLIC"]
WRONG = {
    "3": 3,
    "x": "x",
    "None": None,
    "object": object(),
    "[]": [],
    "{}": {},
    "-1": -1,
    "nan": float("nan"),
    "2**40": 2**40,
    "10**30": 10**30,
    "bytes": b"x",
    "lambda": lambda *given: 1.0,
    "tensor": torch.ones(2, 3),
}
BOUND_S = 20
LEFT_OUT = {
    "breakpoint": "waits for a person",
    "register_rule": "changes the table of rules for whatever runs next",
    "register_function": "as register_rule",
    "close": "no parameters, and ends what saves",
    "Trace": "made by comm_trace; its constructor is its data",
    "Report": "made by load",
    "PendingSave": "made by save",
    "Protected": "made by protect",
    "Event": "data of a Trace or a Simulation",
    "Verdict": "made by verify",
    "Simulation": "made by simulate",
    "DryRun": "made by dry_run",
    "Layout": "made for each tensor, by the library",
    "Action": "as Layout",
    "DTensor": "of torch.Tensor's methods",
    **dict.fromkeys(("Placement", "Partial", "Replicate", "Shard"), "torch's"),
}
SURPLUS = inspect.Parameter("surplus", inspect.Parameter.KEYWORD_ONLY)
"""A name that no function knows."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).sum()


def right(folder, mesh):
    """Right values by name of a parameter, or by `function.parameter`."""
    plan, model = vescale.Plan(mesh={"dp": 1}, parameters={"*": {}}), Block()
    schedule = vescale_pipeline.generate("1f1b", 2, 4)
    data, row = TensorDataset(torch.ones(4, 4)), torch.ones(4, 4)
    sharded = None if mesh is None else vescale.distribute_tensor(torch.ones(4), mesh, [vescale.Shard(0)])
    with vescale.deferred_init():
        deferred = torch.zeros(4)
    return {
        "plan": plan, "new_plan": plan, "other": plan, "text": plan.to_json(), "model": model, "mesh": {"tp": 1},
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batch": row, "global_batch": row, "config": object(),
        "path": f"{folder}/path", "folder": f"{folder}/folder", "run_a": f"{folder}/a", "run_b": f"{folder}/b",
        "from_pretrained.name": f"{folder}/none", "export_huggingface.path": f"{folder}/out",
        "state": {"x": torch.ones(2)}, "source": {"x": sharded}, "target": {"x": sharded},
        "materialize.target": model, "set_state.state": torch.get_rng_state(), "device_mesh": mesh,
        "Loader.load_state_dict.state": {"batches": 0, "samples": 0, "generators": []},
        "placements": [vescale.Replicate()], "out_placements": [vescale.Replicate()], "tensor": sharded,
        "distribute_tensor.tensor": torch.ones(4), "distribute.tensor": torch.ones(4), "local": torch.ones(4),
        "attributes_of.tensor": torch.ones(2), "recorded.tensor": deferred, "materialize_shard.tensor": deferred,
        "materialize_shard.layout": None if mesh is None else sharded.mesh_layout, "n": 4, "seed": 1, "name": "torch",
        "function": lambda *given, **named: given, "loader": DataLoader(data), "dataset": data, "batch_size": 2,
        "length": 4, "ranks": 2, "microbatches": 4, "stages": 1, "kind": "1f1b", "schedule": schedule, "what": schedule,
        "value": schedule.to_json(), "events": (), "placement": (0,), "orders": [["F0"]], "version": 1,
        "actions": ((),), "parameters": {"*": {}}, "geometry": None,
        "multiprocessors": 4, "dim": 0, "groups": 2, "dims": (0,),
        "local_units": (4,), "count": 4, "device": torch.device("cpu"), "rank": 0, "metrics": {1: {"loss": 1.0}},
        "pace": lambda rank: 1.0, "move": lambda *given: 0, "parts": None,
    }  # fmt: skip


ASKED = {"generate_plan": {"world_size": 1, "batch": 4, "sample": torch.ones(4, 4)}}
"""What a function takes by `**names`, and needs."""


def instances(values):
    """An object of each public class that has methods."""
    plan, schedule = values["plan"], values["schedule"]
    return {
        "Plan": plan,
        "Schedule": schedule,
        "Costs": vescale_pipeline.Costs(),
        "Simulation": vescale_pipeline.simulate(schedule),
        "Retention": vescale.Retention(),
        "Geometry": importlib.import_module("vescale_rng").Geometry(4),
        **({} if values["device_mesh"] is None else {"Loader": vescale.loader(values["loader"], plan)}),
    }


def entries():
    """(name, callable, class or None) of everything public."""
    seen = set()
    for module, names in PUBLIC.items():
        for name in sorted(names):
            value = getattr(importlib.import_module(module), name)
            if id(value) in seen or isinstance(value, type) and issubclass(value, BaseException):
                continue
            seen.add(id(value))
            if name not in LEFT_OUT:
                yield name, value, None
            if isinstance(value, type) and value.__module__.startswith("vescale") and name != "DTensor":
                for method, one in vars(value).items():
                    if method.startswith("_"):
                        continue
                    if isinstance(one, (classmethod, staticmethod)):
                        yield f"{name}.{method}", getattr(value, method), None
                    elif inspect.isfunction(one):
                        yield f"{name}.{method}", one, name


def used(result):
    """Enters a context, and reads an iterator."""
    if isinstance(result, contextlib.AbstractContextManager):
        with result:
            pass
    elif inspect.isgenerator(result):
        list(itertools.islice(result, 4))


class TooLong(BaseException):
    pass


def too_long(*given):
    raise TooLong


def outcome(function, args, kwargs):
    """Returns None where a call returned, or raised an error of ours; else what it did."""
    signal.alarm(BOUND_S)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            used(function(*args, **kwargs))
    except VescaleError:
        return None
    except TooLong:
        return f"takes more than {BOUND_S} s"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "forward" in [frame.name for frame in frames] or "Block.forward" in str(error):
            return None  # a user's code, which says what it likes
        where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
        return f"{type(error).__name__}: {str(error)[:90]!r} at {where}"
    finally:
        signal.alarm(0)


def given_to(parameters, chosen, wrong, value_of):
    """Returns args and kwargs: what is needed, and the wrong value for the parameter that was chosen."""
    needed = [one for one in parameters if one.default is one.empty and one.kind < one.VAR_KEYWORD]
    needed = [one for one in needed if one.kind != one.VAR_POSITIONAL or one is chosen]
    args, kwargs = [], {}
    for one in needed if chosen in needed else [*needed, chosen]:
        value = wrong if one is chosen else value_of(one.name)
        if one.kind < one.KEYWORD_ONLY and one in needed:
            args.append(value)
        else:
            kwargs[one.name] = value
    return args, kwargs


def swept(in_a_world):
    """Returns what wrong values did that they must not, and how many calls there were."""
    red, count = [], 0
    signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        values = right(folder, mesh_of(1) if in_a_world else None)
        made = instances(values)
        for name, function, owner in entries():
            if owner is not None and owner not in made:
                continue
            parameters = [*inspect.signature(function).parameters.values()][owner is not None :]

            def value_of(one, name=name):
                if one == "model" and not in_a_world:  # what an earlier call has parallelized has lost its world
                    return Block()
                return values.get(f"{name}.{one}", values.get(f"{name.rpartition('.')[2]}.{one}", values.get(one)))

            for chosen, (text, wrong) in itertools.product([*parameters, SURPLUS], WRONG.items()):
                args, kwargs = given_to(parameters, chosen, wrong, value_of)
                given = [made[owner], *args] if owner in made else args
                did = outcome(function, given, ASKED.get(name, {}) | kwargs)
                count += 1
                if dist.is_initialized() and not in_a_world:
                    dist.destroy_process_group()
                if did is not None:
                    red.append(f"{name}({chosen.name}={text}): {did}")
    return red, count


def test_wrong_values_in_a_world():
    """Of one rank: what makes and moves tensors, saves and loads."""
    ((red, count),) = run_ranks(1, swept, True, timeout=300)
    assert not red, "\n".join([f"{len(red)} of {count}", *red])
    assert count > 5000


def test_wrong_values_before_a_world_is_joined():
    """What makes plans, runs them dry, simulates ranks, and joins."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


if __name__ == "__main__":
    if in_a_world := bool(sys.argv[1:]):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found, calls = swept(in_a_world)
    print("\n".join([f"{len(found)} of {calls}", *found]))
    sys.exit(bool(found))

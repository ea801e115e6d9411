"""Many ranks in one process: the bits of real processes, a state of its own for each rank, and none waits in vain."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vescale
from vescale._simulation.state import OURS, SHARED, TORCHS, owner
from vescale.simulate import World
from vescale_dtensor import CommunicationError, MeshError
from vescale_dtensor.engine import is_reproducible
from vescale_plans import library
from vescale_testkit import assert_ranks_agree, in_turns, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")
PACKAGES = Path(__file__).parents[3]


def train_example(name: str) -> list[float]:
    """Three losses of an example as it stands: tensor, sequence, expert and pipeline parallel, ZeRO-3."""
    return importlib.import_module(f"{name}.train_parallel").train(3)


@pytest.mark.core
@in_turns(3)
@pytest.mark.parametrize("name, ranks", [("llama", 8), ("nanogpt", 4), ("mixtral", 4)])
def test_simulated_training_is_that_of_processes_to_the_bit(name: str, ranks: int) -> None:
    found = vescale.simulate(train_example, name, ranks=ranks)
    assert found == run_ranks(ranks, train_example, name)
    assert assert_ranks_agree(found) and not dist.is_initialized() and "RANK" not in os.environ


def train_on_eight(name: str) -> tuple[list[float], list[bytes]]:
    """Three losses, and every bit of what this rank holds then."""
    from corpus import VOCABULARY

    model_of = importlib.import_module(f"{name}.model")
    torch.manual_seed(0)
    if name == "nanogpt":
        model = model_of.GPT(model_of.GPTConfig(vocab_size=VOCABULARY, block_size=32, dropout=0.1))
        plan = library.gpt({"dp": 2, "tp": 4}).override(zero=3)
    elif name == "llama":
        model = model_of.build(vocab_size=VOCABULARY)
        plan = library.llama({"pp": 2, "dp": 2, "tp": 2})
        plan = plan.override(zero=1, pipeline=vescale.Pipeline(cuts=["model.layers.2"], microbatches=2))
    else:
        model = model_of.build(vocab_size=VOCABULARY)
        plan = library.mixtral({"ep": 4, "tp": 2}, data_axis="ep").override(zero=2, expert_axis="ep")
    model, optimizer = vescale.parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=5e-4))
    losses = []
    for _ in range(3):
        ids = torch.randint(0, VOCABULARY, (8, 33))
        inputs, targets = ids[:, :-1], ids[:, 1:]
        out = model(inputs, targets) if name == "nanogpt" else model(input_ids=inputs, labels=inputs).loss
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.item())
    return losses, [one.detach().to_local().numpy().tobytes() for _, one in model.named_parameters()]


@pytest.mark.parametrize("name", slice_of(["nanogpt", "llama", "mixtral"], 3))
def test_eight_simulated_ranks_are_eight_processes_to_the_bit(name: str) -> None:
    """Also with dropout; all axes, and three stages of ZeRO, over the three."""
    found, wanted = vescale.simulate(train_on_eight, name, ranks=8), run_ranks(8, train_on_eight, name)
    assert [losses for losses, _ in found] == [losses for losses, _ in wanted]
    assert found == wanted and all(any(part) for _, part in found)


def test_each_rank_has_its_own_numbers_hooks_and_name() -> None:
    before = torch.get_rng_state()

    def run():
        rank = dist.get_rank()
        torch.manual_seed(rank)
        heard = []
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: heard.append(rank))
        dist.barrier()
        drawn = torch.rand(())
        with torch.no_grad():
            dist.barrier()
            torch.nn.Identity()(drawn)
        hook.remove()
        return drawn.item(), heard, os.environ["RANK"], torch.is_grad_enabled()

    found = vescale.simulate(run, ranks=3)
    expected = [torch.rand((), generator=torch.Generator().manual_seed(rank)).item() for rank in range(3)]
    assert found == [(expected[rank], [rank], str(rank), True) for rank in range(3)]
    assert torch.equal(torch.get_rng_state(), before)


def test_numpys_numbers_are_a_ranks_own_however_it_draws() -> None:
    """Also the second of two normal numbers, which numpy keeps for later."""

    def run():
        import numpy

        rank, found = dist.get_rank(), []
        numpy.random.seed(rank % 2)
        for step in range(6):
            dist.barrier()
            draw = numpy.random.standard_normal if (step + rank) % 3 else numpy.random.random
            found.append(float(draw()) if step != 4 or rank else 0.0)
        return found

    assert vescale.simulate(run, ranks=4) == run_ranks(4, run)


def test_a_world_may_stand_while_another_runs() -> None:
    standing = World(2)
    assert standing.call(lambda rank: dist.get_rank(), is_last=False) == [0, 1]
    assert vescale.simulate(lambda: dist.get_world_size(), ranks=3) == [3, 3, 3]

    def summed(rank: int) -> float:
        one = torch.full((), 1.0 + rank)
        dist.all_reduce(one)
        return one.item()

    assert standing.call(summed, is_last=True) == [3.0, 3.0] and standing.has_ended and not dist.is_initialized()


def test_collectives_of_torch_itself() -> None:
    def run():
        rank, size = dist.get_rank(), dist.get_world_size()
        one = torch.full((2,), float(rank))
        total = one.clone()
        dist.all_reduce(total)
        most = one.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        rows = [torch.empty(2) for _ in range(size)]
        dist.all_gather(rows, one)
        sent = torch.arange(float(size)) + 10 * rank
        got = torch.empty(size)
        dist.all_to_all_single(got, sent)
        part = torch.empty(1)
        dist.reduce_scatter_tensor(part, sent)
        told = [None] * size
        dist.all_gather_object(told, {"rank": rank})
        first = one.clone()
        dist.broadcast(first, 2)
        passed = torch.empty(2)
        works = [dist.isend(one, (rank + 1) % size), dist.irecv(passed, (rank - 1) % size)]
        for work in works:
            work.wait()
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(one, group=pair)
        dist.barrier()
        listed = [total, most, torch.stack(rows)[:, 0], got, part, first, passed, one]
        return [one.tolist() for one in listed], [one["rank"] for one in told]

    assert vescale.simulate(run, ranks=3) == run_ranks(3, run)


def test_torchs_own_parallelism_runs_on_it() -> None:
    def run():
        rank = dist.get_rank()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        whole = torch.distributed.tensor.distribute_tensor(torch.arange(4.0), mesh, [torch.distributed.tensor.Shard(0)])
        torch.manual_seed(0)
        replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        replica(torch.arange(3.0) + rank).sum().backward()
        told = [rank * 7]
        dist.broadcast_object_list(told, 1)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        return whole.sum().full_tensor().item(), replica.module.weight.grad.tolist(), told, work.is_completed()

    assert vescale.simulate(run, ranks=2) == run_ranks(2, run)


def coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    "name, call", [("recv_anysource", lambda: dist.recv(torch.ones(1))), ("allreduce_coalesced", coalesced)]
)
def test_what_is_not_simulated_says_so(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(CommunicationError, match=f"simulate: {name} is not simulated"):
        vescale.simulate(call, ranks=2)


def test_a_mode_belongs_to_the_rank_that_entered_it() -> None:
    """What other modules import as an object, or find in a module, is a rank's own, too."""

    def run():
        rank, found = dist.get_rank(), []
        mode = vescale.reproducible() if rank else contextlib.nullcontext()
        with mode:
            dist.barrier()
            found.append(is_reproducible())
            dist.barrier()
        return found

    assert vescale.simulate(run, ranks=2) == [[False], [True]]


def test_who_raises_ends_all_with_the_first_cause() -> None:
    ended = []

    def run():
        try:
            dist.barrier()
            if dist.get_rank() == 1:
                raise ValueError("broken here")
            dist.barrier()
        finally:
            ended.append(dist.get_rank())

    with pytest.raises(ValueError, match="broken here") as error:
        vescale.simulate(run, ranks=3)
    assert error.value.__notes__ == ["(raised on rank 1 of 3, simulated)"]
    assert sorted(ended) == [0, 1, 2] and not dist.is_initialized()


def test_who_stands_at_a_breakpoint_ends_with_who_raises() -> None:
    def run():
        if dist.get_rank():
            raise ValueError("broken here")
        vescale.breakpoint()

    with pytest.raises(ValueError, match="broken here"):
        vescale.simulate(run, ranks=2)


def test_the_store_takes_text_and_bytes() -> None:
    def run():
        store = dist.distributed_c10d._get_default_store()
        first = store.compare_set("key", b"", b"first")
        dist.barrier()
        return first, store.compare_set("key", "first", "second"), store.get("key")

    assert vescale.simulate(run, ranks=2) == [(b"first", b"second", b"second")] * 2


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    def run():
        if dist.get_rank() != 2:
            dist.barrier()

    with pytest.raises(CommunicationError) as error:
        vescale.simulate(run, ranks=3)
    text = str(error.value)
    assert text.startswith(
        "simulate: every rank is waiting for another, or has ended\n  rank 0: it waits in barrier, number 0"
    )
    assert "test_simulate.py:" in text and "rank 2: it came to its end" in text


def test_collectives_that_differ_are_an_error() -> None:
    def run():
        one = torch.ones(())
        dist.all_reduce(one) if dist.get_rank() else dist.barrier()

    with pytest.raises(CommunicationError, match="rank 0 is in barrier, rank 1 in all_reduce"):
        vescale.simulate(run, ranks=2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_goes_from_mesh_to_mesh(tmp_path: Path, asynchronous: bool) -> None:
    def save(mesh: dict[str, int]):
        torch.manual_seed(3)
        plan = vescale.Plan(mesh=mesh, parameters={"weight": dict.fromkeys(mesh, vescale.Shard(0)), "*": {}})
        model, optimizer = vescale.parallelize(plan, torch.nn.Linear(4, 8), torch.optim.AdamW)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        vescale.save(tmp_path, state, step=1, asynchronous=asynchronous).wait()
        return model.weight.full_tensor().tolist()

    def load(mesh: dict[str, int]):
        plan = vescale.Plan(mesh=mesh, parameters={"weight": dict.fromkeys(mesh, vescale.Shard(1)), "*": {}})
        model, optimizer = vescale.parallelize(plan, torch.nn.Linear(4, 8), torch.optim.AdamW)
        vescale.load(tmp_path, {"model": model, "optimizer": optimizer})
        return model.weight.full_tensor().tolist()

    saved = vescale.simulate(save, {"tp": 4}, ranks=4)
    assert vescale.simulate(load, {"tp": 2}, ranks=2) == saved[:2] == run_ranks(2, load, {"tp": 2})


def test_a_checkpoint_that_not_all_ranks_save_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vescale._simulation.turns._MOST_ASKING_SECONDS", 0.2)

    def run() -> None:
        if dist.get_rank():
            vescale.save(tmp_path, {"step": 1}, step=1)

    with pytest.raises(CommunicationError, match="every rank is waiting for another, or has ended") as error:
        vescale.simulate(run, ranks=2)
    assert "vescale_checkpoint/answer" in str(error.value) and "test_simulate.py:" in str(error.value)


def test_a_result_can_be_drawn_afterwards() -> None:
    def run():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return vescale.distribute_tensor(torch.arange(8.0), mesh, [vescale.Shard(0)])

    picture = vescale.simulate(run, ranks=2)[1].draw()
    assert ">rank 0<" in picture.svg and ">rank 1<" in picture.svg and "Shard(dim=0) over 2 ranks" in picture.caption


def test_a_process_in_a_world_cannot_be_another() -> None:
    with pytest.raises(MeshError, match="this is rank 0 of a world of 1 already"):
        vescale.simulate(lambda: vescale.simulate(lambda: None, ranks=2), ranks=1)


def test_the_debugger_stops_all_ranks() -> None:
    def run():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = vescale.distribute_tensor(torch.arange(8.0), mesh, [vescale.Shard(0)])
        vescale.breakpoint()
        y = x * 2
        return y.sum().item()

    lines = [
        "p x.sum().item()",
        "x.to_local().tolist()",
        "n",
        "n",
        "p y",
        "[one.tolist() for one in y.shards.values()]",
        "import os; os.environ['RANK']",
        "c",
    ]
    before = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO("\n".join(lines) + "\n"), io.StringIO()
    try:
        assert vescale.simulate(run, ranks=4) == [56.0] * 4
        text = sys.stdout.getvalue()
    finally:
        sys.stdin, sys.stdout = before
    assert "of 4) 28.0\n(rank 0" in text and "[0.0, 1.0]\nrank 1: [2.0, 3.0]\nrank 2: [4.0, 5.0]" in text
    assert "[[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0, 14.0]]\n(rank 0" in text
    assert "tensor([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.])" in text and "rank 3: '3'" in text


def test_every_name_that_changes_is_a_ranks_own_or_known_to_be_shared() -> None:
    """A new module-level name that our code changes is in one of the tables, with a reason where it is shared."""
    tables = {**{("OURS", m): names for m, names in OURS.items()}, **{("SHARED", m): n for m, n in SHARED.items()}}
    tables.update({("TORCHS", module): names for module, names in TORCHS.items()})
    places, values = set(), set()
    for (_, module), names in tables.items():
        for name in names:
            holder, last = owner(module, name)
            assert hasattr(holder, last), f"{module} has no {name} any more"
            places.add((id(holder), last))
            values.add(id(getattr(holder, last)))
    unknown = []
    for source in sorted(PACKAGES.glob("*/src/vescale*")):
        for path in sorted(source.rglob("*.py")):
            name = ".".join(path.relative_to(source.parent).with_suffix("").parts)
            changed = changed_names(ast.parse(path.read_text()))
            if not changed or name.startswith("vescale_testkit"):  # its state is that of processes
                continue
            module = importlib.import_module(name)
            for one, attribute in sorted(changed):
                value = getattr(module, one)
                if not attribute and inspect.ismodule(value):
                    continue  # torch.add is a function
                if not attribute:
                    known = (id(module), one) in places or id(value) in values
                else:
                    known = (id(value), attribute) in places
                if not known:
                    unknown.append(f"{name}: {one}.{attribute}".rstrip("."))
    assert not unknown, "\n".join(unknown)


CHANGES = set("append add update clear pop popitem setdefault extend remove discard insert appendleft popleft".split())


def changed_names(tree: ast.Module) -> set[tuple[str, str]]:
    """Module-level names that a function rebinds, or whose value it changes; with the attribute, where it sets one."""
    top = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    top |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    top |= {alias.asname or alias.name for n in imports for alias in n.names}
    changed = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        here = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        here |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                changed |= {(name, "") for name in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in here:
                if node.attr in CHANGES:
                    changed.add((node.value.id, ""))
                elif not isinstance(node.ctx, ast.Load):
                    changed.add((node.value.id, node.attr))
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                value = node.value
                changed |= {(value.id, "")} if isinstance(value, ast.Name) and value.id not in here else set()
    return {(name, attribute) for name, attribute in changed if name in top}

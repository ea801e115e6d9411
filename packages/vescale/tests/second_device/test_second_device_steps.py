"""After an optimizer's step under ZeRO-1 and 2: gathers are under way, and each is waited for where it is first read.

The device fills what is under way with signalling NaN until somebody waits, and refuses writes to it: a reader that
does not wait cannot be right here.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("vescale", "vescale_testkit.second")

BLOCKS = 6
WIDE = 512  # of a block that fills a buffer of its own
STEPS = 5  # in the first three ranks compare their parameters, for which they read all of them


class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def made(zero, width, **options):
    torch.manual_seed(0)
    plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=zero)
    return vescale.parallelize(plan, Stack(width), partial(torch.optim.AdamW, lr=1e-2, foreach=True), **options)


def step_of(model, optimizer, step, width):
    inputs = torch.linspace(-1, 1, 4 * width, device="second").view(4, width) * (step + 1)
    loss = model(inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("zero", [1, 2])
def test_each_block_waits_for_its_own_parameters_and_the_host_for_none(zero):
    """Those of the first block's call are waited for when it begins, those behind it are under way; no bit changes."""

    def train(reads_at_once):
        from vescale_dtensor._communication import flight_recorder as recorder
        from vescale_testkit.second import host_waits

        def under_way():
            return [e[recorder.STATE] is recorder.DONE for e in recorder.ring if e[1] == "all_gather"].count(False)

        model, optimizer = made(zero, WIDE)
        blocks, stepped, losses = [], [], []
        for block in model.blocks:
            block.register_forward_hook(lambda *_: blocks.append(under_way()))
        optimizer.register_step_post_hook(lambda *_: stepped.append(under_way()))
        for step in range(STEPS):
            blocks.clear()
            with host_waits() as found:
                losses.append(step_of(model, optimizer, step, WIDE))
            if reads_at_once:
                for parameter in model.parameters():
                    _ = parameter.mesh_layout
        return [float(loss) for loss in losses], stepped, blocks, found.sites

    def on_rank():
        return train(False), train(True)

    for late, early in run_ranks(2, on_rank, device="second", timeout=240):
        assert late[0] == early[0]
        assert late[1] == [BLOCKS] * STEPS
        assert late[2] == [*range(BLOCKS - 1, -1, -1)] and early[2] == [0] * BLOCKS
        assert not late[3] and not early[3]


def whole(tensors):
    return [one.full_tensor().cpu() if hasattr(one, "full_tensor") else one.detach().cpu() for one in tensors]


def numbers(model, optimizer):
    return [torch.from_numpy(p.detach().cpu().numpy()) for p in model.parameters()]


def written(model, optimizer):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    return []


def written_below(model, optimizer):
    for p in model.parameters():
        p.data.mul_(2.0)
    return []


def assigned(model, optimizer):
    for p in model.parameters():
        p.data = torch.full_like(p.data, 0.01)
    return []


def exchanged(model, optimizer):
    one, other = model.blocks[0].weight, nn.Parameter(torch.full_like(model.blocks[0].weight, 0.02))
    torch.utils.swap_tensors(one, other)
    return whole([other])


def averaged(model, optimizer):
    average = AveragedModel(model)
    average.update_parameters(model)
    return whole(average.module.parameters())


def loaded(model, optimizer):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    return []


def evaluated(model, optimizer):
    with torch.inference_mode():
        return whole([model(torch.ones(4, 32, device="second"))])


def penalized(model, optimizer):
    sum(p.square().sum() for p in model.parameters()).backward()
    return whole(p.grad for p in model.parameters())


def stepped_again(model, optimizer):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    return []


def on_another_stream(model, optimizer):
    with torch.Stream(device="second"):
        return whole(model.parameters())


READERS = {
    "state dict": lambda m, o: whole(m.state_dict().values()),
    "detached": lambda m, o: whole(p.detach() for p in m.parameters()),
    "data": lambda m, o: whole(p.data for p in m.parameters()),
    "local": lambda m, o: whole(p.to_local() for p in m.parameters()),
    "numbers": numbers,
    "lists": lambda m, o: [torch.tensor(p.tolist()) for p in m.parameters()],
    "vector": lambda m, o: whole([parameters_to_vector(m.parameters())]),
    "norm": lambda m, o: whole([get_total_norm([*m.parameters()])]),
    "copied": lambda m, o: whole(copy.deepcopy(m).parameters()),
    "average": averaged,
    "written": written,
    "written below": written_below,
    "assigned": assigned,
    "exchanged": exchanged,
    "loaded": loaded,
    "evaluated": evaluated,
    "penalized": penalized,
    "stepped again": stepped_again,
    "on another stream": on_another_stream,
    "optimizer": lambda m, o: whole(s["exp_avg"] for s in o.state_dict()["state"].values()),
}  # fmt: skip


@pytest.mark.parametrize("zero", [1, 2])
def test_whoever_reads_a_parameter_before_the_forward_waits(zero):
    """Against ZeRO-0, where nothing is gathered: the same readers and writers, each after a step, to the bit."""

    def read(zero):
        model, optimizer = made(zero, 32)
        found = {}
        for step, (name, reader) in enumerate(READERS.items()):
            loss = step_of(model, optimizer, step, 32)
            if zero:
                assert all("_layout" not in p.__dict__ for p in model.parameters()), f"before {name!r} all is there"
            found[name] = float(loss), reader(model, optimizer)
        return found, whole(model.parameters())

    for (found, end), (wanted, other) in zip(
        run_ranks(2, read, zero, device="second"), run_ranks(2, read, 0, device="second"), strict=True
    ):
        for name, (loss, values) in wanted.items():
            assert found[name][0] == loss, name
            assert len(found[name][1]) == len(values) and all(map(torch.equal, found[name][1], values)), name
        assert all(map(torch.equal, end, other))


def test_who_holds_a_parameters_memory_is_asked_nothing_and_finds_all_there():
    def on_rank():
        model, optimizer = made(1, 32)
        held = [p.data for p in model.parameters()]
        for step in range(3):
            step_of(model, optimizer, step, 32)
            assert all(map(torch.equal, whole(held), whole(p.detach().clone() for p in model.parameters())))
        kept = whole(held)
        del held
        step_of(model, optimizer, 3, 32)
        assert all("_layout" not in p.__dict__ for p in model.parameters())  # nobody else holds it any more
        return kept

    one, other = run_ranks(2, on_rank, device="second")
    assert all(map(torch.equal, one, other))

"""Parameters that a program gives other memory under a pipeline: the next call takes it in, as on one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale")

WIDTH, WORDS, ROWS = 8, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """The embedding's dtype is that of all that follows, and code between the blocks asks for it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        scale = torch.linspace(0.5, 1.5, tokens.shape[1]).to(x.dtype)[:, None]
        for block in self.blocks:
            x = block(x) * scale
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Loop:
    """What programs below do beside giving memory; the numbers that came of it."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.numbers, self._batches = model, optimizer, [], 0

    def batch(self, length):
        self._batches += 1
        return torch.randint(0, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(self._batches))

    def train(self, steps, length=5):
        for _ in range(steps):
            loss = self.model(self.batch(length))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.numbers.append(loss.item())

    def evaluate(self, context=torch.no_grad):
        with context():
            self.numbers.append(float(self.model(self.batch(5))))


def scaled_before_the_first_call(loop):
    for parameter in loop.model.parameters():
        parameter.data = parameter.data * 0.5
    loop.train(3)


def scaled_before_the_first_evaluation(loop):
    loop.train(1)
    for parameter in loop.model.parameters():
        parameter.data = parameter.data * 0.5
    loop.evaluate()
    loop.train(2)


def scaled_before_another_shape(loop):
    loop.train(2)
    for _, parameter in loop.model.named_parameters():
        parameter.data = parameter.data.clone() + 0.1
    loop.train(2, length=7)


def some_are_given_memory(loop):
    for name, parameter in loop.model.named_parameters():
        if "norm" in name:
            parameter.data = torch.full_like(parameter.data, 0.7)
    loop.train(2)


def average_swapped_in(loop, context=torch.no_grad):
    average = {name: one.data.clone() for name, one in loop.model.named_parameters()}
    for _ in range(3):
        loop.train(1)
        for name, one in loop.model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * one.data
    for _ in range(2):
        kept = {}
        for name, one in loop.model.named_parameters():
            kept[name], one.data = one.data, average[name]
        loop.evaluate(context)
        for name, one in loop.model.named_parameters():
            one.data = kept[name]
        loop.train(1)


def average_swapped_in_for_inference(loop):
    average_swapped_in(loop, torch.inference_mode)


def tensors_swapped(loop):
    for name, one in [*loop.model.named_parameters()]:
        if name.endswith("up.weight"):
            torch.utils.swap_tensors(one, nn.Parameter(one.detach() * 0.5))
    loop.train(2)


PROGRAMS = (
    *(scaled_before_the_first_call, scaled_before_the_first_evaluation, scaled_before_another_shape),
    *(some_are_given_memory, average_swapped_in, average_swapped_in_for_inference, tensors_swapped),
)


def double_before_the_first_call(loop):
    loop.model.to(torch.float64)
    loop.train(3)
    loop.evaluate()


def double_between_calls(loop):
    loop.train(1)
    loop.evaluate()
    loop.model.double()
    loop.train(2)
    loop.evaluate()


def there_and_back(loop):
    loop.train(1)
    loop.model.double()
    loop.train(1)
    loop.model.float()
    loop.train(1)


def double_by_memory(loop):
    loop.train(1)
    for parameter in loop.model.parameters():
        parameter.data = parameter.data.double()
    loop.train(2)


CASTS = (double_before_the_first_call, double_between_calls, there_and_back, double_by_memory)
# mesh, ZeRO stage, schedule, virtual stages
MESHES = [
    ({"pp": 2}, 0, "1f1b", 1),
    ({"pp": 2}, 0, "zbv", 2),
    ({"pp": 2, "dp": 2}, 0, "1f1b", 1),
    ({"pp": 2, "dp": 2}, 2, "zb-h1", 1),
    ({"pp": 2, "dp": 2}, 3, "1f1b", 1),
    ({"pp": 2, "tp": 2}, 0, "1f1b", 1),
]


def plan_of(mesh, zero, schedule, virtual):
    columns, rows = ({"tp": vescale.Shard(dim)} if "tp" in mesh else {} for dim in (0, 1))
    return vescale.Plan(
        mesh=mesh,
        parameters={"blocks.*.up.*": columns, "blocks.*.down.weight": rows, "*": {}},
        data_axis="dp" if "dp" in mesh else None,
        zero=zero,
        pipeline=vescale.Pipeline(
            cuts=("blocks.1", "blocks.2", "blocks.3") if virtual == 2 else ("blocks.2",),
            schedule=schedule,
            microbatches=4,
            virtual=virtual,
        ),
    )


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    """torch's Adam does not step with states of another dtype than the gradients."""
    return torch.optim.SGD(parameters, lr=0.1)


def compared(program, *case):
    optimizer_fn = sgd if program in CASTS else adam
    torch.manual_seed(0)
    model, alone = Net(), Net()
    alone.load_state_dict(model.state_dict())
    wanted = Loop(alone, optimizer_fn(alone.parameters()))
    program(wanted)
    loop = Loop(*vescale.parallelize(plan_of(*case), model, optimizer_fn))
    program(loop)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loop.numbers, wanted.numbers, **close)
    held, expected = dict(model.named_parameters()), dict(alone.named_parameters())
    assert held
    for name, one in held.items():
        torch.testing.assert_close(one.detach().full_tensor(), expected[name].detach(), **close)


@pytest.mark.parametrize("case", slice_of(MESHES, 2), ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_memory_is_taken_in_before_a_call(program, case):
    run_ranks(2 * case[0].get("dp", case[0].get("tp", 1)), compared, program, *case)


@pytest.mark.parametrize("case", slice_of(MESHES, 2), ids=str)
@pytest.mark.parametrize("program", CASTS, ids=lambda one: one.__name__)
def test_another_dtype_is_that_of_all_stages(program, case):
    run_ranks(2 * case[0].get("dp", case[0].get("tp", 1)), compared, program, *case)


def called_before_a_backward(*case):
    plan = plan_of(*case).override(precision=vescale.Precision(compute=torch.bfloat16))
    model, optimizer = vescale.parallelize(plan, Net(), sgd)
    loop = Loop(model, optimizer)
    for name, one in model.named_parameters():
        model(loop.batch(5))  # its weights stay in the dtype of the computation until a backward comes
        if "norm" in name:
            one.data = one.data.float() * 0.9
        loop.evaluate()
    loop.train(2)
    assert {one.dtype for _, one in model.named_parameters()} == {torch.float32}


@pytest.mark.parametrize("case", [MESHES[0], MESHES[4]], ids=str)
def test_the_dtype_of_a_computation_is_no_cast(case):
    run_ranks(2 * case[0].get("dp", 1), called_before_a_backward, *case)


# what is cast, mesh, error: of parameters that lie in one bucket, and of all in one of several
SOME = [("head", MESHES[0], "another dtype or device than the flat bucket"), ("blocks.3", MESHES[4], "some parameters")]


def some_are_cast(name, case, error):
    model, _ = vescale.parallelize(plan_of(*case), Net())
    tokens = torch.zeros(ROWS, 5, dtype=torch.int64)
    model(tokens)
    model.get_submodule(name).double()
    with pytest.raises(vescale.PipelineError, match=error):
        model(tokens)


@pytest.mark.parametrize(("name", "case", "error"), SOME, ids=str)
def test_a_cast_of_some_parameters_is_told(name, case, error):
    run_ranks(2 * case[0].get("dp", 1), some_are_cast, name, case, error)

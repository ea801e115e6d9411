"""strict(): its errors are about what the user passed, at the user's line, and every fix that they name works."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import ImplicitCommunicationError, Partial, Replicate, Shard, distribute_tensor, strict
from vescale_testkit import in_turns, mesh_of, run_ranks, slice_of

R, P = Replicate(), Partial()


def real(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.8 + 0.1


def classes(n, c):
    return torch.arange(n) % c


LABELS = classes(4, 8)
FUNCTIONS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=0),
    "logsumexp": lambda x: x.logsumexp(1),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), classes(16, 8)),
    "nll": lambda x: F.nll_loss(x[:, 0], LABELS),
    "mse": lambda x: F.mse_loss(x, real(4, 4, 8)),
    "huber": lambda x: F.huber_loss(x, real(4, 4, 8)),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "var": lambda x: x.var(0),
    "sum": lambda x: x.sum(1) * 2,
    "relu": torch.relu,
    "gelu": F.gelu,
    "view": lambda x: x.view(2, 2, 4, 8),
    "flat": lambda x: x.reshape(-1),
    "split": lambda x: x.split(3, 1)[0],
    "chunk": lambda x: x.chunk(2, 2)[1],
    "index": lambda x: x[:, 1],
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "flip": lambda x: x.flip(1),
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "argmax": lambda x: x.argmax(2),
    "cumsum": lambda x: x.cumsum(0),
    "gather": lambda x: x.gather(2, torch.zeros(4, 4, 1, dtype=torch.long)),
    "glu": lambda x: F.glu(x, -1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cosine": lambda x: F.cosine_similarity(x, real(4, 4, 8), dim=-1),
    "unknown": lambda x: torch.linalg.solve(x[:, :, :4] + 5 * torch.eye(4), x),
}
PAIRS = {
    "matmul": lambda x, y: x @ y,
    "bmm": torch.bmm,
    "add": torch.add,
    "mul": lambda x, y: x * y,
    "linear": lambda x, y: F.linear(x, y),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "maximum": torch.maximum,
    "kl": lambda x, y: F.kl_div(x.log(), y, reduction="batchmean"),
    "add_": lambda x, y: x.clone().add_(y),
}
PLACES = [places for places in itertools.product((R, P, Shard(0), Shard(1), Shard(2)), repeat=2) if places != (R, R)]


def fixed(function, operands):
    with strict():
        return function(*operands)


def check(function, given, placements, mesh) -> int:
    """How many fixes were applied. What is mended is the call on the test's own operands; a function of several calls
    may then be told of the next one."""
    operands = [distribute_tensor(x, mesh, places) for x, places in zip(given, placements)]
    try:
        fixed(function, operands)
        return 0
    except ImplicitCommunicationError as error:
        assert "test_strict.py:" in error.__notes__[0], error
        assert error.fixes and len({*error.remedies}) == len(error.remedies), error
        count = 0
        for fix in error.fixes:
            mended = list(operands)
            for name, places in fix.items():
                alike = [at for at, one in enumerate(operands) if mended[at] is one and matches(error, name, one)]
                if alike:  # by its number in the error, where two operands lie alike
                    at = int(name[1:]) if name[1:].isdigit() and int(name[1:]) in alike else alike[0]
                    mended[at] = operands[at].redistribute(places)
            if sum(a is not b for a, b in zip(mended, operands)) < len(fix):
                continue  # it is about what the function computed from them, on a line of its own
            try:
                fixed(function, mended)
            except ImplicitCommunicationError as again:
                first, second = (one.operation for one in (error, again))
                assert first != second, f"{error}\n\nthe fix was applied:\n{again}"
            count += 1
        return count


def matches(error, name, operand) -> bool:
    described = next(text for text in error.operands if text.startswith(f"{name}  "))
    shape = ", ".join(map(str, operand.shape))
    states = ", ".join(map(repr, operand._layout.base.states))
    return f"[{shape}]  {states}  on" in described


def several(names):
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    counts = {}
    for name in names:
        if name in FUNCTIONS:
            cases = [(places,) for places in slice_of(PLACES, 3)]
            given, function = [real(4, 4, 8)], FUNCTIONS[name]
        else:
            cases = slice_of(itertools.product([(R, R), *PLACES], repeat=2), 40)
            given, function = [real(4, 8, 8), real(8, 8) if name == "linear" else real(4, 8, 8)], PAIRS[name]
            cases = [both for both in cases if Shard(given[1].ndim) not in both[1]]
        counts[name] = 0
        for placements in cases:
            counts[name] += check(function, given, placements, mesh)
    return counts


GROUPS = [[*FUNCTIONS][i::3] for i in range(3)] + [[*PAIRS][i::2] for i in range(2)]


@in_turns(3)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_every_fix_works(names):
    counts = run_ranks(4, several, names, timeout=300)[0]
    assert sum(counts.values()) >= 2 * len(names), counts


@pytest.mark.parametrize("name, shape", [("softmax", "4, 4, 8"), ("normalize", "4, 4, 8"), ("cosine", "4, 4, 8")])
def test_the_operand_is_the_users(name, shape):
    def run():
        x = distribute_tensor(real(4, 4, 8), mesh_of(2, names=("tp",)), [Shard(2)])
        with strict(), pytest.raises(ImplicitCommunicationError) as told:
            FUNCTIONS[name](x)
        assert f"[{shape}]" in str(told.value) and len(told.value.operands) == 1
        return str(told.value)

    first, second = run_ranks(2, run)
    assert first == second


@pytest.mark.parametrize("function", [torch.all, torch.any, torch.sum])
def test_no_fix_is_named_twice(function):
    def run():
        x = distribute_tensor(real(4, 8) > 0, mesh_of(2, names=("tp",)), [Shard(0)])
        try:
            fixed(lambda x: function(x, 0).to(torch.float32) + 1, [x])
        except ImplicitCommunicationError as error:
            assert len({*error.remedies}) == len(error.remedies) == len(error.fixes), error
        with strict(), pytest.raises(ImplicitCommunicationError) as told:
            torch.all(x)
        assert len({*told.value.remedies}) == len(told.value.remedies), told.value

    run_ranks(2, run)


def test_a_fix_is_tried_on_copies_and_leaves_generators_and_tensors_alone():
    def run():
        x = distribute_tensor(real(4, 8), mesh_of(2, names=("tp",)), [Shard(1)])
        plain, before = torch.ones(4, 8), torch.get_rng_state()
        noisy = lambda: F.dropout(x, 0.5).softmax(-1)
        with strict(), pytest.raises(ImplicitCommunicationError):
            x.cumsum(1).add_(plain)
        assert torch.equal(before, torch.get_rng_state()) and plain.eq(1).all()
        torch.manual_seed(0)
        with strict(), pytest.raises(ImplicitCommunicationError):
            noisy()
        with strict():
            assert F.relu(x).placements == (Shard(1),)  # it goes on
        return float(torch.rand(1))

    assert len(set(run_ranks(2, run))) == 1

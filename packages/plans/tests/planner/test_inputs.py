"""generate_plan on inputs that have not all the batch's rows first: tables that rows share, patches in a row."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale_dtensor import DTensor
from vescale_plans import PlanError, parallelize
from vescale_plans.search.generate import generate_plan
from vescale_testkit import in_turns, run_ranks

WIDTH, TOKENS, WORDS = 16, 6, 24


class Block(nn.Module):
    """Attention and a feed-forward; `turn`, of each position, is multiplied on."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x, turn):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, 4)).transpose(-3, -2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q * turn[..., None, :, None], k * turn[..., None, :, None], v)
        x = x + self.o(y.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Latents(nn.Module):
    """Places that all rows share, [positions, 3], beside latents [batch, positions, features], as in Flux."""

    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 8)

    def forward(self, latents, places, time):
        turn = places.float().sum(-1).cos()
        x = self.enter(latents) + time[:, None, None]
        for block in self.blocks:
            x = block(x, turn)
        return F.mse_loss(self.leave(x), latents)


class Patches(nn.Module):
    """Images as patches one after the other, [patches of all images, features], with a grid for each, as in Qwen-VL."""

    def __init__(self):
        super().__init__()
        self.enter, self.seeing = nn.Linear(12, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.words, self.reading = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, patches, grids):
        counts = (grids[:, 0] * grids[:, 1]).tolist()
        seen = self.enter(patches)
        for block in self.seeing:
            seen = torch.cat([block(part, torch.ones(len(part))) for part in seen.split(counts)])
        x = self.words(ids) + torch.stack([part.mean(0) for part in seen.split(counts)])[:, None]
        for block in self.reading:
            x = block(x, torch.ones(ids.shape[1]))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Codes(nn.Module):
    """Two codes for each place, [batch x 2, places] one after the other, and what to say of them for each row of the
    batch, as in Musicgen; `books`: of their tables."""

    def __init__(self, books=2):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in range(books))
        self.blocks, self.heads = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, books * WORDS)

    def forward(self, codes, labels=None):
        books = len(self.tables)
        codes = codes.unflatten(0, (-1, books))
        x = sum(table(codes[:, at]) for at, table in enumerate(self.tables))
        for block in self.blocks:
            x = block(x, torch.ones(x.shape[1]))
        said = self.heads(x).unflatten(-1, (books, WORDS))
        labels = codes.movedim(1, -1) if labels is None else labels
        return F.cross_entropy(said.flatten(0, -2), labels.flatten())


class Grids(Patches):
    """The grid is read, and does not run with its numbers in another order."""

    def forward(self, ids, patches, grids):
        for times, high, wide in grids.tolist():
            if high % 2 or wide % 2:
                raise ValueError(f"no grid of {times} x {high} x {wide}")
        return super().forward(ids, patches, grids[:, 1:])


class Apart(nn.Module):
    """Rows of two kinds that have nothing to do with each other."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return (self.one(x).view(4, -1).sum(0) + self.two(y).view(7, -1).sum(0)).mean()


def latents(rows):
    generator = torch.Generator().manual_seed(rows)
    places = torch.arange(TOKENS)[:, None] * torch.tensor([1, 2, 3])
    return torch.randn(rows, TOKENS, 8, generator=generator), places, torch.rand(rows, generator=generator)


def patches(rows):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(WORDS, (rows, TOKENS), generator=generator)
    return ids, torch.randn(rows * 4, 12, generator=generator), torch.tensor([[2, 2]] * rows)


def codes(rows):
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randint(WORDS, size, generator=generator) for size in ((2 * rows, TOKENS), (rows, TOKENS, 2)))


def grids(rows):
    return *patches(rows)[:2], torch.tensor([[1, 2, 2]] * rows)


CASES = {
    "places that rows share, of one row": (Latents, latents, 1, "blocks"),
    "places that rows share": (Latents, latents, 4, "blocks"),
    "as many places as twice the rows": (Latents, latents, 3, "blocks"),
    "patches in a row": (Patches, patches, 2, "seeing"),
    "patches of one image": (Patches, patches, 1, "seeing"),
    "codes in a row": (Codes, codes, 4, "blocks"),
    "codes alone": (Codes, lambda rows: codes(rows)[:1], 4, "blocks"),
    "codes of one row": (Codes, codes, 1, "blocks"),
    "grids that do not turn": (Grids, grids, 4, "seeing"),
    "grid of one image": (Grids, grids, 1, "seeing"),
}


def trained(model, optimizer, batch):
    for _ in range(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def apart(kind, batch, plan):
    """The largest error of a parameter after three steps, by norm, and what the plan cut."""
    models = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = kind()
        if parallel:
            model, optimizer = parallelize(plan, model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trained(model, optimizer, batch)
        models.append(model)
    cut = {n for n, p in models[1].named_parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape}
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in models[1].named_parameters()}
    return max(((found[n] - p).norm() / p.norm()).item() for n, p in models[0].named_parameters()), cut


@in_turns(3)
@pytest.mark.parametrize("case", CASES)
def test_inputs_that_are_not_batch_first_are_planned_and_train_as_on_one_device(case):
    kind, inputs, rows, part = CASES[case]
    plan = generate_plan(
        kind(), world_size=2, batch=4, hardware="h100", sample=inputs(rows), pin={"tp": 2, "dp": 1, "pp": 1}
    )
    for error, cut in run_ranks(2, apart, kind, inputs(4), plan):
        assert error < 1e-4
        assert {f"{part}.{at}.{name}.weight" for at in range(2) for name in ("up", "down")} <= cut


def test_inputs_that_fit_together_in_no_reading_are_refused_with_their_sizes():
    sample = torch.ones(4, WIDTH), torch.ones(7, WIDTH)
    with pytest.raises(PlanError, match="it runs neither if they are shared") as raised:
        generate_plan(Apart(), world_size=2, batch=4, hardware="h100", sample=sample)
    assert "a row  [1, 16], [7, 16] at first" in str(raised.value) and "register_buffer" in str(raised.value)


def test_a_sample_of_more_rows_than_the_batch_is_read_row_by_row_first():
    model, sample = Latents(), latents(8)
    assert generate_plan(model, world_size=2, batch=4, hardware="h100", sample=sample) == generate_plan(
        model, world_size=2, batch=4, hardware="h100", sample=latents(1)
    )

"""Loaders and datasets of other packages under `vescale.loader`: the samples of one plain list, resumed anywhere."""

import pytest
import torch

import vescale
from vescale_testkit import run_ranks, slice_of, warm_up

pytest.importorskip("torchdata", reason="these tests are of torchdata's StatefulDataLoader")
pytest.importorskip("datasets", reason="these tests are of HuggingFace's datasets")
warm_up("vescale", "datasets", "torchdata.stateful_dataloader")

ROWS = 22
PLANS = {world: vescale.Plan(mesh={"dp": world}, parameters={"*": {}}) for world in (1, 2, 3)}


def mapped():
    import datasets

    made = datasets.Dataset.from_dict({"x": [[float(at)] * 3 for at in range(ROWS)], "label": list(range(ROWS))})
    return made.with_format("torch")


def streamed():
    return mapped().to_iterable_dataset(num_shards=2)


def stateful(data, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=4, **options)


def usual(data, **options):
    return torch.utils.data.DataLoader(data, batch_size=4, **options)


MADE = {
    "datasets": lambda: usual(mapped(), shuffle=True),
    "datasets, workers": lambda: usual(mapped(), shuffle=True, num_workers=2),
    "datasets, last dropped": lambda: usual(mapped(), shuffle=True, drop_last=True),
    "datasets, streamed": lambda: usual(streamed()),
    "datasets, streamed and shuffled": lambda: usual(streamed().shuffle(seed=5, buffer_size=7)),
    "datasets, streamed, workers": lambda: usual(streamed(), num_workers=2),
    "stateful": lambda: stateful(mapped(), shuffle=True),
    "stateful, workers": lambda: stateful(mapped(), num_workers=2),
    "stateful, shuffled, workers": lambda: stateful(mapped(), shuffle=True, num_workers=2),
    "stateful, shuffled, last dropped": lambda: stateful(mapped(), shuffle=True, num_workers=2, drop_last=True),
    "stateful, streamed": lambda: stateful(streamed()),
    "stateful, streamed, workers": lambda: stateful(streamed(), num_workers=2),
}


def labels(batches):
    return [getattr(batch["label"], "full_tensor", lambda batch=batch: batch["label"])().tolist() for batch in batches]


def listed(case):
    """Two epochs as one process without veScale has them."""
    torch.manual_seed(7)
    made = MADE[case]()
    return [labels(made), labels(made)]


def given(world, case):
    torch.manual_seed(7)
    made = vescale.loader(MADE[case](), PLANS[world])
    return [labels(made), labels(made)]


def resumed(world, case, folder):
    made = vescale.loader(MADE[case](), PLANS[world])
    vescale.load(folder, {"loader": made})
    return labels(made)


def saved(world, case, folder):
    torch.manual_seed(7)
    made = vescale.loader(MADE[case](), PLANS[world])
    list(made)
    iterator = iter(made)
    for _ in range(3):
        next(iterator)
    vescale.save(folder, {"loader": made})
    return labels(iterator)


@pytest.mark.parametrize("case", slice_of(list(MADE), 4))
def test_batches_are_those_of_one_process(case, tmp_path):
    first, second = run_ranks(1, listed, case, timeout=120)[0]
    for epoch in (first, second):
        assert len({row for batch in epoch for row in batch}) == (20 if "dropped" in case else ROWS)
    for world in (1, 2, 3):
        assert all(found == [first, second] for found in run_ranks(world, given, world, case, timeout=120))
    rest = run_ranks(2, saved, 2, case, str(tmp_path), timeout=120)
    assert rest == [second[3:]] * 2
    for world in (1, 3):
        assert run_ranks(world, resumed, world, case, str(tmp_path), timeout=120) == [second[3:]] * world

"""plan.explain(): its tables, its page, and that what they say is what was weighed."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from html import escape
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from vescale_plans import Plan, PlanError, dry_run
from vescale_plans.search import InfeasibleError, generate_plan, plan_of
from vescale_plans.search.decision import number, operations
from vescale_plans.search.explain_html import MEMORY, TIME, page


class Heads(nn.Module):
    """Attention of four heads with two of keys and values, and a wide layer."""

    def __init__(self, width=32):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.between(x))))


class Model(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Heads() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(**asked):
    asked = {"world_size": 8, "batch": 16, "seq": 64, "hardware": "cpu", "sample": torch.arange(6)[None], **asked}
    return generate_plan(Model(), asked)


def test_the_choice_comes_first_and_the_next_are_no_better():
    explained = made().explain()
    times = [one.cost.total for one in explained.ranked]
    assert len(times) == 6
    assert times == sorted(times)
    assert "8 x cpu, 16 rows of 64 positions in float32, for the least time" in str(explained)
    assert explained.loses(explained.chosen) == ""
    for one in explained.ranked[1:]:
        said = explained.loses(one)
        more = one.cost.total - times[0]
        assert said.startswith("a tie") or float(said.split()[0]) == pytest.approx(more, rel=0.01)


def test_no_setting_is_cut_off_where_lines_are_short():
    console = Console(file=StringIO(), width=56, color_system=None)
    console.print(made(pin={"checkpointing": True}).explain())
    text = console.file.getvalue()
    assert "…" not in text.partition("where the choice spends")[0]
    assert "checkpointing" in text.replace("\n", "")


def test_links_between_nodes_are_counted():
    said = str(made(world_size=16, hardware="h100", pin={"dp": 16}).explain())
    assert "crosses boundaries of nodes of 8: 8 links of a node, 46 GB/s each" in said


def test_memory_that_binds_is_named():
    loose = made(pin={"tp": 1, "pp": 1}).explain()
    limit = int(loose.chosen.memory.total * 1.01)
    tight = made(pin={"tp": 1, "pp": 1}, memory=limit).explain()
    assert "memory 99% full" in tight.binds(tight.chosen)
    assert "memory" not in loose.binds(loose.chosen).split(",")[0]


def test_every_block_says_why():
    explained = made(pin={"tp": 2, "pp": 2, "dp": 2, "virtual": 1}).explain()
    first, second = explained.blocks
    assert (first.names, first.stage, second.stage) == (("blocks.0", "blocks.1"), 0, 1)
    assert first.reasons == (
        "attention: 32 features in 2 atoms, 2 ways",
        "feed-forward: 128 features in 128 atoms, 2 ways",
    )
    whole = made(pin={"tp": 4, "pp": 1}).explain().blocks[0]
    assert "attention: 32 features in 2 atoms, 4 ways; k.weight, v.weight whole: fewer atoms than 4" in whole.reasons[0]
    alone = made(pin={"tp": 1}).explain().blocks[0]
    assert alone.reasons[0] == "attention: whole, there is no tensor axis"


def test_blocks_computed_again_are_as_few_as_fit():
    plain = made(pin={"dp": 8, "zero": 0}).explain().chosen
    assert plain.again == ()
    tight = made(pin={"dp": 8, "zero": 0}, memory=plain.memory.total - 1)
    chosen = tight.explain().chosen
    assert 0 < len(chosen.again) < 4
    assert tuple(tight.checkpointing) == chosen.again
    assert any(one.again for one in tight.explain().blocks)


def test_the_front_is_beaten_by_no_candidate():
    explained = made().explain()
    front = explained.front
    assert len(front) > 1
    for one in explained.priced:
        assert any(best.seconds <= one.seconds and best.bytes <= one.bytes for best in front)
    for best in front:
        assert not any(one.seconds < best.seconds and one.bytes < best.bytes for one in explained.priced)


def test_the_page_needs_nothing_else(tmp_path):
    explained = made(memory=10**6, pin={"tp": 2}).explain()
    text = explained.write_html(tmp_path / "plan.html").read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    mesh, memory, time, front = map(ElementTree.fromstring, drawings)
    assert "http" not in text
    assert "<script" not in text
    tips = [title.text for title in mesh.iter("title")]
    assert len(tips) == len(set(tips)) == 8
    assert len(list(memory.iter("line"))) == 1
    assert {title.text.split()[0] for title in time.iter("title")} >= {"compute", "optimizer"}
    points = [one for one in front.iter("circle") if one.find("title").text != "chosen"]
    tips = {point.find("title").text.partition(": ")[0] for point in points}
    assert len(points) == len(tips) <= len(explained.priced)
    assert tips <= {str(one.candidate) for one in explained.priced}
    shown = {(one.seconds, one.bytes, one.fits) for one in explained.priced if str(one.candidate) in tips}
    for one in explained.priced:  # one that is not drawn lies on one that is
        assert any(
            one.fits == fits and abs(one.seconds / seconds - 1) < 0.02 and abs(one.bytes / size - 1) < 0.02
            for seconds, size, fits in shown
        )


def test_a_page_draws_each_rank_with_all_of_its_stages(tmp_path):
    explained = made(pin={"tp": 1, "pp": 2, "dp": 4, "virtual": 2}).explain()
    text = explained.write_html(tmp_path / "plan.html").read_text()
    assert ">stages 0, 2<" in text
    assert ">stages 1, 3<" in text
    assert text.count(">2 blocks<") == 2


def test_every_part_of_a_candidate_has_its_colour():
    one = made().explain().ranked[0]
    assert set(TIME) == set(asdict(one.cost))
    assert set(MEMORY) == set(asdict(one.memory))


class Loss(nn.Module):
    """A model whose activations no formula knows: each block keeps a dozen copies of the wide layer's result."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 512), nn.Linear(512, 64), nn.LayerNorm(64)

    def forward(self, x):
        y = self.up(self.norm(x))
        for _ in range(12):
            y = torch.sin(y)
        return (x + self.down(y)).square().mean()


def test_a_plan_that_does_not_fit_in_a_dry_run_is_demoted():
    batch = torch.zeros(64, 8, 64)
    asked = {"world_size": 2, "batch": 64, "hardware": "cpu", "sample": batch, "verify": batch}
    free = generate_plan(Loss(), asked).explain()
    assert free.demoted == ()
    assert free.peak > free.chosen.memory.total  # the formula is short of it
    alike = {one.candidate: dry(one, free.request, batch) for one in free.ranked}
    least = min(alike.values())
    assert least < free.peak
    tight = generate_plan(Loss(), {**asked, "memory": least}).explain()
    assert tight.peak <= least
    assert tight.demoted
    assert all(size > least for _, size in tight.demoted)
    assert "demoted" in str(tight)
    alone = {**asked, "pin": {"tp": 1, "zero": 0, "microbatches": 1}}
    enough = generate_plan(Loss(), {**alone, "verify": None}).explain().chosen.memory.total
    with pytest.raises(InfeasibleError, match="in a dry run"):
        generate_plan(Loss(), {**alone, "memory": enough})


def dry(estimate, request, batch):
    return dry_run(plan_of(request.structure, estimate), Loss(), batch).peak


def test_what_was_not_chosen_cannot_be_explained():
    for plan in (Plan(mesh={"dp": 2}, parameters={"*": {}}), made().override(zero=1), Plan.from_json(made().to_json())):
        with pytest.raises(PlanError, match="was not made by generate_plan"):
            plan.explain()


def test_another_choice_is_priced_and_its_losses_add_up():
    plan = made(memory=10**8)
    best = plan.explain().chosen
    other = plan.explain(against={"tp": 4})
    assert other.other.candidate.tp == 4
    assert sum(more for _, more in other.losses) == pytest.approx(other.other.cost.total - best.cost.total)
    assert other.other == made(memory=10**8, pin={"tp": 4}).explain().chosen
    assert "instead, with tp=4: " in str(other)
    assert "memory: " in str(other)
    same = plan.explain(against={"tp": best.candidate.tp, "dp": best.candidate.dp, "zero": best.candidate.zero})
    assert "that is the choice" in str(same)


def test_another_choice_that_does_not_fit_says_by_how_much():
    loose = made(pin={"dp": 8, "zero": 0, "microbatches": 1, "checkpointing": True}).explain().chosen.memory.total
    plan = made(memory=loose - 1)
    other = plan.explain(against={"dp": 8, "zero": 0, "microbatches": 1})
    assert not other.fits
    assert str(other).endswith("it does not fit")
    assert "missing" in str(other)
    assert other.other.memory.total == loose  # with all computed again that may be


def test_another_choice_that_nobody_can_make_is_refused():
    with pytest.raises(InfeasibleError, match="3"):
        made().explain(against={"tp": 3})
    with pytest.raises(PlanError, match="'width'"):
        made().explain(against={"width": 3})


def test_a_decision_is_told_in_the_terms_of_the_field():
    explained = made(hardware="h100", world_size=16, precision=None).explain()
    text = str(explained)
    parameters = sum(one.numel() for one in Model().parameters())
    assert f"{parameters / 1e3:.3g}K parameters on 16 x h100" in text
    for name in ("computes in: float32", "a step: ", "positions: ", "(MFU)", "memory: ", "schedule: ", "binds: "):
        assert name in text
    pinned = str(made(hardware="h100", world_size=16, pin={"tp": 4, "dp": 4}).explain())
    assert "axis tp: 4 ranks 1 apart, inside a node" in pinned
    assert "axis dp: 4 ranks 4 apart, crosses boundaries of nodes of 8" in pinned
    weights, meeting = 4 * (2 * 32**2 + 2 * 16 * 32 + 8 * 32**2) + 32 * 64, 4 * 2 * 64 * 32
    assert operations(explained.request) == 6 * 16 * 64 * (weights + meeting)
    assert [number(value) for value in (999.6, 24_700, 7.24e9, 12)] == ["1K", "24.7K", "7.24B", "12"]


def test_bars_do_not_vanish_against_a_limit_that_is_far():
    explained = made(hardware="h100").explain()
    text = page(explained, str(explained))
    memory = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", text, re.DOTALL)[1])
    assert max(float(box.get("width")) for box in memory.iter("rect")) > 100
    assert "and not drawn" in text
    assert not set(TIME.values()) & set(MEMORY.values())
    assert escape(str(explained)) in text  # the page says all that the text says


def test_what_a_dry_run_passed_over_does_not_fit():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    explained = generate_plan(model, world_size=2, batch=8, hardware="cpu", sample=torch.randn(1, 16)).explain()
    next_best = explained.ranked[1].candidate
    pin = {name: getattr(next_best, name) for name in ("dp", "tp", "zero", "sp", "microbatches", "checkpointing")}
    assert explained.against(pin).fits
    passed_over = replace(explained, demoted=((next_best, 1 << 60),))
    found = passed_over.against(pin)
    assert found.other.candidate == next_best and not found.fits
    assert "in a dry run: " in str(found) and str(found).endswith("it does not fit")


def test_sizes_of_small_models_are_told_from_nothing():
    """Everything was 0.00 GiB of a small model, what it has as well as what it may."""
    explained = made(hardware="h100").explain()
    told = str(explained)
    assert re.search(r"\d\.\d\d [KM]iB of \d+\.\d\d GiB, \d+\.\d\d GiB free", told)
    assert not re.search(r"(?<![\d.])0\.00+ GiB", told)
    sizes = [value for value in asdict(explained.chosen.memory).values() if value]
    assert sizes and all(f"{size / 2**30:.2g}" in told for size in sizes)

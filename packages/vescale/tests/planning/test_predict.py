"""Profiles, what prices a step by them, and the calibration that writes them."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import vescale
from vescale import Plan, PlanError
from vescale.calibrate import calibrate, fitted
from vescale.cli import app
from vescale_plans import dry_run, library
from vescale_plans._dry.meter import Meter
from vescale_plans.search import (
    Candidate,
    Curve,
    Hardware,
    Product,
    hardware_of,
    plan_of,
    sample_of,
    structure_of,
)
from vescale_plans.timeline import operation_of
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")
CPU = hardware_of("cpu")
aten = torch.ops.aten


# --- profiles -----------------------------------------------------------------------------


def test_a_curve_is_straight_between_its_points():
    curve = Curve(((10, 1.0), (20, 2.0), (40, 3.0)))
    assert [curve.at(size) for size in (0, 10, 15, 20, 30, 40, 60)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_a_profile_goes_through_json():
    measured = replace(
        CPU,
        product=Product(1e-6, 1e-11, 0.0, 1e-10, 0.0),
        operators={"aten.add": Curve(((1.0, 1e-6), (1e6, 1e-3)))},
        collectives={"all_gather": {2: Curve(((1.0, 1e-4), (1e6, 1e-2)))}},
        waits=Curve(((0.0, 0.0), (1.0, 0.1))),
    )
    assert Hardware.from_json(measured.to_json()) == measured


def test_a_profile_is_read_from_a_file_and_by_auto(tmp_path, monkeypatch):
    path = tmp_path / "vescale" / "hardware.json"
    path.parent.mkdir()
    path.write_text(replace(CPU, name="this one").to_json())
    assert hardware_of(str(path)).name == hardware_of(path).name == "this one"
    monkeypatch.setenv("VESCALE_HARDWARE", str(tmp_path))
    assert hardware_of("auto").name == "this one"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"vescale hardware": 1, "gears": 5}'])
def test_what_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"not a hardware profile"):
        hardware_of(path)
    with pytest.raises(PlanError, match="cannot be read"):
        hardware_of(tmp_path / "missing.json")


def test_terms_of_a_product_are_found_again():
    product = Product(5e-6, 1e-11, 2e-10, 1e-10, 3e-10)
    shapes = [(m, n, k) for m in (64, 256, 1024) for n in (64, 512) for k in (128, 2048)]
    found = fitted([(shape, product.seconds(*shape)) for shape in shapes])
    for shape in shapes:
        assert found.seconds(*shape) == pytest.approx(product.seconds(*shape), rel=1e-6)


def test_measured_curves_count_before_rates():
    measured = replace(CPU, operators={"aten.gelu": Curve(((0, 0.0), (10, 1.0)))})
    assert measured.operator_seconds("aten.gelu", 5) == 0.5
    assert measured.operator_seconds("aten.gelu_", 5) == 0.5
    assert measured.operator_seconds("aten.tanh", 8e9) == CPU.operator_seconds("aten.tanh", 8e9)


def test_float32_is_priced_as_computed():
    h100 = hardware_of("h100")
    wide = h100.computing(4)
    assert (wide.flops, wide.itemsize, wide.computing(4)) == (h100.wide, 4, wide)
    assert CPU.computing(4) is CPU
    measured = replace(CPU, product=Product(1e-6, 1e-11, 0.0, 0.0, 2e-10)).computing(2)
    assert measured.product == Product(1e-6, 1e-11, 0.0, 0.0, 1e-10)
    half, full = (
        operation_of(aten.mm.default, (a, a), {}, a @ a).seconds(replace(h100, launch=0.0, small=0, bandwidth=1e30))
        for a in (torch.ones(64, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    )
    assert full / half == pytest.approx(h100.flops / h100.wide)


def test_attention_is_priced_in_the_dtype_of_its_queries():
    """Its backward is given the logarithms of its sums as well, which are float32 under any precision."""
    query = torch.ones(1, 2, 16, 8, dtype=torch.bfloat16)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, query, query)
    args = (query, query, query, query, out, sums, 0.0, False)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args)
    assert sums.dtype is torch.float32
    found = operation_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, {}, back)
    assert found.itemsize == 2


# --- operations ---------------------------------------------------------------------------


def test_sizes_of_operations():
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    assert operation_of(aten.mm.default, (a, b), {}, a @ b).product == (1, 3, 5, 4)
    assert operation_of(aten.t.default, (a,), {}, a.t()).moved == 0
    assert operation_of(aten.add_.Tensor, (a, a), {}, a).moved == a.nbytes
    assert operation_of(aten.add.Tensor, (a, a[:1].expand(3, 4)), {}, a + a).moved == 2 * a.nbytes + 16


GROUPED = {  # operands -> products: as many as there are groups
    ((24, 4), (3, 4, 5)): (3, 8, 5, 4),
    ((3, 6, 4), (4, 24)): (3, 6, 8, 4),
    ((6, 24), (24, 5)): (3, 6, 5, 8),
    ((3, 6, 4), (3, 4, 5)): (3, 6, 5, 4),
}


@pytest.mark.parametrize("shapes", GROUPED)
def test_grouped_products_are_priced_as_products_of_each_group(shapes):
    left, right = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    ends = None if len(shapes[0]) == len(shapes[1]) == 3 else torch.empty(3, dtype=torch.int32, device="meta")
    found = operation_of(aten._grouped_mm.default, (left, right, ends), {}, left)
    assert (found.product, found.itemsize) == (GROUPED[shapes], 2)
    h100 = hardware_of("h100")
    count, *size = found.product
    assert found.seconds(h100) == pytest.approx(count * (h100.product_seconds(*size) - h100.launch) + h100.launch)
    assert found.seconds(replace(h100, at_once=2)) == count * h100.product_seconds(*size)


def test_a_tensor_axis_halves_products():
    from llama.model import build

    model = build(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2)
    ids = torch.arange(128).view(4, 32)
    rates = replace(CPU, launch=0.0, small=0, bandwidth=1e30)
    whole = dry_run(Plan({"tp": 1}, {"*": {}}), model, {"input_ids": ids, "labels": ids})
    for sp in (False, True):
        plan = library.llama({"tp": 2}, sequence_parallel=sp)
        half = dry_run(plan, model, {"input_ids": ids, "labels": ids})
        share = (1 + _twice(model, ids) / whole.flops) / 2
        products = whole.timeline.seconds(rates).products * share
        assert half.timeline.seconds(rates).products == pytest.approx(products, rel=1e-6)


def _twice(model, ids):
    """Operations of the rotary embedding, on every rank alike: a product of matrices in transformers 5.17."""
    with Meter() as meter:
        model.model.rotary_emb(torch.ones(1), torch.arange(ids.shape[1])[None])
    return meter.flops


@pytest.mark.parametrize("sp", [False, True])
def test_generated_tensor_parallelism_computes_nothing_twice(sp):
    """A split table's partial sums are added up once, where they leave it."""
    from llama.model import build

    model = build(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2)
    ids = torch.arange(128).view(4, 32)
    batch = {"input_ids": ids, "labels": ids}
    structure = structure_of(model, sample_of(model, batch))
    one = dry_run(Plan({"tp": 1}, {"*": {}}), model, batch)
    two = dry_run(plan_of(structure, Candidate(tp=2, sp=sp)), model, batch)
    assert two.flops * 2 == one.flops + _twice(model, ids)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "sp": True}, {"dp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_ranks_wait_for_each_other_after_what_they_computed(degrees):
    """Whatever they meet at, and however often: a tenth of the computation, where they wait for a tenth of it."""
    from llama.model import build

    model = build(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2)
    ids = torch.arange(128).view(4, 32)
    batch = {"input_ids": ids, "labels": ids}
    plan = plan_of(structure_of(model, sample_of(model, batch)), Candidate(**degrees))
    timeline = dry_run(plan, model, batch).timeline
    total = sum(timeline.between, start=Counter())
    assert total.total() == sum(timeline.operations.values()) and len(timeline.between) == len(timeline.collectives) + 1
    alone = replace(CPU, at_once=2, host=1e-5, hidden=0.0)
    without = timeline.seconds(alone)
    waiting = timeline.seconds(replace(alone, waits=Curve(((0.0, 0.0), (1.0, 0.1)))))
    computed = without.total - without.communication
    assert waiting.communication - without.communication == pytest.approx(computed / 10, rel=1e-6)
    met = [seconds for event, seconds, _ in timeline.communication(alone) if event is not None and seconds]
    assert len(met) == sum(event.count > 0 for event in timeline.collectives)


def test_an_all_reduce_in_two_halves_is_priced_whole():
    from llama.model import build

    model = build(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2)
    ids, plan = torch.arange(1024).view(8, 128) % 128, library.llama({"tp": 4}, sequence_parallel=False)
    found = {
        backend: dry_run(plan, model, {"input_ids": ids, "labels": ids}, backend=backend)
        for backend in ("nccl", "gloo")
    }
    assert any(not event.count and event.received for event in found["gloo"].collectives)
    assert found["nccl"].received == found["gloo"].received
    nccl, gloo = (one.timeline.seconds(replace(CPU, hidden=0.0)).communication for one in found.values())
    assert gloo == pytest.approx(nccl)


# --- predictions --------------------------------------------------------------------------


def test_a_pipeline_is_priced_by_its_simulator():
    from llama.model import build

    model = build(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=4)
    ids = torch.arange(256).view(8, 32) % 128
    batch = {"input_ids": ids, "labels": ids}
    structure = structure_of(model, sample_of(model, batch))
    seen = []

    def simulator(pipeline, ranks, forward, backward, transfer, pace):
        seen.append((ranks, forward, backward, transfer, pace))
        return 7.0

    plan = plan_of(structure, Candidate(pp=2, microbatches=4))
    found = vescale.predict(plan, model, batch, replace(CPU, at_once=None), simulator=simulator)
    ranks, forward, backward, transfer, pace = seen[0]
    assert pace(1) == pace(2) == 1 and ranks == 2 and len(forward) == len(backward) == 2 and min(forward + backward) > 0
    assert transfer == pytest.approx(CPU.collective_seconds("send", 2, 2 * 32 * 64 * 4))
    assert 7.0 < found.seconds < 7.1
    assert 0 < found.peak < found.dry.peak * 4
    ours = vescale.predict(plan, model, batch, CPU).spent["bubble"]
    assert ours > 0


def test_interleaved_stages_do_no_more_than_stages_of_their_blocks_together():
    """A rank computes, sends and adds up as much, whether its blocks are one stage or two; only waiting is less."""
    from llama.model import build

    model = build(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=4)
    ids = torch.arange(128).view(4, 32)
    batch = {"input_ids": ids, "labels": ids}
    structure = structure_of(model, sample_of(model, batch))
    rates = replace(CPU, launch=0.0, small=0, at_once=None)
    busy = [
        vescale.predict(plan_of(structure, Candidate(pp=2, microbatches=4, virtual=virtual)), model, batch, rates)
        for virtual in (1, 2)
    ]
    assert busy[0].spent["stages"] == pytest.approx(busy[1].spent["stages"], rel=1e-6)


# --- calibration --------------------------------------------------------------------------


@in_turns(3)
def test_calibrate_on_one_rank(tmp_path, monkeypatch):
    from vescale._machine import probes

    monkeypatch.setattr(probes, "BYTES", (1 << 14, 1 << 16))
    path = tmp_path / "hardware.json"
    result = CliRunner().invoke(app, ["calibrate", "--rounds", "1", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert "matrix products" in result.stderr and "a small training step" in result.stderr
    profile = hardware_of(path)
    assert profile.product.flop > 0 and profile.bandwidth > 1e8
    assert {"aten.add", "aten.gelu", "attention.causal"} <= set(profile.operators)
    assert not profile.collectives and profile.waits is None
    assert json.loads(path.read_text())["vescale hardware"] == 1


@in_turns(3)
def test_calibrate_measures_collectives_of_two_ranks():
    profile = calibrate(2, rounds=1)
    assert {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"} <= set(profile.collectives)
    for curves in profile.collectives.values():
        times = [seconds for _, seconds in curves[2].points]
        assert times == sorted(times) and times[0] > 0
    assert profile.at_once and -1 <= profile.hidden <= 1
    (nothing, none), *_, (computed, waited) = profile.waits.points
    assert nothing == none == 0 < computed and waited >= 0


def test_a_calibration_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr("vescale.calibrate.LONGEST", 1)
    with pytest.raises(PlanError, match="a rank failed: not done after 1 s, at"):
        calibrate(1)


def calibrate_in_a_world():
    with pytest.raises(PlanError, match="in a world already"):
        calibrate(2)


def test_only_outside_a_world():
    run_ranks(2, calibrate_in_a_world)
    with pytest.raises(PlanError, match="measure nothing"):
        calibrate(0)

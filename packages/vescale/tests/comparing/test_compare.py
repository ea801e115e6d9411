"""Recorded runs compared: equal ones on any mesh, and the first place of a bug that only one rank has."""

import contextlib
import json
import random
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import vescale
from vescale._recorded.digest import Summary, measure, unpack
from vescale.cli import app
from vescale_dtensor import InterleavedShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from vescale_dtensor.engine import local_only
from vescale_plans import Pipeline, library
from vescale_testkit import in_turns, mesh_of, run_ranks, slice_of, warm_up

warm_up("torch._dynamo", "vescale", "transformers.models.llama.modeling_llama")

POSITIONS, VOCABULARY, BATCH, STEPS, MICROBATCHES = 12, 32, 4, 3, 2
MESH = {"dp": 2, "tp": 2}
SPLITS = {"batch": 4, "seq": 2, "hidden": 4}


def build_gpt():
    from nanogpt.model import GPT, GPTConfig

    return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, n_layer=2, n_head=4, n_embd=16, dropout=0.1))


def build_llama():
    from llama.model import build

    return build(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2)


MODELS = {
    "gpt": (build_gpt, lambda model, x, y: model(x, y), partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "llama": (build_llama, lambda model, x, y: model(input_ids=x, labels=x).loss, partial(torch.optim.AdamW, lr=5e-4)),
}


class Moment:
    """Where a bug happens: in step 2, on rank 1."""

    def __init__(self, model, optimizer, rank):
        self.model, self.optimizer, self.rank, self.step = model, optimizer, rank, 0
        self.before_step = lambda: None

    @property
    def is_here(self):
        return self.rank == 1 and self.step == 2

    def module(self, name):
        return self.model.get_submodule(name)


def train(folder, name, plan=None, bug=None, keep=(), microbatches=MICROBATCHES, exact=False):
    """Records STEPS steps. Microbatches are given to each rank as its own part, so that nothing compares them.

    exact: in the reproducible mode."""
    with vescale.reproducible(SPLITS) if exact else contextlib.nullcontext():
        return recorded(folder, name, plan, bug, keep, microbatches)


def recorded(folder, name, plan, bug, keep, microbatches):
    build, loss_of, optimizer_fn = MODELS[name]
    torch.manual_seed(0)
    model = build()
    if plan is None:
        optimizer, rank = optimizer_fn(model.parameters()), 0
    else:
        model, optimizer = vescale.parallelize(plan, model, optimizer_fn)
        rank = torch.distributed.get_rank()
    moment = Moment(model, optimizer, rank)
    data = torch.Generator().manual_seed(5)
    if bug is not None:
        bug(moment)
    with vescale.record(model, folder, optimizer=optimizer, keep=keep):
        for moment.step in range(1, STEPS + 1):
            batches = [torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data) for _ in range(microbatches)]
            if bug is microbatches_swapped and moment.is_here:
                batches.reverse()
            for inputs, targets in batches:
                if plan is not None and "dp" in plan.mesh:
                    mesh = model._vescale.device_mesh
                    parts = [batch.chunk(mesh.size(0))[mesh.get_local_rank("dp")] for batch in (inputs, targets)]
                    inputs, targets = plan.local_batch(parts)
                (loss_of(model, inputs, targets) / microbatches).backward()
            moment.before_step()
            optimizer.step()
            optimizer.zero_grad()
    return {n: (p.detach().full_tensor() if plan is not None else p.detach()) for n, p in model.named_parameters()}


# --- bugs of one rank -------------------------------------------------------------------


def gradient_doubled(moment):
    def before_step():
        if moment.is_here:
            moment.module("transformer.h.1.mlp.c_fc").weight.grad.to_local().mul_(2)

    moment.before_step = before_step


def norm_not_reduced(moment):
    """Rank 1 steps with its own contribution to the gradient of a norm's weight."""
    weight, own = moment.module("transformer.h.1.ln_2").weight, []
    with local_only():
        weight.register_hook(lambda gradient: own.append(gradient.clone()))

    def before_step():
        if moment.is_here:
            weight.grad.to_local().copy_(sum(own[-MICROBATCHES:]))

    moment.before_step = before_step


def bias_twice(moment):
    """The second time by hand, on what rank 1 holds: of a column-split layer."""

    def after(module, args, output):
        if moment.is_here:
            with torch.no_grad(), local_only():
                output.data.add_(module.bias.data)

    moment.module("transformer.h.0.mlp.c_fc").register_forward_hook(after)
    moment.module("transformer.h.0.mlp.c_fc").bias.data.add_(0.1)


def sum_without_a_part(moment):
    """Rank 1 gives nothing to a sum over the tensor axis."""

    def before(module, args):
        if moment.is_here:
            with torch.no_grad(), local_only():
                args[0].data.zero_()

    moment.module("transformer.h.0.attn.c_proj").register_forward_pre_hook(before)


def dropout_off(moment):
    """Rank 1 drew one number more than the others before a dropout."""

    def before(module, args):
        if moment.is_here:
            torch.rand(1)

    moment.module("transformer.h.1.attn.resid_dropout").register_forward_pre_hook(before)


def first_dropout_off(moment):
    """As `dropout_off`, of a dropout of what all ranks hold."""

    def before(module, args):
        if moment.is_here:
            torch.rand(1)

    moment.module("transformer.drop").register_forward_pre_hook(before)


def microbatches_swapped(moment):
    """`train` gives them to rank 1 in the other order."""


def weight_stale(moment):
    """Rank 1 computes with the weight of the step before."""
    module = moment.module("transformer.h.0.attn.c_attn")
    old = [module.weight.to_local().detach().clone()]

    def swap(*_):
        if moment.is_here:
            with torch.no_grad(), local_only():
                now = module.weight.data.clone()
                module.weight.data.copy_(old[0])
                old[0] = now

    module.register_forward_pre_hook(swap)
    module.register_forward_hook(swap)


def gradient_of_activation_scaled(moment):
    def after(module, args, output):
        output.register_hook(lambda gradient: gradient * (2.0 if moment.is_here else 1.0))

    moment.module("transformer.h.1.mlp.c_fc").register_forward_hook(after)


def parameter_not_stepped(moment):
    weight = moment.module("transformer.ln_f").weight
    kept = []
    moment.optimizer.register_step_pre_hook(lambda *_: kept.append(weight.to_local().detach().clone()))

    def after(*_):
        if moment.is_here:
            weight.detach().to_local().copy_(kept[-1])

    moment.optimizer.register_step_post_hook(after)


def one_bit(moment):
    """The last bit of one number of rank 1's part, once."""

    def after(module, args, output):
        if moment.is_here:
            with torch.no_grad(), local_only():
                output.data.as_subclass(torch.Tensor).reshape(-1).view(torch.int32)[3] ^= 1

    moment.module("transformer.h.0.mlp.gelu").register_forward_hook(after)


# bug -> the module, direction and tensor that compare is to name
BUGS = {
    gradient_doubled: ("transformer.h.1.mlp.c_fc", "backward", "gradient of weight"),
    norm_not_reduced: ("transformer.h.1.ln_2", "backward", "gradient of weight"),
    bias_twice: ("transformer.h.0.mlp.c_fc", "forward", "output"),
    sum_without_a_part: ("transformer.h.0.attn.c_proj", "forward", "output"),
    dropout_off: ("transformer.h.1.attn.resid_dropout", "forward", "output"),
    microbatches_swapped: ("", "forward", "input.0"),
    weight_stale: ("transformer.h.0.attn.c_attn", "forward", "output"),
    gradient_of_activation_scaled: ("transformer.h.1.mlp.c_fc", "backward", "gradient of output"),
    parameter_not_stepped: ("transformer.ln_f", "update", "weight"),
}
# In the reproducible mode a partial sum lies on the first rank, whole: what rank 1 draws for its zeros has no effect.
EXACT_BUGS = {bug: place for bug, place in BUGS.items() if bug is not dropout_off} | {
    first_dropout_off: ("transformer.drop", "forward", "output"),
    one_bit: ("transformer.h.0.mlp.gelu", "forward", "output"),
}


def nothing_but_a_bias(moment):
    """What `bias_twice` does to all ranks."""
    moment.module("transformer.h.0.mlp.c_fc").bias.data.add_(0.1)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Folders of the runs on one device, each made once."""
    top, made = tmp_path_factory.mktemp("one"), {}

    def run(name, **options):
        key = f"{name} {options}"
        if key not in made:
            made[key] = top / str(len(made))
            train(made[key], name, **options)
        return made[key]

    return run


PLANS = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "dp2 tp2 sp": (MESH, {"sequence_parallel": True}),
    "dp2 tp2 sp, ZeRO-3": (MESH, {"sequence_parallel": True, "zero": 3}),
}


def plan_of(name, mesh, sequence_parallel=False, **options):
    plan = getattr(library, name)(mesh=mesh, sequence_parallel=sequence_parallel)
    return plan.override(**options) if options else plan


@in_turns(3)
@pytest.mark.parametrize("mesh", list(PLANS))
@pytest.mark.parametrize("name", list(MODELS))
def test_one_device_and_meshes_do_not_differ(name, mesh, one_device, tmp_path):
    sizes, options = PLANS[mesh]
    ranks = torch.Size(sizes.values()).numel()
    run_ranks(ranks, train, tmp_path / "run", name, plan_of(name, sizes, **options), timeout=120)
    comparison = vescale.compare(one_device(name), tmp_path / "run", rtol=1e-4)
    assert comparison.equal, str(comparison)
    assert comparison.steps == STEPS + 1 and comparison.alone == ()
    assert comparison.places > 400


@in_turns(3)
@pytest.mark.parametrize("bug", list(BUGS), ids=lambda bug: bug.__name__)
def test_a_bug_of_one_rank_is_found(bug, one_device, tmp_path):
    run_ranks(4, train, tmp_path / "run", "gpt", plan_of("gpt", MESH), bug, timeout=120)
    wanted = one_device("gpt", **({"bug": nothing_but_a_bias} if bug is bias_twice else {}))
    comparison = vescale.compare(wanted, tmp_path / "run", rtol=1e-4)
    first = comparison.first
    assert first is not None
    assert (first.step, first.module, first.direction, first.tensor) == (2, *BUGS[bug]), str(comparison)


@pytest.mark.parametrize("mesh", slice_of(PLANS, 4))
def test_in_the_reproducible_mode_meshes_are_equal_to_the_bit(mesh, one_device, tmp_path):
    sizes, options = PLANS[mesh]
    plan = plan_of("gpt", sizes, **options)
    run_ranks(torch.Size(sizes.values()).numel(), train, tmp_path / "run", "gpt", plan, exact=True, timeout=120)
    comparison = vescale.compare(one_device("gpt", exact=True), tmp_path / "run")
    assert comparison.equal, str(comparison)
    assert comparison.places > 400


@pytest.mark.parametrize("bug", slice_of(EXACT_BUGS, 5), ids=lambda bug: bug.__name__)
def test_in_the_reproducible_mode_a_bug_is_one_differing_bit(bug, one_device, tmp_path):
    run_ranks(4, train, tmp_path / "run", "gpt", plan_of("gpt", MESH), bug, exact=True, timeout=120)
    wanted = one_device("gpt", exact=True, **({"bug": nothing_but_a_bias} if bug is bias_twice else {}))
    first = vescale.compare(wanted, tmp_path / "run").first
    assert first is not None
    assert (first.step, first.module, first.direction, first.tensor) == (2, *EXACT_BUGS[bug])


@in_turns(3)
def test_the_same_run_twice_is_equal_to_the_bit_and_one_bit_is_found(tmp_path):
    keep = "2/forward/transformer.h.0.mlp.gelu/0/output"
    for folder, bug in (("a", None), ("b", None), ("c", one_bit)):
        run_ranks(4, train, tmp_path / folder, "gpt", plan_of("gpt", MESH), bug, keep, timeout=120)
    a, b, c = (tmp_path / folder for folder in "abc")
    assert vescale.compare(a, b).equal
    comparison = vescale.compare(a, c)
    first = comparison.first
    assert (first.step, first.module, first.direction) == (2, "transformer.h.0.mlp.gelu", "forward")
    # Rank 1 has the last 32 of 64 columns, and all rows of dp's first half: its element 3 is column 35.
    assert "first at [0, 0, 35]: a 0x" in comparison.first_value
    one, other = (int(part.split("0x")[1][:8], 16) for part in comparison.first_value.split(", b "))
    assert one ^ other == 1
    page = comparison.write_html(tmp_path / "page.html").read_text()
    assert "transformer.h.0.mlp.gelu" in page and "first at [0, 0, 35]" in page


def test_recording_changes_nothing_and_leaves_nothing(tmp_path):
    def with_and_without(folder):
        plan = plan_of("gpt", MESH)
        recorded = train(folder, "gpt", plan)
        torch.manual_seed(0)
        model, optimizer = vescale.parallelize(plan, build_gpt(), MODELS["gpt"][2])
        data = torch.Generator().manual_seed(5)
        for _ in range(STEPS):
            for _ in range(MICROBATCHES):
                inputs, targets = torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data)
                (model(inputs, targets) / MICROBATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
        hooks = [len(module._forward_hooks) for module in model.modules()]
        with vescale.record(model, folder / "more", optimizer=optimizer):
            pass
        left = [len(module._forward_hooks) for module in model.modules()] != hooks or "step" in optimizer.__dict__
        same = all(torch.equal(p.detach().full_tensor(), recorded[n]) for n, p in model.named_parameters())
        return same, left

    assert run_ranks(4, with_and_without, tmp_path / "run", timeout=120) == [(True, False)] * 4


def test_what_stood_around_an_optimizers_step_stands_there_again(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedulers = vars(optimizer)["step"]
    with vescale.record(model, tmp_path / "run", optimizer=optimizer):
        assert optimizer.step is not schedulers
    assert vars(optimizer)["step"] is schedulers


def test_a_pipeline_and_one_device_do_not_differ(one_device, tmp_path):
    def pipelined(folder):
        plan = plan_of("llama", {"pp": 2, "tp": 2}).override(
            pipeline=Pipeline(cuts=("model.layers.1",), microbatches=MICROBATCHES)
        )
        build, loss_of, optimizer_fn = MODELS["llama"]
        torch.manual_seed(0)
        model, optimizer = vescale.parallelize(plan, build(), optimizer_fn)
        data = torch.Generator().manual_seed(5)
        with vescale.record(model, folder, optimizer=optimizer):
            for _ in range(STEPS):
                batches = [
                    torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data)[0] for _ in range(MICROBATCHES)
                ]
                loss_of(model, torch.cat(batches), None).backward()
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(4, pipelined, tmp_path / "run", timeout=120)
    comparison = vescale.compare(one_device("llama"), tmp_path / "run", rtol=1e-4)
    assert comparison.equal, str(comparison)
    assert comparison.places > 400
    # What a cut divides is in one run only: the root, its `model`, and rotary tables, which both stages compute.
    divided = ("/forward//", "/backward//", "/forward/model/", "/backward/model/", "/forward/model.rotary_emb/")
    assert [place for place in comparison.alone if not place[1:].startswith(divided)] == []


def test_without_an_optimizer_and_from_a_shell(tmp_path):
    for folder, factor in (("a", 1.0), ("b", 1.0), ("c", 1.001)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        with vescale.record(model, tmp_path / folder) as recorder:
            for step in range(2):
                (model(torch.ones(2, 3) * factor**step).sum()).backward()
                recorder.step()
            model(torch.ones(1, 3))
    command = ["compare", str(tmp_path / "a")]
    same = CliRunner().invoke(app, [*command, str(tmp_path / "b")])
    assert same.exit_code == 0 and "equal to the bit" in same.output
    assert CliRunner().invoke(app, [*command, str(tmp_path / "c"), "--rtol", "0.01"]).exit_code == 0
    other = CliRunner().invoke(app, [*command, str(tmp_path / "c"), "--html", str(tmp_path / "page.html")])
    assert other.exit_code == 1
    assert "differ first at step 2, forward, (root): input.0" in other.output
    assert "keep='2/forward//0/input.0'" in other.output
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 2 and page.count("<table>") == page.count("<details>") + 1
    assert "step 2, forward: " in page and "http" not in page


def test_what_is_wrong_is_said(tmp_path):
    model = torch.nn.Linear(2, 2)
    with vescale.record(model, tmp_path / "a"):
        pass
    with pytest.raises(vescale.VescaleError, match="cannot be written"), vescale.record(model, tmp_path / "a"):
        pass
    with pytest.raises(vescale.VescaleError, match=r"steps\.jsonl cannot be read"):
        vescale.compare(tmp_path / "a", tmp_path / "none")
    with pytest.raises(vescale.VescaleError, match="rtol is -1"):
        vescale.compare(tmp_path / "a", tmp_path / "a", rtol=-1)
    (tmp_path / "a/steps.jsonl").write_text('{"format": 7}\n')
    with pytest.raises(vescale.VescaleError, match="has format 7; this version reads 1"):
        vescale.compare(tmp_path / "a", tmp_path / "a")


# --- the digest -------------------------------------------------------------------------


PLACEMENTS = (Replicate(), Shard(0), Shard(1), Shard(2), InterleavedShard(2, 3), Partial())


def layouts():
    """Of a tensor [4, 5, 12] on two axes: every pair, and flat parts of what the first axis leaves."""
    whole, parts = (191, 49), (77, 43)
    flat = {Replicate(): whole, Partial(): whole, Shard(0): parts, InterleavedShard(2, 3): parts}
    return [
        *((a, b) for a in PLACEMENTS for b in PLACEMENTS),
        *((a, RaggedShard((0, 1, 2), units)) for a, units in flat.items()),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_digest_does_not_depend_on_the_layout(dtype, tmp_path):
    def measured(folder):
        generator = torch.Generator().manual_seed(7)
        # Without zeros: where a partial sum is made, -0.0 + 0.0 is 0.0, another bit.
        value = torch.randn(4, 5, 12, generator=generator).mul_(64).floor_().add_(0.5).to(dtype)
        mesh = mesh_of(2, 2, names=("a", "b"))
        model = torch.nn.Module()
        model.register_buffer("plain", value)
        for at, pair in enumerate(layouts()):
            model.register_parameter(
                f"b{at}", torch.nn.Parameter(distribute_tensor(value, mesh, list(pair)), requires_grad=False)
            )
        with vescale.record(model, folder, keep="*"):
            pass
        return len(layouts())

    count = run_ranks(4, measured, tmp_path / "run", timeout=120)[0]
    line = json.loads((tmp_path / "run/steps.jsonl").read_text().splitlines()[1])
    assert len(line["entries"]) == count + 1 > 40
    assert len({entry["digest"] for entry in line["entries"]}) == 1
    assert not any("odd" in entry for entry in line["entries"])
    assert len({(tmp_path / "run" / entry["values"]).read_bytes() for entry in line["entries"]}) == 1
    norms = [entry["norm"] for entry in line["entries"]]
    assert max(norms) - min(norms) <= 1e-12 * max(norms)


def whole(tensor):
    boxes = [(tuple((0, size) for size in tensor.shape), 0)]
    return unpack([measure(tensor, boxes, tensor.shape)])[0]


def test_every_bit_and_every_place_counts():
    random.seed(3)
    tensor = torch.randn(7, 9, 5)
    digest = whole(tensor).digest
    assert whole(tensor.clone().transpose(0, 1).contiguous().transpose(0, 1)).digest == digest
    for _ in range(50):
        other = tensor.clone()
        other.view(-1).view(torch.int32)[random.randrange(tensor.numel())] ^= 1 << random.randrange(31)
        assert whole(other).digest != digest
    assert whole(tensor.flip(0)).digest != digest and whole(-torch.zeros(3)).digest != whole(torch.zeros(3)).digest
    assert whole(torch.view_as_complex(torch.randn(4, 2))).norm > 0


def test_distances_are_estimated():
    """Over many pairs within a factor of three: the square is the mean of 16 random ones."""
    torch.manual_seed(0)
    for scale in (1e-6, 1e-3, 1.0):
        for _ in range(20):
            tensor = torch.randn(40, 30, dtype=torch.float64)
            noise = torch.randn_like(tensor) * scale
            true = noise.norm() / max(tensor.norm(), (tensor + noise).norm())
            assert 1 / 3 < whole(tensor).distance(whole(tensor + noise)) / true < 3
    rows = torch.randn(40, 30)
    assert whole(rows).distance(whole(rows.flip(0))) > 0.3  # of the same norm
    assert whole(torch.tensor([1.0, torch.nan])).distance(whole(torch.ones(2))) != 0
    assert isinstance(whole(rows), Summary)

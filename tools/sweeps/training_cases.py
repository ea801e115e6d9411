"""Small trainings that use all of the engine between them, for any device: what CI runs on the second device, and
what can be run on a GPU.

A case is a model, a plan and what the loop does beside training. `train` runs it on this rank of a world and returns
losses, parameters and where the host waited for the device in the last step; `single` is the same loop on one CPU,
without veScale.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY, POSITIONS, BATCH, STEPS = 64, 8, 8, 4
NORM = 0.5  # gradients are clipped to
ATTENTION = SDPBackend.MATH  # on every device: kernels that fuse it round otherwise
# Ranks compare what they were given in the first three calls: the last step has what every step has.


@dataclass(frozen=True)
class Case:
    """A training.

    Arguments:
        name: of the case; unique.
        model: "llama", "gpt" (tied embeddings) or "mixtral".
        mesh: of the plan, from the library of plans; without "tp" nothing but data parallelism.
        fields: what else the plan says.
        layers: of the model.
        dropout: probability.
        optimizer: "adamw", "sgd", "adagrad", "muon".
        clip: whether gradients are clipped to a norm that they exceed.
        beside: what is done beside training: "evaluate", "deferred", "save", "async save", "load", "reshard",
            "record", "unread" (a loss whose backward nobody asks for, before another one), "streams" (of two steps the
            forward alone, and the whole, on a stream of its own).
        like_ranks: one device is no reference, the same plan on gloo is: reduced precision.
    """

    name: str
    model: str
    mesh: dict[str, int]
    fields: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    dropout: float = 0.0
    optimizer: str = "adamw"
    clip: bool = False
    beside: str = ""
    like_ranks: bool = False

    @property
    def world(self) -> int:
        return prod(self.mesh.values())

    @property
    def is_exact(self) -> bool:
        """Whether nothing is added up in another order than where its numbers are taken from: bits are to be equal.

        So it is where that is the same plan, on two ranks, or where the mesh has stages alone. On one rank experts see
        their rows in another order.
        """
        others = prod(size for axis, size in self.mesh.items() if axis != "pp")
        if self.like_ranks:
            return others <= 2
        return others == 1 and ("pipeline" in self.fields or "expert_axis" not in self.fields)

    @property
    def microbatches(self) -> int:
        pipeline = self.fields.get("pipeline")
        return pipeline["microbatches"] if pipeline else 1


BLOCKS = {"llama": "model.layers", "gpt": "transformer.h", "mixtral": "model.layers"}


def staged(model: str, ranks: int, kind: str, virtual: int = 1, microbatches: int = 4) -> dict[str, Any]:
    """The `pipeline` field of a case with a layer per stage."""
    cuts = [f"{BLOCKS[model]}.{stage}" for stage in range(1, ranks * virtual)]
    return {"cuts": cuts, "schedule": kind, "virtual": virtual, "microbatches": microbatches}


def _cases() -> Iterator[Case]:
    for zero in range(4):
        yield Case(f"llama-zero{zero}-clip", "llama", {"dp": 2}, {"zero": zero}, clip=True)
        yield Case(f"gpt-dropout-zero{zero}", "gpt", {"dp": 2}, {"zero": zero}, dropout=0.1)
    yield Case("llama-tp", "llama", {"dp": 1, "tp": 2}, {"sequence_parallel": False}, clip=True)
    yield Case("llama-tp-sp", "llama", {"dp": 1, "tp": 2}, clip=True)
    yield Case("gpt-dropout-tp-sp", "gpt", {"dp": 1, "tp": 2}, dropout=0.1)
    yield Case("llama-dp-tp-sp-zero3", "llama", {"dp": 2, "tp": 2}, {"zero": 3}, clip=True)
    yield Case("mixtral-tp-sp", "mixtral", {"dp": 1, "tp": 2})
    yield Case("llama-recompute", "llama", {"dp": 2}, {"zero": 3, "checkpointing": {"model.layers.*": True}})
    yield Case("gpt-dropout-recompute", "gpt", {"dp": 2}, {"checkpointing": {"transformer.h.*": True}}, dropout=0.1)
    yield Case("llama-regather", "llama", {"dp": 1, "tp": 2}, {"regather": {"model.layers.*": True}})
    yield Case("mixtral-experts", "mixtral", {"dp": 2}, {"expert_axis": "dp"}, clip=True)
    yield Case("mixtral-experts-zero2", "mixtral", {"dp": 2}, {"expert_axis": "dp", "zero": 2})
    yield Case("mixtral-capacity", "mixtral", {"dp": 2}, {"expert_axis": "dp", "capacity_factor": 4.0})
    for kind in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        pipeline = staged("llama", 2, kind)
        yield Case(f"llama-{kind}-clip", "llama", {"pp": 2}, {"pipeline": pipeline}, clip=True)
    for kind in ("interleaved", "looped-bfs", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipe-v"):
        pipeline = staged("llama", 2, kind, 2)
        yield Case(f"llama-{kind}-clip", "llama", {"pp": 2}, {"pipeline": pipeline}, layers=4, clip=True)
    pipeline = staged("gpt", 2, "1f1b")
    yield Case("gpt-tied-1f1b-clip", "gpt", {"pp": 2}, {"pipeline": pipeline}, clip=True)
    yield Case("gpt-dropout-1f1b", "gpt", {"pp": 2}, {"pipeline": pipeline}, dropout=0.1)
    pipeline = staged("gpt", 2, "zbv", 2)
    yield Case("gpt-tied-zbv-clip", "gpt", {"pp": 2}, {"pipeline": pipeline}, layers=4, clip=True)
    pipeline = staged("llama", 2, "1f1b")
    yield Case("llama-1f1b-dp-zero1", "llama", {"pp": 2, "dp": 2}, {"pipeline": pipeline, "zero": 1}, clip=True)
    yield Case("llama-1f1b-tp-sp", "llama", {"pp": 2, "dp": 1, "tp": 2}, {"pipeline": pipeline}, clip=True)
    yield Case("llama-offload", "llama", {"dp": 2}, {"zero": 1, "offload": True}, clip=True)
    host = {"offload_activations": {"model.layers.*": True}}
    host["zero"] = 3
    yield Case("llama-offload-activations", "llama", {"dp": 2}, host, layers=3, clip=True, beside="unread")
    host = {f"{field}": {"transformer.h.*": True} for field in ("offload_activations", "checkpointing")}
    yield Case("gpt-dropout-offload-recompute", "gpt", {"dp": 2}, host, layers=3, dropout=0.1)
    yield Case("llama-streams", "llama", {"dp": 2}, {"zero": 1}, clip=True, beside="streams")
    yield Case("llama-streams-zero3", "llama", {"dp": 2}, {"zero": 3}, beside="streams")
    yield Case("mixtral-experts-streams", "mixtral", {"dp": 2}, {"expert_axis": "dp", "zero": 2}, beside="streams")
    yield Case("llama-bf16", "llama", {"dp": 2}, {"zero": 2, "precision": {"compute": "bfloat16"}}, like_ranks=True)
    int8 = {"compute": "float32", "reduce": "float32", "sent": "int8"}
    yield Case("llama-int8", "llama", {"dp": 2}, {"zero": 2, "precision": int8}, like_ranks=True)
    yield Case("llama-adagrad", "llama", {"dp": 2}, {"zero": 1}, optimizer="adagrad")
    yield Case("llama-muon", "llama", {"dp": 2}, {"zero": 1}, optimizer="muon", like_ranks=True)
    yield Case("llama-sgd-tp", "llama", {"dp": 1, "tp": 2}, optimizer="sgd")
    yield Case("llama-evaluate", "llama", {"dp": 2}, {"zero": 3}, beside="evaluate")
    yield Case("llama-deferred", "llama", {"dp": 2}, {"zero": 3}, beside="deferred")
    yield Case("gpt-save", "gpt", {"dp": 2}, {"zero": 2}, beside="save")
    yield Case("llama-async-save", "llama", {"dp": 2}, {"zero": 1}, beside="async save")
    yield Case("llama-load", "llama", {"dp": 2}, {"zero": 3}, beside="load")
    yield Case("llama-reshard", "llama", {"dp": 2}, {"zero": 2}, beside="reshard")
    yield Case("llama-record", "llama", {"dp": 1, "tp": 2}, beside="record")


CASES = {case.name: case for case in _cases()}


def build(case: Case) -> nn.Module:
    """The model, with the weights of seed 0, on the CPU."""
    torch.manual_seed(0)
    if case.model == "gpt":
        from nanogpt.model import GPT, GPTConfig

        sizes = {"n_layer": case.layers, "n_head": 4, "n_embd": 32, "dropout": case.dropout, "bias": False}
        return GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, **sizes))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": case.layers}
    if case.model == "llama":
        from llama.model import build as llama

        return llama(attention_dropout=case.dropout, **sizes)
    from mixtral.model import build as mixtral

    return mixtral(attention_dropout=case.dropout, **sizes)


def plan_of(case: Case) -> Any:
    import vescale
    from vescale_plans import library

    fields = dict(case.fields)
    sequence_parallel = fields.pop("sequence_parallel", True)
    if pipeline := fields.get("pipeline"):
        cuts = tuple(pipeline["cuts"])
        fields["pipeline"] = vescale.Pipeline(axis="pp", **{**pipeline, "cuts": cuts})
    if precision := fields.get("precision"):
        fields["precision"] = vescale.Precision(**{name: getattr(torch, dtype) for name, dtype in precision.items()})
    plan = getattr(library, case.model)(mesh=case.mesh, sequence_parallel=sequence_parallel)
    if fields.get("expert_axis"):
        plan = plan.override(parameters={"*.experts.*": {fields["expert_axis"]: vescale.Shard(0)}})
    return plan.override(**fields) if fields else plan


def optimizer_of(case: Case) -> Callable[[Any], torch.optim.Optimizer]:
    return {
        "adamw": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
        "muon": _muon,
    }[case.optimizer]


def _muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=0.02)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (BATCH, POSITIONS), generator=generator) for _ in range(STEPS)]


def loss_of(case: Case, model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, tokens) if case.model == "gpt" else model(input_ids=tokens, labels=tokens).loss


@dataclass(frozen=True)
class Outcome:
    """What one rank has to show: losses, the parameters that it holds (whole), and the host's waits of a step."""

    losses: list[float]
    parameters: dict[str, Tensor]
    waits: dict[str, int]


def train(case: Case, device: str) -> Outcome:
    """Runs the case on this rank of a world, which was joined."""
    import vescale

    plan, make = plan_of(case), optimizer_of(case)
    with vescale.deferred_init() if case.beside == "deferred" else contextlib.nullcontext():
        model = build(case)
    if case.beside != "deferred":
        model = model.to(device)
    model, optimizer = vescale.parallelize(plan, model, make)
    torch.manual_seed(1)
    losses, waits = [], {}
    for step, tokens in enumerate(batches()):
        tokens = tokens.to(device)
        with _beside(case, step, plan, model, optimizer) as state:
            model, optimizer = state["model"], state["optimizer"]
            with _waits(device) as found, sdpa_kernel(ATTENTION):
                losses.append(_step(case, model, optimizer, tokens, state.get("forward on")))
        waits = found
    whole = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    return Outcome([float(loss) for loss in losses], whole, dict(waits))


def _step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, side: torch.Stream | None
) -> Tensor:
    with side or contextlib.nullcontext():
        loss = loss_of(case, model, tokens)
    if side is not None:
        torch.accelerator.current_stream().wait_stream(side)
    loss.backward()
    if case.clip:
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).cpu()


@contextlib.contextmanager
def _waits(device: str) -> Iterator[dict[str, int]]:
    """Where the host waits within the block; known on the second device."""
    if device != "second":
        yield {}
        return
    from vescale_testkit.second import host_waits

    with host_waits() as found:
        yield found.sites


@contextlib.contextmanager
def _beside(case: Case, step: int, plan: Any, model: nn.Module, optimizer: Any) -> Iterator[dict[str, Any]]:
    """What a case does around a step, which trains the model and optimizer of the state that it gives."""
    import vescale

    state = {"plan": plan, "model": model, "optimizer": optimizer, "step": step}
    if case.beside == "evaluate":
        model.eval()
        with torch.no_grad():
            loss_of(case, model, batches()[0].to(next(model.parameters()).device))
        model.train()
    elif case.beside == "record":
        with _folder() as folder, vescale.record(model, folder / "record", optimizer=optimizer):
            yield state
        return
    elif case.beside == "unread" and step == 1:
        unread, loss = (loss_of(case, model, batches()[0].to(next(model.parameters()).device)) for _ in range(2))
        loss.backward()
        del unread  # of which backward had something brought back
        optimizer.zero_grad()
    elif case.beside == "streams" and step % 2 and dist.get_backend() != "gloo":
        own = torch.accelerator.current_stream()
        side = torch.Stream(device=own.device)
        side.wait_stream(own)
        if step == 1 and "expert_axis" not in case.fields:  # of experts, gradients are autograd's own: of that stream
            yield state | {"forward on": side}
            return
        with side:
            yield state
        own.wait_stream(side)
        return
    elif case.beside in ("save", "async save") and step == 1:
        with _folder() as folder:
            saving = vescale.save(folder / "saved", state, asynchronous=case.beside == "async save")
            yield state
            saving.wait()
        return
    elif case.beside == "load" and step == 2:
        with _folder() as folder:
            vescale.save(folder / "saved", state)
            fresh = _start_again(case, plan, model)
            vescale.load(folder / "saved", fresh)
            yield fresh
        return
    elif case.beside == "reshard" and step == 2:
        fresh = _start_again(case, plan.override(zero=3), model)
        vescale.reshard({"model": model, "optimizer": optimizer}, fresh)
        yield fresh
        return
    yield state


def _start_again(case: Case, plan: Any, like: nn.Module) -> dict[str, Any]:
    """A model of other weights under a plan, with its optimizer."""
    import vescale

    model = build(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model = model.to(next(like.parameters()).device)
    model, optimizer = vescale.parallelize(plan, model, optimizer_of(case))
    return {"model": model, "optimizer": optimizer} | ({"plan": plan, "step": 0} if case.beside == "load" else {})


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder that all ranks of this machine see; gone afterwards."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, src=0)
    try:
        yield Path(made[0])
    finally:
        store = dist.distributed_c10d._get_default_store()
        if store.add(f"left {made[0]}", 1) == dist.get_world_size():
            import shutil

            shutil.rmtree(made[0], ignore_errors=True)


def single(case: Case, device: str = "cpu") -> Outcome:
    """The case on one device, without veScale; with a pipeline's microbatches, accumulated.

    Under a pipeline the gradients of a tied weight's uses are accumulated each by itself, and then added: so stages do
    it, which hold a use each. One device adds up the uses of one microbatch after the other's, another sum of the same
    numbers.
    """
    model = build(case).to(device)
    optimizer = optimizer_of(case)(model.parameters())
    tied = model.transformer.wte.weight if case.model == "gpt" and case.microbatches > 1 else None
    if tied is not None:
        model.lm_head.weight = nn.Parameter(tied.data)  # the same memory
    torch.manual_seed(1)
    losses = []
    for tokens in batches():
        total = torch.zeros((), device=device)
        for rows in tokens.to(device).chunk(case.microbatches):
            with sdpa_kernel(ATTENTION):
                loss = loss_of(case, model, rows) / case.microbatches
                loss.backward()
            total += loss.detach()
        if tied is not None:
            tied.grad += model.lm_head.weight.grad
            model.lm_head.weight.grad = None
        if case.clip:
            _clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    if tied is not None:
        model.lm_head.weight = tied
    whole = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return Outcome([float(loss) for loss in losses], whole, {})


def _clip(model: nn.Module) -> None:
    """torch's clipping, but that each gradient's squares are summed in float64, as veScale does for any mesh.

    torch sums them in float32, in an order that its kernels choose by the machine's vectors: such a norm is some last
    bits off, and with it every gradient that it scales.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [gradient.double().square().sum().sqrt().to(gradient.dtype) for gradient in gradients]
    nn.utils.clip_grads_with_norm_(model.parameters(), NORM, torch.linalg.vector_norm(torch.stack(norms)))

"""Training steps for `peers.py`: one Llama under torch's own parallelism and under plans of ours, on two ranks.

A contender is made on every rank, and is a function of the batch that trains for one step and returns the loss of the
whole batch. All contenders of a case train the same model on the same batches: their first losses must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[Tensor], float]
RANKS, MICROBATCHES = 2, 4
NOTHING_SENT = "nothing sent"


@dataclass(frozen=True)
class Sizes:
    """Of a Llama and of its batch."""

    hidden: int
    layers: int
    positions: int
    words: int = 4096
    rows: int = 4

    def build(self) -> nn.Module:
        from llama.model import build

        torch.manual_seed(0)
        return build(
            vocab_size=self.words, hidden_size=self.hidden, intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=8, num_key_value_heads=4,
            max_position_embeddings=self.positions,
        )  # fmt: skip

    def batch(self, number: int) -> Tensor:
        return torch.randint(self.words, (self.rows, self.positions), generator=torch.Generator().manual_seed(number))


REAL = {512: Sizes(512, 6, 256), 1024: Sizes(1024, 2, 256)}
SHORT = {64: Sizes(64, 4, 16, 128)}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def mean_over_ranks(loss: Tensor) -> float:
    told = loss.detach().clone()
    dist.all_reduce(told)
    return told.item() / dist.get_world_size()


def of_plan(sizes: Sizes, **plan) -> Step:
    """Ours: the plan's keywords, else the whole model as it stands."""
    from vescale_plans import Plan, library

    if (mesh := plan["mesh"]).keys() == {"tp"}:
        return trained_whole(sizes, library.llama(mesh=mesh))
    return trained_whole(sizes, Plan(parameters={"*": {}}, **plan))


def trained_whole(sizes: Sizes, plan) -> Step:
    import vescale

    return whole_step(*vescale.parallelize(plan, sizes.build(), adamw))


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """As on one device."""

    def step(tokens: Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


# --- data parallelism --------------------------------------------------------------


def trained_in_parts(model: nn.Module, one_of: int = 1) -> Step:
    """Each rank reads its rows, and steps on one of so many parameters."""
    optimizer = adamw(list(model.parameters())[::one_of])

    def step(tokens: Tensor) -> float:
        own = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return mean_over_ranks(loss)

    return step


def ddp(sizes: Sizes) -> Step:
    return trained_in_parts(nn.parallel.DistributedDataParallel(sizes.build(), gradient_as_bucket_view=True))


def fsdp2(sizes: Sizes) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = sizes.build(), init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained_in_parts(model)


def by_hand(sizes: Sizes) -> Step:
    """Data parallelism for this model alone: each gradient is summed in place as it comes, without a bucket."""
    model, running = sizes.build(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: running.append(dist.all_reduce(p.grad, async_op=True)))
    optimizer = adamw(model.parameters())

    def step(tokens: Tensor) -> float:
        own = tokens.chunk(RANKS)[dist.get_rank()]
        loss = model(input_ids=own, labels=own).loss
        (loss / RANKS).backward()
        for work in running:
            work.wait()
        running.clear()
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss)

    return step


def one_ranks_part(sizes: Sizes) -> Step:
    """The heads, hidden units and words that a rank of tensor parallelism has, as a model of its own. Norms it computes
    of all tokens: of half of them would be 1% less."""
    from llama.model import build

    torch.manual_seed(0)
    words = sizes.words // RANKS
    model = build(
        vocab_size=words, hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden // RANKS,
        num_hidden_layers=sizes.layers, num_attention_heads=8 // RANKS, num_key_value_heads=4 // RANKS,
        head_dim=sizes.hidden // 8, max_position_embeddings=sizes.positions,
    )  # fmt: skip
    step = whole_step(model, adamw(model.parameters()))
    return lambda tokens: step(tokens % words)


def floors(case: str, sizes: Sizes) -> dict[str, Callable[[], Step]]:
    """What no step of the case can be faster than: each rank trains on its rows, or its part of the model, steps on
    what it would hold of the parameters, and sends nothing."""
    if case == "tensor":
        return {NOTHING_SENT: lambda: one_ranks_part(sizes)}
    if case == "replicated":
        return {"by hand": lambda: by_hand(sizes), NOTHING_SENT: lambda: trained_in_parts(sizes.build())}
    if case == "sharded":
        return {NOTHING_SENT: lambda: trained_in_parts(sizes.build(), RANKS)}
    return {}


# --- tensor parallelism ------------------------------------------------------------


def torch_tp(sizes: Sizes) -> Step:
    """TorchTitan's plan for Llama: sequence parallel, logits cut by words, the loss computed on them as they lie."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model, mesh, tokens_cut = sizes.build(), init_device_mesh("cpu", (RANKS,)), Shard(1)
    cut, gathered = {"hidden_states": tokens_cut}, {"hidden_states": Replicate()}
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens_cut),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens_cut, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(sizes.layers):
        at = f"model.layers.{i}"
        plan |= {
            f"{at}.input_layernorm": SequenceParallel(),
            f"{at}.self_attn": PrepareModuleInput(input_kwarg_layouts=cut, desired_input_kwarg_layouts=gathered),
            **{f"{at}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            f"{at}.self_attn.o_proj": RowwiseParallel(output_layouts=tokens_cut),
            f"{at}.post_attention_layernorm": SequenceParallel(),
            f"{at}.mlp": PrepareModuleInput(input_layouts=(tokens_cut,), desired_input_layouts=(Replicate(),)),
            f"{at}.mlp.gate_proj": ColwiseParallel(),
            f"{at}.mlp.up_proj": ColwiseParallel(),
            f"{at}.mlp.down_proj": RowwiseParallel(output_layouts=tokens_cut),
        }
    parallelize_module(model, mesh, plan)
    optimizer, positions = adamw(model.parameters()), torch.arange(sizes.positions).unsqueeze(0)

    def step(tokens: Tensor) -> float:
        # Inside, the sequence is cut: positions and the labels' shift are said here, on the whole.
        logits = model(input_ids=tokens, position_ids=positions).logits
        labels = F.pad(tokens, (0, 1), value=-100)[:, 1:].flatten()
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item()

    return step


# --- pipelines ---------------------------------------------------------------------


def cuts_of(sizes: Sizes, stages: int) -> list[int]:
    """The layers that begin stages."""
    return [sizes.layers * stage // stages for stage in range(stages + 1)]


class Part(nn.Module):
    """A stage for torch: layers, with the embedding before the first of all, norm and head after the last."""

    def __init__(self, sizes: Sizes, first: int, last: int) -> None:
        super().__init__()
        model = sizes.build()
        self.embed = model.model.embed_tokens if first == 0 else None
        self.layers, self.rotary = model.model.layers[first:last], model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if last == sizes.layers else (None, None)
        self.register_buffer("positions", torch.arange(sizes.positions).unsqueeze(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        table = self.rotary(x, self.positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=self.positions, position_embeddings=table)
        return x if self.head is None else self.head(self.norm(x))


def next_word_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


SCHEDULES = {"1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2)}


def torch_pipeline(sizes: Sizes, kind: str) -> Step:
    from torch.distributed import pipelining

    name, virtual = SCHEDULES[kind]
    cuts, rank, stages = cuts_of(sizes, RANKS * virtual), dist.get_rank(), RANKS * virtual
    own = range(rank, stages, RANKS)
    parts = {stage: Part(sizes, cuts[stage], cuts[stage + 1]) for stage in own}
    made = [pipelining.PipelineStage(part, stage, stages, torch.device("cpu")) for stage, part in parts.items()]
    schedule = getattr(pipelining, name)(made if virtual > 1 else made[0], MICROBATCHES, loss_fn=next_word_loss)
    optimizer = adamw([p for part in parts.values() for p in part.parameters()])

    def step(tokens: Tensor) -> float:
        losses: list[Tensor] = []
        given = (tokens,) if 0 in parts else ()
        schedule.step(*given, **({"target": tokens, "losses": losses} if stages - 1 in parts else {}))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, RANKS - 1)
        return loss.item()

    return step


def our_pipeline(sizes: Sizes, kind: str) -> Step:
    from vescale import Pipeline, Plan

    virtual = SCHEDULES[kind][1]
    cuts = tuple(f"model.layers.{at}" for at in cuts_of(sizes, RANKS * virtual)[1:-1])
    pipeline = Pipeline(axis="pp", cuts=cuts, schedule=kind, microbatches=MICROBATCHES, virtual=virtual)
    return trained_whole(sizes, Plan(mesh={"pp": RANKS}, parameters={"*": {}}, pipeline=pipeline))


# --- the cases ---------------------------------------------------------------------


def sizes_of(case: str, sizes: Sizes) -> Sizes:
    """With the layers and the batch that the case takes: a stage has a layer at least; a microbatch has two rows, for
    of one alone transformers' masks ask whether it packs several texts, of more they do not, and what a pipeline's
    loss weighs is told by both forwards being alike."""
    if case not in SCHEDULES:
        return sizes
    return replace(sizes, rows=2 * MICROBATCHES, layers=max(sizes.layers, RANKS * SCHEDULES[case][1]))


def contenders(case: str, sizes: Sizes) -> tuple[str, dict[str, Callable[[], Step]]]:
    """The peer's name, and how each contender is made, the peer first."""
    if case in SCHEDULES:
        return "torch", {
            "torch": lambda: torch_pipeline(sizes, case),
            "ours": lambda: our_pipeline(sizes, case),
        }
    peer, make, plan = {
        "replicated": ("DDP", ddp, {"mesh": {"dp": RANKS}, "zero": 0}),
        "sharded": ("FSDP2", fsdp2, {"mesh": {"dp": RANKS}, "zero": 3}),
        "tensor": ("torch TP", torch_tp, {"mesh": {"tp": RANKS}}),
    }[case]
    ours = {"ours": lambda: of_plan(sizes, **plan)}
    return peer, {peer: lambda: make(sizes), **ours, **floors(case, sizes)}


CASES = ("replicated", "sharded", "tensor", *SCHEDULES)

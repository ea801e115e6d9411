"""veScale's side: the single-device Llama of this folder under a plan. `python ours.py plain|eager LAYOUT`."""

from __future__ import annotations

from typing import Any

import torch
from contender import join, serve
from llama import build
from setting import BETAS, CLIP, DECAY, LEARNING_RATE, MICROBATCHES, SEED, Layout, samples

from vescale import Boundary, Pipeline, Plan, Replicate, Shard, parallelize


# --- what a user writes, counted in README.md ---
def plan_for(layout: Layout) -> Plan:
    rows, columns, whole, tokens = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Replicate()}, {"tp": Shard(1)}
    block = Boundary(input=whole, output=tokens)  # between them every rank holds a part of the sequence
    tensor = {
        "parameters": {"*.wo.*": columns, "*.w2.*": columns, "*norm*": {}, "*": rows},
        "boundaries": {
            "*.attention": block,
            "*.feed_forward": block,
            "tok_embeddings": Boundary(output=tokens),
            "lm_head": Boundary(input=whole),
        },
    }
    if layout.pp > 1:
        return Plan(mesh={"pp": layout.pp}, parameters={"*": {}}, data_axis=None,
                    pipeline=Pipeline(cuts=("layers.3",), schedule="1f1b", microbatches=MICROBATCHES))  # fmt: skip
    mesh = {"dp": layout.dp, "tp": layout.tp}
    return Plan(mesh=mesh, **(tensor if layout.tp > 1 else {"parameters": {"*": {}}}), zero=3 if layout.zero else 0)
# --- until here ---


def make(mode: str, layout: Layout) -> tuple[dict[str, Any], Any]:
    """`plain` is no parallelism at all: on a fake group a model of one rank's sizes, the least that a step can cost."""
    join(layout)
    torch.manual_seed(SEED)
    model = build(layout.sequence, layout.tp if mode == "plain" else 1)
    adamw = lambda parameters: torch.optim.AdamW(parameters, LEARNING_RATE, BETAS, weight_decay=DECAY, fused=True)
    if mode == "plain":
        optimizer = adamw(model.parameters())
    else:
        model, optimizer = parallelize(plan_for(layout), model, adamw, mode=mode)
    model.train()

    def step(number: int) -> torch.Tensor:
        inputs, targets = samples(number * layout.batch, layout.batch, layout.sequence)
        if mode == "plain" and layout.fake:
            share = layout.batch // layout.dp
            inputs, targets = inputs[:share] // layout.tp, targets[:share] // layout.tp
        loss = model(inputs, targets)
        loss.backward()
        if not layout.fake:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)  # as theirs; a CPU's default is not
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {"name": f"veScale, {mode}"}, step


if __name__ == "__main__":
    serve(make)

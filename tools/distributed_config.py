"""transformers' own parallelism beside veScale's, of one `DistributedConfig` on one model, against one device.

    python tools/distributed_config.py            # prints the page docs/distributed_config.md; takes minutes
    python tools/distributed_config.py --write    # writes it

Each row builds the configuration, reads one folder of weights with it, and takes three steps of SGD. What raises is a
row that says so.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import vescale
from vescale_testkit import run_ranks, warm_up

warm_up("torch._dynamo", "vescale", "transformers")

TOP = Path(__file__).absolute().parents[1]
PAGE = TOP / "docs/distributed_config.md"
ROWS, POSITIONS, VOCABULARY, STEPS, RATE = 4, 16, 64, 5, 2.0
NEAR = 1e-5
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)),
}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {"tp_size": 2}),
    ("Llama", {"tp_size": 2, "enable_sequence_parallel": True}),
    ("Llama", {"fsdp_size": 2}),
    ("Llama", {"fsdp_size": 2, "tp_size": 2}),
    ("Llama", {"dp_replicate_size": 2, "fsdp_size": 2}),
    ("Llama", {"dp_replicate_size": 2, "tp_size": 2}),
    ("Llama", {"pp_size": 2}),
    ("Llama", {"pp_size": 2, "tp_size": 2}),
    ("Llama", {"pp_size": 2, "fsdp_size": 2}),
    ("Llama", {"ep_size": 2, "fsdp_size": 2}),
    ("Mixtral", {"tp_size": 2}),
    ("Mixtral", {"fsdp_size": 2}),
    ("Mixtral", {"ep_size": 2, "fsdp_size": 2}),
    ("Mixtral", {"ep_size": 2, "tp_size": 2}),
    ("Mixtral", {"ep_size": 4, "fsdp_size": 2, "tp_size": 2}),
    ("Mixtral", {"ep_size": 2, "fsdp_size": 4}),
)


HEAD = """\
# transformers' DistributedConfig, here and there

Written by `python tools/distributed_config.py --write`, with {versions} on CPUs (gloo); do not edit.

`vescale.parallelize(config, model, ...)` and `vescale.from_pretrained(folder, config, ...)` take transformers'
`DistributedConfig` (and accelerate's `ParallelismConfig`) in place of a plan; `vescale.plan_from_config` returns the
plan, and says what each field becomes. Two differences are of kind:

- A training loop stays that of one device: every rank is called with the global batch, or has its rows by
  `vescale.loader`. Under transformers' FSDP each data rank has its own batch, and its own loss.
- `ep_size` is no axis of its own, but divides `fsdp_size * tp_size`. transformers gives each rank whole experts; here
  `ep_size / tp_size` data ranks share the experts, and `tp_size` ranks split each. If that is less than `fsdp_size`,
  all parameters are sharded over the ranks that share experts, and replicated over the rest.

What transformers refuses to construct has a plan all the same: FSDP with a pipeline is
`Plan(mesh={{"pp": 2, "dp": 2}}, zero=3, pipeline=...)`, or what `generate_plan` returns with
`pin={{"pp": 2, "dp": 2, "zero": 3}}`.

Each row reads one folder of random weights, and takes {steps} steps of SGD on batches of {rows} rows. The number is the
largest relative difference of a step's loss to one device's; *equal* is below {near:.0e}.

| model | `DistributedConfig(...)` | transformers | veScale |
|---|---|---|---|"""


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(step))


def trained(model: Any, optimizer: torch.optim.Optimizer, rows: slice = slice(None)) -> list[float]:
    """The losses of some steps on these rows of each batch."""
    model.train()
    losses = []
    for step in range(STEPS):
        tokens = batch(step // 2)[rows]
        loss = model(input_ids=tokens, labels=tokens).loss
        if loss is None:
            raise RuntimeError("the model returns no loss: it cannot train")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        losses.append(float(loss.full_tensor() if isinstance(loss, vescale.DTensor) else loss))
    return losses


def by_transformers(folder: str, fields: dict[str, Any]) -> list[float]:
    """Every data rank has its own rows, as transformers' FSDP expects; the loss is their mean."""
    config = DistributedConfig(**fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    data = dist.get_rank() // (config.tp_size * config.pp_size)
    each = ROWS // config.dp_size
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = torch.tensor(trained(model, optimizer, slice(each * data, each * (data + 1))))
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def by_vescale(folder: str, fields: dict[str, Any]) -> list[float]:
    """Every rank has the whole batch, as on one device."""
    config = DistributedConfig(**fields)
    return trained(*vescale.from_pretrained(folder, config, lambda parameters: torch.optim.SGD(parameters, RATE)))


def told(run: Callable[..., list[float]], ranks: int, folder: str, fields: dict[str, Any], alone: list[float]) -> str:
    """What came of a row: its losses against one device's, or what was raised."""
    try:
        DistributedConfig(**fields)
        found = run_ranks(ranks, run, folder, fields, timeout=120)[0]
    except Exception as error:  # whatever either library, or torch below it, raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith("rank")]
        said = named[-1].rpartition("vescale_plans._plan.parts.")[2] if named else f"{type(error).__name__}: {lines[0]}"
        return "raises " + " ".join(said.split())[:170].replace("|", "\\|")
    apart = max(abs(one - other) / abs(other) for one, other in zip(found, alone, strict=True))
    return f"equal ({apart:.0e})" if apart < NEAR else f"differs ({apart:.0e})"


def page() -> str:
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    lines = [HEAD.format(versions=versions, steps=STEPS, rows=ROWS, near=NEAR)]
    with tempfile.TemporaryDirectory() as scratch:
        alone = {}
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model = make()
            model.save_pretrained(f"{scratch}/{name}")
            alone[name] = trained(model, torch.optim.SGD(model.parameters(), RATE))
        for name, fields in CASES:
            ranks = 1
            for size, count in fields.items():
                ranks *= count if size.endswith("_size") and size != "ep_size" else 1
            shown = ", ".join(f"{field}={value}" for field, value in fields.items())
            given = (ranks, f"{scratch}/{name}", fields, alone[name])
            lines.append(f"| {name} | `{shown}` | {told(by_transformers, *given)} | {told(by_vescale, *given)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true")
    write = options.parse_args().write
    logging.disable(logging.WARNING)
    text = page()
    if write:
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

"""Trains HuggingFace's Llama, under any parallelism, and goes on under any other.

    python -m llama.pretrain --out runs/one
    torchrun --nproc-per-node 4 -m llama.pretrain --dp 2 --tp 2 --zero 3 --out runs/four --against runs/one
    torchrun --nproc-per-node 2 -m llama.pretrain --tp 2 --resume runs/four --steps 60
"""

import torch
from corpus import VOCABULARY, read_corpus
from curve import keep_losses, read_losses
from flags import read_flags
from llama.model import build

import vescale
from vescale_plans import library


def main(arguments: list[str] | None = None) -> list[float]:
    """The loss of every step, those before a resume included."""
    flags = read_flags(__doc__, arguments)
    torch.manual_seed(flags.seed)
    corpus = read_corpus(flags.data, seed=flags.seed, device=flags.device)
    model = build(vocab_size=VOCABULARY).to(flags.device)
    plan = library.llama(flags.mesh, sequence_parallel=flags.sequence_parallel)
    plan = plan.override(**flags.changes("model.layers", model.config.num_hidden_layers))
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=flags.rate)
    model, optimizer = vescale.parallelize(plan, model, adamw, mode=flags.mode)
    state = {"plan": plan, "model": model, "optimizer": optimizer, "step": 0}
    losses = read_losses(flags.resume)
    if flags.resume:
        vescale.load(flags.resume, state)
    with vescale.metrics(model, optimizer, writers=[vescale.JSONLines(f"{flags.out}.jsonl")]) as meter:
        for number in range(state["step"], flags.steps):
            inputs, _ = corpus.batch(number, flags.batch, flags.sequence)
            loss = model(input_ids=inputs, labels=inputs).loss  # transformers shifts the labels itself
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            state["step"] = number + 1
            meter.step(loss)
    vescale.save(flags.out, state, overwrite=True)
    keep_losses(flags, "llama", losses)
    return losses


if __name__ == "__main__":
    main()

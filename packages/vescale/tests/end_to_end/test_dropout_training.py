"""Training with dropout from random weights against one device: every step's loss, and the generator after it."""

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("torch._dynamo", "vescale")

POSITIONS, STEPS, BATCH, VOCABULARY = 24, 20, 8, 64
LOSS = 1e-5  # the standard tolerance of docs/design.md, section 11


def train(plan=None):
    """The loss and the state of the generator after each step."""
    from nanogpt.model import GPT, GPTConfig

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(vocab_size=VOCABULARY, block_size=POSITIONS, dropout=0.1, **sizes))
    if plan is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    else:
        model, optimizer = vescale.parallelize(plan, model, lambda parameters: torch.optim.AdamW(parameters, lr=5e-4))
    data = torch.Generator().manual_seed(5)
    losses, states = [], []
    for _ in range(STEPS):
        inputs, targets = torch.randint(VOCABULARY, (2, BATCH, POSITIONS), generator=data)
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        states.append(torch.get_rng_state())
    return losses, states


def compared(mesh, sequence_parallel):
    losses, states = train(library.gpt(mesh=mesh, sequence_parallel=sequence_parallel))
    wanted, wanted_states = train()
    in_step = all(torch.equal(one, other) for one, other in zip(states, wanted_states))
    return [abs(a - b) / abs(b) for a, b in zip(losses, wanted)], in_step


@in_turns(3)
@pytest.mark.parametrize(
    "mesh, sequence_parallel", [({"dp": 2, "tp": 2}, True), ({"dp": 2, "tp": 2}, False), ({"tp": 4}, True)]
)
def test_every_loss_is_that_of_one_device(mesh, sequence_parallel):
    for errors, in_step in run_ranks(4, compared, mesh, sequence_parallel, timeout=300):
        assert len(errors) == STEPS and max(errors) <= LOSS, errors
        assert in_step

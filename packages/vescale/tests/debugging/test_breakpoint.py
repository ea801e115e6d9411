"""The debugger on models as users have them: one device's answers on every rank, and training that is not disturbed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vescale
from vescale_testkit import in_turns, run_ranks, slice_of

EXPRESSIONS = """
x.shape; hidden.shape; hidden.size(-1); hidden.ndim; hidden.dtype; hidden.device.type; len(hidden); hidden.numel()
hidden.stride(); hidden.is_contiguous(); hidden.requires_grad; hidden.is_leaf; hidden[0, 0].item()
hidden[1, -1].item(); hidden[0, 3:9].tolist(); hidden[:, 2].sum().item(); hidden[..., 5].tolist()
hidden[hidden > 0].numel(); hidden[0].argmax().item(); hidden[0, [1, 9]].tolist(); hidden.sum().item()
hidden.mean().item(); hidden.max().item(); hidden.min().item(); hidden.abs().sum().item(); hidden.sum(0).tolist()
hidden.sum(dim=1).tolist(); hidden.amax(1).tolist(); hidden.square().sum().item()
(hidden @ hidden.T).diagonal().tolist(); torch.isnan(hidden).any().item(); bool((hidden > 0).any())
float(hidden.sum()); int(hidden.max()); hidden.full_tensor().shape; hidden.full_tensor().sum().item()
hidden.tolist()[0][:3]; hidden.detach().cpu().numpy().sum(); f'{hidden.sum():.3f}'
hidden.sum().full_tensor().item(); self.up.weight.shape; self.up.weight.sum().item(); self.up.weight[0].tolist()
self.up.weight.grad is None; self.down.weight.mean().item(); self.up.bias.tolist()[:4]
[n for n, _ in self.named_parameters()]; sum(p.numel() for p in self.parameters())
self.up.weight.full_tensor().norm().item() > 0; self.up.weight.T[0, :2].tolist(); self.training
self.down(torch.relu(hidden)).sum().item(); torch.relu(hidden).sum().item(); self.scaled(hidden).sum().item()
torch.cat([hidden, hidden]).shape; torch.stack([hidden, hidden]).sum().item()
hidden.view(2, 2, 4, 4).sum(-1)[0, 0].tolist(); torch.nn.functional.softmax(hidden.sum(0) * 0, -1).sum().item()
hidden.sort(dim=1).values[0, :2].tolist(); torch.equal(hidden, hidden.clone()); type(x).__name__ != ''; 1 / 0
hidden.no_such_name; undefined_name; hidden.view(7); hidden @ torch.ones(3, 3)
torch.autograd.grad(hidden.sum(), self.up.bias, retain_graph=True)[0].sum().item()
hidden.sum().backward(retain_graph=True); self.up.bias.grad.sum().item(); self.up.bias.grad = self.up.weight.grad = None
kept = hidden.sum().item() * 2; kept; import math; math.floor(kept); print(kept, hidden.shape)
"""
LINES = [one.strip() for line in EXPRESSIONS.strip().splitlines() for one in line.split(";")]


class Net(nn.Module):
    """Weights are multiples of 1/8, so that every sum is exact, in whatever order it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randint(-8, 8, one.shape) / 8)

    def scaled(self, value):
        return value * 2

    def forward(self, x, stop=False):
        hidden = self.up(x)
        if stop:
            vescale.breakpoint()
        return self.down(torch.relu(hidden))


def train(plan, stops: bool, lines=()) -> tuple[str, list[str]]:
    """What the terminal showed, and four losses."""
    torch.manual_seed(0)
    model, optimizer = vescale.parallelize(plan, Net(), torch.optim.AdamW)
    losses = []
    before = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO("".join(f"{line}\n" for line in [*lines, "c"])), io.StringIO()
    try:
        for step in range(4):
            loss = model(torch.randint(-8, 8, (4, 8)) / 8, stop=stops and step == 0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return sys.stdout.getvalue(), losses
    finally:
        sys.stdin, sys.stdout = before


def plan_of(**mesh: int) -> vescale.Plan:
    cut = {"up.*": {"tp": vescale.Shard(0)}, "down.weight": {"tp": vescale.Shard(1)}, "*": {}}
    return vescale.Plan(mesh=mesh, parameters=cut if "tp" in mesh else {"*": {}}, zero=3 if "dp" in mesh else 0)


def answered(text: str) -> list[str]:
    """What followed each prompt, without what only the place in memory, the class or the tensor's shard would tell."""
    parts = re.split(r"\(rank 0(?: of \d)?\) ", text)[1:]
    return [re.sub(r"0x[0-9a-f]+", "0x", part).strip() for part in parts]


@in_turns(3)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp2", "dp2-tp2"])
def test_every_expression_has_one_devices_answer_on_every_rank(mesh) -> None:
    assert len(LINES) >= 60
    size = mesh.get("dp", 1) * mesh["tp"]
    one = run_ranks(1, train, plan_of(tp=1), True, LINES)[0]
    many = run_ranks(size, train, plan_of(**mesh), True, LINES)
    undisturbed = run_ranks(size, train, plan_of(**mesh), False)
    assert [losses for _, losses in many] == [losses for _, losses in undisturbed]
    assert [text for text, _ in many[1:]] == [""] * (size - 1)
    expected, found = answered(one[0]), answered(many[0][0])
    assert len(expected) == len(found) == len(LINES) + 1
    wrong = []
    for line, wanted, got in zip(LINES, expected, found):
        same = wanted.split(":")[0] == got.split(":")[0] if "Error" in wanted else wanted == got
        if not same:
            wrong.append((line, wanted, got))
    assert not wrong
    assert not any(re.search(r"^ranks? [\d, ]+: ", text, re.M) for text in found)  # no rank answered otherwise


SCRIPT = """
import os, sys, torch, vescale
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, max_position_embeddings=32, use_cache=False)
torch.manual_seed(0)
world, step = int(os.environ["WORLD_SIZE"]), 0
plan = vescale.generate_plan(LlamaForCausalLM(config), world_size=world, batch=8, seq=16, hardware="cpu",
                             pin={"tp": 2, "dp": world // 2, "pp": 1})
inner = modeling_llama.LlamaMLP.forward

def forward(self, x):
    if step == 1 and self is first:
        vescale.breakpoint()
    return inner(self, x)

modeling_llama.LlamaMLP.forward = forward
model, optimizer = vescale.parallelize(plan, LlamaForCausalLM(config), torch.optim.AdamW)
first = model.model.layers[0].mlp if len(sys.argv) > 1 else None
for step in range(4):
    ids = torch.randint(0, 64, (8, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item().hex()
    if os.environ["RANK"] == "0":
        print("loss", value, flush=True)
"""


@pytest.mark.core
@pytest.mark.parametrize("ranks", slice_of([2, 4], 2))
def test_a_session_in_a_terminal_under_torchrun(ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    typed = ["p x.shape", "p x.float().mean().item() is not None", "n", "p self.down_proj.weight.full_tensor().shape"]
    typed += ["u", "d", "p x.sum().item() == x.full_tensor().sum().item() or 'close'", "c"]
    undisturbed = run_ranks(ranks, losses_of, SCRIPT)[0]
    losses, text = run_in_terminal(script, ranks, typed)
    assert len(losses) == 4 and losses == undisturbed
    assert "-> vescale.breakpoint()" in text and "torch.Size([8, 16, 32])" in text
    assert "-> return inner(self, x)" in text and "torch.Size([32, 64])" in text and "rank 1" not in text


def losses_of(script: str) -> list[str]:
    """The losses of a rank of the pool that nothing stops."""
    from transformers.models.llama import modeling_llama

    own, arguments = modeling_llama.LlamaMLP.forward, sys.argv
    sys.argv = ["train.py"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
    finally:
        modeling_llama.LlamaMLP.forward, sys.argv = own, arguments
    return re.findall(r"^loss (\S+)$", said.getvalue(), re.M)


def run_in_terminal(script: Path, ranks: int, lines: list[str]) -> tuple[list[str], str]:
    """Types each line when the prompt is there, at a pseudo-terminal; returns losses, and all that was shown."""
    import pty
    import select

    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    said = script.with_suffix(".errors")
    with said.open("w") as errors:
        process = subprocess.Popen([*command, "stop"], stdin=slave, stdout=slave, stderr=errors, env=environment)
    os.close(slave)
    text, typed = "", 0
    try:
        while True:
            ready, _, _ = select.select([master], [], [], 240)
            assert ready, f"nothing was shown for long; so far:\n{text}"
            try:
                data = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            text += data.decode().replace("\r", "")
            while typed < len(lines) and text.count(f"(rank 0 of {ranks}) ") > typed:
                os.write(master, f"{lines[typed]}\n".encode())
                typed += 1
        assert process.wait(60) == 0, f"{text}\n{said.read_text()}"
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return re.findall(r"^loss (\S+)$", text, re.M), text


class Talkative(nn.Module):
    """A model whose author debugs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        print("shape", x.shape)
        breakpoint()
        vescale.breakpoint()
        return self.down(torch.relu(self.up(x)))


def test_planning_and_dry_runs_stop_nowhere(capsys) -> None:
    plan = vescale.generate_plan(
        Talkative(), world_size=2, batch=8, seq=1, hardware="cpu", sample=torch.randn(1, 8), pin={"dp": 2}
    )
    out, err = capsys.readouterr()
    assert out == "" and "vescale: generate_plan ran the model on samples and did not stop at " in err
    assert "and kept back" in err
    vescale.dry_run(plan, Talkative(), torch.randn(8, 8), step=lambda model, batch: model(batch).square().mean())
    out, err = capsys.readouterr()
    assert out == "" and "vescale: the dry run ran the model on tensors without values and did not stop at " in err

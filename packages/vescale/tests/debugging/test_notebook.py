"""Simulated cells: in a notebook that Jupyter runs, with a person who types, and without IPython."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale import CommunicationError, MeshError, notebook
from vescale_testkit import in_turns, slice_of

NOTEBOOK = Path(__file__).absolute().parents[4] / "examples/notebook/four_ranks.ipynb"
SECONDS = 240


class Shell:
    """What of IPython's shell simulated cells use."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"torch": torch, "dist": dist}
        self.compile = types.SimpleNamespace(cache=lambda text, raw_code: "a cell")
        self.magics: dict[str, Any] = {}

    def transform_cell(self, cell: str) -> str:
        return cell

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        self.magics[magic_name] = function


@pytest.fixture
def shell() -> Shell:
    found = Shell()
    notebook.load_ipython_extension(found)
    return found


def test_a_world_lives_from_cell_to_cell(shell: Shell, capsys: pytest.CaptureFixture) -> None:
    run, names = shell.magics["simulate"], shell.user_ns
    names["kept"] = [1]
    assert run("3", "own = dist.get_rank() * 10\nkept.append(own)\ndef add(one): return one + own") is None
    assert names["own"] == 0 and names["kept"] == [1] and capsys.readouterr().out == ""
    assert run("3", "total = torch.tensor(add(1.0))\ndist.all_reduce(total)\nprint('total', total)\nkept") == [1, 0]
    assert capsys.readouterr().out == "total tensor(33.)\nrank 1: [1, 10]\nrank 2: [1, 20]\n"
    assert [rank.own for rank in names["ranks"]] == [0, 10, 20]
    names["own"] = 7
    assert run("3", "print(dist.get_rank())\nown") == 7
    assert capsys.readouterr().out == "0\nrank 1: 1\nrank 2: 2\n"
    assert run("3", "del total") is None and "total" not in names and not dist.is_initialized()
    assert run("2", "'add' in globals(), own, dist.get_world_size()") == (False, 7, 2)  # another world
    assert "add" not in names


def test_a_cell_that_all_ranks_break_alike_leaves_the_world(shell: Shell, capsys: pytest.CaptureFixture) -> None:
    run = shell.magics["simulate"]
    run("3", "own = torch.full((2,), 1.0 + dist.get_rank())")
    with pytest.raises(NameError, match="tpyo"):
        run("3", "later = own * 2\ndist.all_reduce(own)\ntpyo")
    assert run("3", "dist.all_reduce(later)\nown.tolist(), later.tolist()") == ([6.0, 6.0], [12.0, 12.0])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("if dist.get_rank() == 1: raise ValueError('one')", "rank 1 raised ValueError: one"),
        ("raise ValueError(dist.get_rank())", "rank 0 raised ValueError: 0"),
        ("if dist.get_rank(): dist.send(own, 0)\nraise ValueError('sent')", "rank 0 raised ValueError: sent"),
        ("if dist.get_rank(): dist.barrier()", "rank 2 raised CommunicationError: simulate: every rank is waiting"),
    ],
)
def test_a_world_whose_ranks_have_parted_is_gone(
    shell: Shell, capsys: pytest.CaptureFixture, cell: str, why: str
) -> None:
    run = shell.magics["simulate"]
    run("3", "own = torch.ones(2)")
    with pytest.raises((ValueError, MeshError, CommunicationError)):
        run("3", cell)
    assert run("3", "'own' in globals()") is False
    assert why in capsys.readouterr().out
    assert run("3", "one = torch.ones(1)\ndist.all_reduce(one)\none.item()") == 3.0 and not capsys.readouterr().out


def test_a_cell_that_raises_ends_its_world(shell: Shell, capsys: pytest.CaptureFixture) -> None:
    run = shell.magics["simulate"]
    run("2", "x = 1")
    with pytest.raises(ValueError, match="broken") as error:
        run("2", "if dist.get_rank(): raise ValueError('broken')\ndist.barrier()")
    assert error.value.__notes__ == ["(raised on rank 1 of 2, simulated)"]
    with pytest.raises(NameError, match="x"):
        run("2", "x")
    assert "are gone, with what these set: rank 1 raised ValueError: broken" in capsys.readouterr().out
    with pytest.raises(MeshError, match="'many' is not a number of ranks"):
        run("many", "x")


@in_turns(3)
def test_the_notebook_of_the_examples_has_the_outputs_that_it_shows() -> None:
    """To write them anew: jupyter execute --inplace examples/notebook/four_ranks.ipynb"""
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    written = nbformat.read(NOTEBOOK, as_version=4)
    executed = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(executed, timeout=SECONDS, kernel_name="python3").execute()
    assert [outputs(cell) for cell in executed.cells] == [outputs(cell) for cell in written.cells]
    assert sum("image/svg+xml" in str(outputs(cell)) for cell in written.cells) == 2


def outputs(cell: Any) -> list[tuple[str, list]]:
    """What a cell shows, without the names of files that Jupyter makes. What is printed comes in pieces, by the time
    that it takes: they are one."""
    shown: list[tuple[str, dict]] = []
    for one in cell.get("outputs", ()):
        data = dict(one.get("data") or {"text": one.text})
        if one.output_type == "stream" and shown and shown[-1][0] == f"stream {one.name}":
            shown[-1][1]["text"] += data["text"]
        else:
            kind = f"stream {one.name}" if one.output_type == "stream" else one.output_type
            shown.append((kind, data))
    return [(kind, [(key, re.sub(r"/\S+/\d+\.py", "FILE", data[key])) for key in sorted(data)]) for kind, data in shown]


SETUP = """
%load_ext vescale.notebook
import torch, vescale
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, max_position_embeddings=32, use_cache=False)
plan = vescale.generate_plan(LlamaForCausalLM(config), world_size=RANKS, batch=8, seq=16, hardware="cpu",
                             pin={"tp": 2, "dp": RANKS // 2, "pp": 1})
inner = modeling_llama.LlamaMLP.forward

def forward(self, x):
    if getattr(self, "stops", False):
        vescale.breakpoint()
    return inner(self, x)

modeling_llama.LlamaMLP.forward = forward
"""
TRAIN = """
%%simulate RANKS
torch.manual_seed(0)
model, optimizer = vescale.parallelize(plan, LlamaForCausalLM(config), torch.optim.AdamW)
losses = []
for step in range(4):
    model.model.layers[0].mlp.stops = STOPS and step == 1
    ids = torch.randint(0, 64, (8, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
losses
"""
TYPED = [
    *("p x.shape", "p x.sum().item() == x.full_tensor().sum().item() or 'close'", "n"),
    *("p self.down_proj.weight.full_tensor().shape", "p x.mean().item() is not None", "c"),
]


@pytest.mark.parametrize("ranks", slice_of([2, 4], 2))
def test_a_session_in_a_notebook(ranks: int) -> None:
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        tell(client, SETUP.replace("RANKS", str(ranks)), [])
        cell = TRAIN.replace("RANKS", str(ranks))
        undisturbed = tell(client, cell.replace("STOPS", "False"), [])
        stopped = tell(client, cell.replace("STOPS", "True"), TYPED)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    losses = re.search(r"\['.*'\]", undisturbed, re.DOTALL)
    assert losses and losses.group().count("0x1.") == 4 and losses.group() in stopped
    assert re.search(r"-> (\d+ +)?vescale\.breakpoint\(\)", stopped) and "torch.Size([8, 16, 32])" in stopped
    assert re.search(r"-> (\d+ +)?return inner\(self, x\)", stopped) and "torch.Size([32, 64])" in stopped
    assert "rank 1" not in stopped and stopped.count(f"(rank 0 of {ranks}) ") == len(TYPED)


def tell(client: Any, code: str, lines: list[str]) -> str:
    """Executes a cell, types each line when the notebook asks; what was shown, with the questions."""
    shown, waiting = [], list(lines)

    def answer(message: dict) -> None:
        shown.append(message["content"]["prompt"])
        client.input(waiting.pop(0))

    def show(message: dict) -> None:
        content = message["content"]
        shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

    reply = client.execute_interactive(
        code, allow_stdin=True, stdin_hook=answer, output_hook=show, timeout=SECONDS, store_history=True
    )
    assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
    assert not waiting
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))  # IPython's colours

"""Draws the pictures of the pages: what the commands print, by running them, and two charts. docs/pictures/*.svg.

    python tools/draw_pages.py [NAME ...]      all without names: a minute

Terminals are drawn by rich, charts by matplotlib; what is in them is what veScale says when this runs.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

TOP = Path(__file__).absolute().parents[1]
FOLDER = TOP / "docs/pictures"
COLUMNS = 92
LLAMA_8B = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, '
    '"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, '
    '"max_position_embeddings": 8192, "dtype": "bfloat16"}'
)
TERMINAL = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
PROMPT = "(rank 0 of 4) "

BROKEN = """
import sys
import torch
from torch import nn
import vescale

def run(folder, factor, world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    plan = vescale.Plan(mesh={"tp": world}, parameters={"0.*": {"tp": vescale.Shard(0)}, "*": {}})
    model, optimizer = vescale.parallelize(plan, model, lambda found: torch.optim.SGD(found, lr=0.1))
    model[1].register_forward_hook(lambda module, inputs, output: output * factor)
    with vescale.record(model, folder, optimizer=optimizer):
        for _ in range(2):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

vescale.simulate(lambda: run("one", 1.0, 1), ranks=1)
vescale.simulate(lambda: run("four", 1.01, 4), ranks=4)
"""
STOPPED = """import torch
from torch import nn

import vescale


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        out = self.down(hidden)
        vescale.breakpoint()
        return out


def step():
    torch.manual_seed(0)
    rows, columns = {"tp": vescale.Shard(0)}, {"tp": vescale.Shard(1)}
    plan = vescale.Plan(mesh={"tp": 4}, parameters={"up.*": rows, "down.weight": columns, "*": {}})
    model, _ = vescale.parallelize(plan, MLP(), torch.optim.AdamW)
    return model(torch.ones(2, 8)).sum().item()


vescale.simulate(step, ranks=4)
"""
TYPED = ("p hidden[0, :3]", "p hidden.mean().item()", "p hidden.to_local().sum().item()", "p out.shape", "c")
TIMED = """
import time
import torch
import torch.distributed as dist
from torch import nn
import vescale

torch.manual_seed(0)
torch.set_num_threads(1)
plan = vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=2)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
slow = model[1].register_forward_hook(lambda *_: time.sleep(0.02 * dist.get_rank()))
with vescale.timeline("trace", model):
    for _ in range(3):
        model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def plan(folder: Path) -> str:
    (folder / "llama-8b").mkdir()
    (folder / "llama-8b/config.json").write_text(LLAMA_8B)
    options = "--world-size 64 --hardware h100 --batch 128 --seq 8192 --no-verify"
    text = said(folder, f"vescale plan llama-8b {options}")
    return terminal("vescale plan", text[: text.index("where the choice spends")].rstrip())


def compare(folder: Path) -> str:
    (folder / "train.py").write_text(BROKEN)
    said(folder, "python train.py")
    return terminal("vescale compare", said(folder, "vescale compare one four --rtol 1e-5"))


def breakpoint_session(folder: Path) -> str:
    (folder / "model.py").write_text(STOPPED)
    text = said(folder, "python model.py", "\n".join((*TYPED, "")))
    for line in TYPED:
        before, _, after = text.partition(PROMPT)
        text = f"{before}\0{line}\n{after}"  # what was typed, which a pipe does not echo
    return terminal("vescale.breakpoint()", text.replace("\0", PROMPT).replace(f"{folder}/", "").rstrip())


def timeline(folder: Path) -> str:
    (folder / "train.py").write_text(TIMED)
    said(folder, "torchrun --nproc-per-node 2 train.py")
    return terminal("vescale timeline", said(folder, "vescale timeline trace"))


def shards(folder: Path) -> str:
    import torch

    import vescale

    def weight() -> vescale.DTensor:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return vescale.distribute_tensor(torch.zeros(7, 6), mesh, [vescale.Shard(0), vescale.Shard(1)])

    vescale.simulate(weight, ranks=4)[0].draw().save(folder / "shards.svg")
    return (folder / "shards.svg").read_text()


def zero_memory(folder: Path) -> str:
    """GiB of one of 64 ranks for a Llama of 8B, by what lies in it, at every stage of ZeRO."""
    import matplotlib
    import torch
    import transformers

    import vescale

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "vescale", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot

    (folder / "config.json").write_text(LLAMA_8B)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder)).bfloat16()
    parts: dict[str, list[float]] = {}
    for stage in range(4):
        made = vescale.generate_plan(
            model, world_size=64, batch=64, seq=2048, hardware="h100", pin={"dp": 64, "zero": stage}, memory=2**40,
        )  # fmt: skip
        for name, size in vars(made.explain().chosen.memory).items():
            parts.setdefault(name, []).append(size / 2**30)
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
    below = [0.0] * 4
    for name, sizes in parts.items():
        axes.bar([f"ZeRO {stage}" for stage in range(4)], sizes, bottom=below, label=name, width=0.6)
        below = [one + size for one, size in zip(below, sizes)]
    axes.axhline(80, color="black", linewidth=0.8, linestyle="--")
    axes.text(3.4, 82, "80 GiB", ha="right")
    axes.set_ylabel("GiB of a rank")
    axes.set_title("Llama 8B in bfloat16 on 64 ranks, a row of 2,048 tokens each")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return _svg(figure)


def nodes(folder: Path) -> str:
    """Which ranks share what, of dp 2 x pp 2 x tp 4 on two nodes of eight."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "vescale", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import patches, pyplot

    colours = ("#3459b5", "#1b7f4d", "#c2701c", "#8a3fa0")
    figure, axes = pyplot.subplots(figsize=(7.6, 3.6))
    for rank in range(16):
        node, place = divmod(rank, 8)
        stage, shard = divmod(place, 4)
        x, y = node * 5 + shard, 1 - stage
        axes.add_patch(patches.Rectangle((x, y), 0.88, 0.62, color=colours[2 * node + stage], alpha=0.85))
        axes.text(x + 0.44, y + 0.36, f"rank {rank}", ha="center", color="white", fontsize=8)
        axes.text(x + 0.44, y + 0.12, f"part {shard + 1} of 4", ha="center", color="white", fontsize=6)
    for node in range(2):
        axes.add_patch(patches.Rectangle((node * 5 - 0.2, -0.25), 4.3, 2.45, fill=False, linewidth=1.2))
        axes.text(
            node * 5 + 1.95, 2.3, f"node {node}: rows {'first' if node == 0 else 'second'} half (dp)", ha="center"
        )
        for stage in range(2):
            axes.text(node * 5 + 1.95, 1.7 - stage, f"stage {stage} (pp)", ha="center", fontsize=8)
    axes.annotate("", (5, -0.5), (4, -0.5), arrowprops={"arrowstyle": "<->"})
    axes.text(4.5, -0.85, "dp: gradients, between nodes, once a step", ha="center", fontsize=8)
    inside = "tp: activations, inside a node, in every layer (one colour); pp: activations between two colours"
    axes.text(4.5, -1.2, inside, ha="center", fontsize=8)
    axes.set_xlim(-0.5, 9.5)
    axes.set_ylim(-1.4, 2.7)
    axes.axis("off")
    return _svg(figure)


def said(folder: Path, command: str, typed: str = "") -> str:
    """What a command prints; it has to end well, or to have found a difference."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    program, *arguments = command.split()
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    found = subprocess.run(
        [*start.get(program, [str(Path(sys.executable).with_name(program))]), *arguments],
        cwd=folder, env=environment, input=typed, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if found.returncode not in (0, 1) or not (found.stdout or program == "torchrun" or "train.py" in command):
        raise RuntimeError(f"{command}: {found.returncode}\n{found.stdout}{found.stderr}")
    return found.stdout if typed else f"$ {command}\n{found.stdout}".rstrip()


def terminal(title: str, text: str) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), highlight=True)
    return console.export_svg(
        title=title, code_format=TERMINAL, unique_id=title.split()[-1].strip("()").replace(".", "-")
    )


def _svg(figure) -> str:
    found = io.StringIO()
    figure.savefig(found, format="svg", bbox_inches="tight", metadata={"Date": None})
    return found.getvalue()


PICTURES: dict[str, Callable[[Path], str]] = {
    "plan": plan,
    "compare": compare,
    "breakpoint": breakpoint_session,
    "timeline": timeline,
    "shards": shards,
    "zero-memory": zero_memory,
    "nodes": nodes,
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.svg").write_text(PICTURES[name](Path(folder)))
        print(FOLDER.relative_to(TOP) / f"{name}.svg", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What somebody does who has the wheels and the README: from built wheels alone, in an environment without this tree.

    make newcomer

An own text and an own model of transformers, a Trainer with a plan on two ranks, its checkpoint, the rest of the
training under another mesh, a checkpoint of veScale's own, an export, and `generate` from what was exported: all of it
must be what one process gives. torch, transformers and other third-party packages are those of the running environment,
lent by links; ours are installed from wheels and from nowhere else.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from fresh_install import lend_third_party, siblings
from make_dist import make_dist
from package_tree import read_packages

TOP = Path(__file__).absolute().parents[1]

PROGRAM = '''
import json, os, sys
import torch, transformers, vescale
from vescale.integrations.transformers import parallelize

out, mesh, last, resumes = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4
text = ("the quick brown fox jumps over the lazy dog. " * 40).encode()
rows = [list(text[i : i + 32]) for i in range(0, 32 * 24, 32)]
data = [{"input_ids": row, "labels": row} for row in rows]
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
model = transformers.LlamaForCausalLM(config)
arguments = transformers.TrainingArguments(out, per_device_train_batch_size=4, max_steps=8, learning_rate=1e-2,
    save_steps=4, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
trainer = transformers.Trainer(model, arguments, train_dataset=data)
sharded = {"model.layers.*.q_proj.weight": {"tp": vescale.Shard(0)}} if "tp" in mesh else {}
plan = vescale.Plan(mesh=mesh, parameters={**sharded, "*": {}}, zero=3 if "dp" in mesh else 0)
parallelize(plan, trainer)
trainer.args.max_steps = 8
class Stop(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= last
trainer.add_callback(Stop())
trainer.train(resume_from_checkpoint=resumes)
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
if last == 8:
    vescale.save(os.path.join(out, "own"), {"model": trainer.model})
    vescale.export_huggingface(os.path.join(out, "exported"), trainer.model)
if int(os.environ.get("RANK", 0)) == 0:
    ours = {name: module.__file__ for name, module in sys.modules.items()
            if name.startswith("vescale") and "." not in name}
    print(json.dumps({"losses": losses, "ours": ours}))
'''

GENERATE = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = torch.tensor([list(b"the quick brown ")])
made = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
print(json.dumps({"text": bytes(made[0].tolist()).decode(errors="replace")}))
"""


class NewcomerError(RuntimeError):
    """A step of the way did not work, or gave something else than one process."""


def walk(folder: Path) -> dict:
    """The whole way, in `folder`; figures."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "tests")
    shutil.copytree(TOP / "packages", folder / "source" / "packages", ignore=ignored)  # files, where Bazel has links
    packages = read_packages(folder / "source")
    (meta,) = (package for package in packages if package.name == "vescale")
    wheels = make_dist(folder / "wheels", [meta, *siblings(meta, packages)], wheels_only=True)
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    lend_third_party(folder / "environment")
    python = folder / "environment" / "bin" / "python"
    options = ["install", "-q", "--disable-pip-version-check", "--no-index"]
    _run([sys.executable, "-m", "pip", "--python", python, *options, *wheels], folder)
    (folder / "train.py").write_text(PROGRAM)
    (folder / "generate.py").write_text(GENERATE)

    one = _trained(python, folder, "one", 1, {"dp": 1}, 8)
    first = _trained(python, folder, "two", 2, {"dp": 2}, 4)
    rest = _trained(python, folder, "two", 2, {"tp": 2}, 8, "resume")
    losses = rest["losses"]
    worst = max(abs(a - b) / b for a, b in zip(losses, one["losses"], strict=True))
    if worst > 1e-4 or first["losses"] != losses[:4]:  # the log's numbers are rounded
        raise NewcomerError(f"losses {losses}, and {one['losses']} on one process; {first['losses']} before the resume")
    stray = [file for file in rest["ours"].values() if not Path(file).is_relative_to(folder)]
    if stray:
        raise NewcomerError(f"used from outside of the wheels: {stray}")
    texts = [
        json.loads(_run([python, "-I", "generate.py", folder / run / "exported"], folder).splitlines()[-1])["text"]
        for run in ("one", "two")
    ]
    if texts[0] != texts[1]:
        raise NewcomerError(f"generated {texts[1]!r}, and {texts[0]!r} on one process")
    return {"wheels": len(wheels), "losses": losses, "worst": worst, "generated": texts[1]}


def _trained(python: Path, folder: Path, out: str, ranks: int, mesh: dict, last: int, *resume: str) -> dict:
    start = [python, "-I"]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    said = _run([*start, "train.py", folder / out, json.dumps(mesh), str(last), *resume], folder)
    return json.loads(next(line for line in said.splitlines() if line.startswith('{"losses"')))


def _run(command: list, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    if run.returncode:
        raise NewcomerError(f"{' '.join(map(str, command))}\n{run.stdout}{run.stderr}")
    return run.stdout


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="vescale-newcomer-") as scratch:
        print(json.dumps(walk(Path(scratch))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

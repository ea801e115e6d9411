"""Lines of code that a user of each side writes for this Llama: neither blank nor comment nor docstring."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

HERE = Path(__file__).absolute().parent
THEIR_FILES = ("sharding.py", "parallelize.py", "model.py", "__init__.py", "config_registry.py")


def lines(their_python: str | None) -> dict[str, dict[str, int] | str]:
    """Per side and file. Ours: the model, which any `nn.Module` is, and the plan with the call of `parallelize`."""
    plan = (HERE / "ours.py").read_text()
    plan = plan[plan.index("# --- what a user writes") : plan.index("# --- until here")]
    ours = {"model (llama.py)": count((HERE / "llama.py").read_text()), "plan": count(plan), "parallelize": 1}
    if their_python is None:
        return {"veScale": ours, "TorchTitan": "skipped"}
    asked = [their_python, "-c", "import importlib.util as u; print(u.find_spec('torchtitan').origin)"]
    package = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()).parent
    folder = package / "models/llama3"
    return {"veScale": ours, "TorchTitan": {name: count((folder / name).read_text()) for name in THEIR_FILES}}


def count(source: str) -> int:
    """Lines that hold a token of code; those of a docstring do not."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    rows = enumerate(source.splitlines(), 1)
    return sum(bool(row.strip()) and not row.strip().startswith("#") and number not in texts for number, row in rows)

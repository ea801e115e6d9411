"""The private names of torch that the packages use, and which of them the installed torch lacks.

    python tools/checks/torch_private.py       those that it lacks, by package; status 1 where there is one

Each package names them in one module, `_torch_private.py`, bound to a name or inside a function, with what they are for
and what would replace them. Nothing of a package is imported here: on a torch that lacks one of them a package may not
import. A name that is bound by `getattr(owner, name, None)` may be lacking.

Private is a dotted name with a part that begins with one underscore. Names of operators (`torch.ops`) are none of
Python's, and attributes of objects (`module._parameters`) cannot be seen in an import: both are left out.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from package_tree import Package, read_packages

TOP = Path(__file__).absolute().parents[2]
FILE = "_torch_private.py"
REASON = "Instead:"


@dataclass(frozen=True)
class Use:
    """One dotted name of torch in a source file."""

    name: str  # "torch._C._current_graph_task_id"
    line: int
    optional: bool = False

    @property
    def is_private(self) -> bool:
        parts = self.name.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        return private and parts[:2] != ["torch", "ops"]


@dataclass(frozen=True)
class Entry:
    """What a `_torch_private.py` defines."""

    name: str
    line: int
    uses: tuple[Use, ...]
    reason: str  # the comment, or the docstring


def private_module(package: Package) -> Path | None:
    """The package's one module of this kind; ValueError where it has several."""
    found = sorted(package.source.rglob(FILE))
    if len(found) > 1:
        raise ValueError(f"packages/{package.name}: several modules {FILE}: {', '.join(map(str, found))}")
    return found[0] if found else None


def uses_in(tree: ast.AST, imported: dict[str, str] | None = None) -> Iterator[Use]:
    """The names of torch in `tree`, each as long as it is written; `imported`: what its names stand for."""
    if imported is None:
        imported = torch_imports(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Use(alias.name, node.lineno) for alias in node.names if _is_torchs(alias.name))
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_torchs(node.module or ""):
                yield from (Use(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)

    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and (name := _dotted(node, imported)):
            yield Use(name, node.lineno)
        elif _is_getattr(node):
            owner, attribute = node.args[:2]
            if (name := _dotted(owner, imported)) and isinstance(attribute, ast.Constant):
                yield Use(f"{name}.{attribute.value}", node.lineno, optional=len(node.args) == 3)


def torch_imports(tree: ast.AST) -> dict[str, str]:
    """What the names of a module stand for that it imports from torch."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_torchs(alias.name), node.names):
                found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_torchs(node.module or ""):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def entries(path: Path) -> list[Entry]:
    """What a `_torch_private.py` defines."""
    source = path.read_text()
    tree, lines = ast.parse(source, path), source.splitlines()
    imported = torch_imports(tree)
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, reason = node.targets[0].id, _comment_above(lines, node.lineno)
        elif isinstance(node, ast.FunctionDef):
            name, reason = node.name, ast.get_docstring(node) or ""
        else:
            continue
        uses = tuple(dict.fromkeys(use for use in uses_in(node, imported | torch_imports(node)) if use.is_private))
        inside = [Use(f"{one.module}.{alias.name}", one.lineno)
                  for one in ast.walk(node) if isinstance(one, ast.ImportFrom) for alias in one.names]  # fmt: skip
        found.append(Entry(name, node.lineno, (*uses, *inside), reason))
    return found


def lacking(path: Path) -> list[str]:
    """The names in a `_torch_private.py` that the installed torch has not, those left out that may be lacking."""
    uses = [use for entry in entries(path) for use in entry.uses]
    optional = {use.name for use in uses if use.optional}
    return sorted({use.name for use in uses if use.name not in optional and not is_there(use.name)})


def is_there(name: str) -> bool:
    """Whether torch has it; what is None before a process group is made is not looked into."""
    module, attributes = name, []
    while (owner := _module(module)) is None:
        module, _, last = module.rpartition(".")
        attributes.insert(0, last)
    for attribute in attributes:
        if owner is None:
            return True
        if not hasattr(owner, attribute):
            return False
        owner = getattr(owner, attribute)
    return True


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _comment_above(lines: list[str], line: int) -> str:
    """The comment over the run of lines without a blank one that `line` (from 1) is in."""
    at, comment = line - 1, []
    while at > 0 and lines[at - 1].strip():
        at -= 1
        if lines[at].startswith("#"):
            comment.append(lines[at])
    return "\n".join(reversed(comment))


def _is_getattr(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _dotted(node: ast.AST, imported: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([imported[node.id], *parts]) if isinstance(node, ast.Name) and node.id in imported else None


def main() -> int:
    import torch

    failed = False
    for package in read_packages(TOP):
        if path := private_module(package):
            missing = lacking(path)
            failed |= bool(missing)
            count = len({use.name for entry in entries(path) for use in entry.uses})
            print(f"{package.name}: torch {torch.__version__} has all {count}" if not missing else
                  f"{package.name}: torch {torch.__version__} lacks {', '.join(missing)}")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""The import cycles inside the packages: modules that need each other, counted with lazy and type-only imports.

    python tools/checks/import_cycles.py       every cycle, with who imports whom in it
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from package_tree import Package, read_packages

TOP = Path(__file__).absolute().parents[2]


@dataclass(frozen=True)
class Cycle:
    """Modules of one package, each of which leads to each other one; as many as possible."""

    imports: dict[str, set[str]]  # module -> those of the cycle that it imports

    def __len__(self) -> int:
        return len(self.imports)

    def __str__(self) -> str:
        rows = [f"  {module} -> {', '.join(sorted(found))}" for module, found in sorted(self.imports.items())]
        return "\n".join([f"{len(self)} modules", *rows])


def cycles(package: Package) -> list[Cycle]:
    """The largest first."""
    graph = import_graph(package)
    reached = {module: _reached_from(module, graph) for module in graph}
    left, found = set(graph), []
    for module in sorted(graph):
        together = {other for other in reached[module] if module in reached[other]}
        if module in left and module in together and len(together) > 1:
            found.append(Cycle({one: graph[one] & together for one in together}))
        left -= together
    return sorted(found, key=len, reverse=True)


def import_graph(package: Package) -> dict[str, set[str]]:
    """Module -> the modules of the same package that its source imports, wherever it does so.

    A facade (`__init__`) counts where something is imported from it that is not a module of its own.
    """
    paths = {}
    for path in package.source.rglob("*.py"):
        parts = path.relative_to(package.source.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {module: {name for name in _imported(module, path, paths) if name in paths} - {module}
            for module, path in paths.items()}  # fmt: skip


def _imported(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    folder = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield inner if inner in known else source


def _reached_from(module: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[module])
    while ahead:
        if (one := ahead.pop()) not in found:
            found.add(one)
            ahead.extend(graph[one])
    return found


def main() -> int:
    for package in read_packages(TOP):
        for cycle in cycles(package):
            print(f"{package.name}: {cycle}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

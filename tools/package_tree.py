"""The packages under packages/: what each declares in pyproject.toml, and what its sources import."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported module, or attribute chain that names one, and where it stands."""

    name: str  # dotted: "torch.distributed.tensor.Shard"
    path: Path
    line: int

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def is_within(self, module: str) -> bool:
        """Whether it is `module`, or something that `module` holds."""
        return f"{self.name}.".startswith(f"{module}.")


KIT = "testkit"
"""The package of tests: no other one needs it, and it pins the core, whose insides it sees."""


@dataclass(frozen=True)
class Package:
    """One folder of packages/."""

    folder: Path

    @property
    def name(self) -> str:
        """The short name, that of the folder: `dtensor`."""
        return self.folder.name

    @property
    def module(self) -> str:
        return "vescale" if self.name == "vescale" else f"vescale_{self.name}"

    @property
    def distribution(self) -> str:
        return self.module.replace("_", "-")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    @cached_property
    def version(self) -> str:
        text = (self.source / "_version.py").read_text()
        match = re.search(r'__version__ = "(.+)"', text)
        if match is None:
            raise ValueError(f"{self.source / '_version.py'} holds no __version__")
        return match[1]

    @cached_property
    def requirements(self) -> dict[str, str]:
        """What installing it installs: distribution -> version range, as pyproject.toml states them."""
        return dict(map(split_requirement, self._project["dependencies"]))

    @cached_property
    def optional(self) -> set[str]:
        """The distributions that its extras name."""
        extras = self._project.get("optional-dependencies", {})
        return {split_requirement(requirement)[0] for extra in extras.values() for requirement in extra}

    @property
    def is_kit(self) -> bool:
        return self.name == KIT

    def pins(self, sibling: "Package") -> bool:
        """True if it goes with one version of a sibling alone."""
        return "==" in self.requirements.get(sibling.distribution, "")

    @cached_property
    def imports(self) -> list[Import]:
        """Absolute imports of its sources, those inside functions included."""
        return [found for path in sorted(self.source.rglob("*.py")) for found in read_imports(path)]

    @cached_property
    def _project(self) -> dict:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]


def read_packages(top: Path) -> list[Package]:
    """Every package of the tree, by name."""
    return [Package(pyproject.parent) for pyproject in sorted(top.glob("packages/*/pyproject.toml"))]


def split_requirement(requirement: str) -> tuple[str, str]:
    """`"torch>=2.11"` as `("torch", ">=2.11")`."""
    match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[.*?\])?\s*([^;]*)", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return match[1], match[2].strip()


def read_imports(path: Path) -> list[Import]:
    """The absolute imports of one file, and uses of `torch.distributed` that need no import of their own."""
    tree = ast.parse(path.read_text(), path)
    return [Import(name, path, line) for name, line in _imported_names(tree)]


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed."):
            yield ast.unparse(node), node.lineno

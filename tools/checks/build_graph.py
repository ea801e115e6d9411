"""The Bazel targets of the tree, read without Bazel.

BUILD files and python.bzl are Starlark, whose syntax is a subset of Python's. Running them as Python, with stand-ins
for Bazel's builtins, gives the very targets that Bazel sees: python.bzl stays the only place that says how test files
fall into targets, for `bazel test //...`, for the run without Bazel and for the check of the layers.
"""

import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = {"short": 60, "moderate": 300, "long": 900, "eternal": 3600}  # Bazel's own
PRUNED = frozenset({"__pycache__", "outputs", "results", "no_coverage"})


@dataclass(frozen=True)
class Target:
    """One target: `rule` made it, `attributes` are as the BUILD file gave them."""

    rule: str
    package: str
    name: str
    attributes: Mapping[str, Any] = field(repr=False)

    @property
    def label(self) -> str:
        return f"//{self.package}:{self.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The source files, relative to the top of the tree; labels of other targets are left out."""
        files = [source for source in self.attributes.get("srcs", ()) if ":" not in source]
        return tuple(f"{self.package}/{file}".lstrip("/") for file in files)

    @property
    def deps(self) -> tuple[str, ...]:
        """The labels it depends on, in full: `//packages/dtensor:vescale_dtensor`."""
        return tuple(full_label(dep, self.package) for dep in self.attributes.get("deps", ()))

    @property
    def timeout_s(self) -> int:
        return TIMEOUT_SECONDS[self.attributes.get("timeout") or "moderate"]


def full_label(label: str, package: str) -> str:
    """`:name` and `//some/package` spelled in full, as `//package:name`."""
    if label.startswith(":"):
        return f"//{package}{label}"
    return label if ":" in label else f"{label}:{label.rsplit('/', 1)[-1]}"


@dataclass(frozen=True)
class BuildGraph:
    """Every target of a tree, by its label."""

    targets: Mapping[str, Target]

    def tests(self) -> list[Target]:
        """The pytest targets, in the order of their labels."""
        return sorted((t for t in self.targets.values() if t.rule == "pytest_test"), key=lambda t: t.label)

    def roots(self, target: Target) -> list[str]:
        """The source roots that a target's imports come from: its own and those of all it depends on."""
        found: dict[str, None] = {}
        if target.rule == "python_library":
            found[f"{target.package}/{target.attributes.get('root', 'src')}".rstrip("/")] = None
        for dep in target.deps:
            found.update(dict.fromkeys(self.roots(self.targets[dep])))
        return list(found)


def read_build_graph(top: Path) -> BuildGraph:
    """Run every BUILD file under `top`."""
    targets: dict[str, Target] = {}
    for build in sorted(_build_files(top)):
        for target in _run_build_file(top, build):
            targets[target.label] = target
    return BuildGraph(targets)


def _build_files(top: Path) -> Iterator[Path]:
    for folder in _folders(top):
        if (folder / "BUILD").is_file():
            yield folder / "BUILD"


def _folders(top: Path) -> Iterator[Path]:
    """`top` and the folders below that may hold sources."""
    yield top
    for child in top.iterdir():
        if child.is_dir() and child.name not in PRUNED and not child.name.startswith("."):
            yield from _folders(child)


def _run_build_file(top: Path, build: Path) -> list[Target]:
    """The targets of one BUILD file; a call of a rule, from wherever, adds one."""
    package = build.parent.relative_to(top).as_posix()
    package = "" if package == "." else package
    targets: list[Target] = []

    def record(rule: str, **attributes: Any) -> None:
        targets.append(Target(rule, package, attributes["name"], attributes))

    def new_rule(**_: Any) -> Callable[..., None]:
        # Starlark names a rule after the variable it is bound to, which is known once the file has run.
        def call(**attributes: Any) -> None:
            record(call.__name__, **attributes)

        return call

    def glob(include: Sequence[str], exclude: Sequence[str] = (), allow_empty: bool = True) -> list[str]:
        return _glob(build.parent, include, exclude)

    def filegroup(**attributes: Any) -> None:
        record("filegroup", **attributes)

    def load(label: str, *names: str) -> None:
        folder, _, file = full_label(label, package).removeprefix("//").partition(":")
        scope: dict[str, Any] = {
            "rule": new_rule,
            "native": types.SimpleNamespace(glob=glob, filegroup=filegroup),
            "attr": _Inert(),
            "provider": _Inert(),
        }
        _execute(top / folder / file, scope)
        for name, value in scope.items():
            if isinstance(value, types.FunctionType):
                value.__name__ = name
        build_scope.update({name: scope[name] for name in names})

    build_scope: dict[str, Any] = {
        "load": load,
        "glob": glob,
        "filegroup": filegroup,
        "exports_files": _Inert(),
        "package": _Inert(),
    }
    _execute(build, build_scope)
    return targets


def _execute(path: Path, scope: dict[str, Any]) -> None:
    exec(compile(path.read_text(), path, "exec"), scope)


class _Inert:
    """Stands for a builtin whose result nobody looks at here."""

    def __getattr__(self, name: str) -> "_Inert":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Inert":
        return self


def _glob(folder: Path, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    subpackages = {build.parent for build in _build_files(folder)} - {folder}
    files = [
        path.relative_to(folder).as_posix()
        for parent in _folders(folder)
        if subpackages.isdisjoint((parent, *parent.parents))
        for path in parent.iterdir()
        if path.is_file()
    ]
    return sorted(
        file
        for file in files
        if any(_matches(file, pattern) for pattern in include) and not any(_matches(file, p) for p in exclude)
    )


def _matches(file: str, pattern: str) -> bool:
    """Bazel's globs: `*` stays within a path segment, `**` spans any number of them."""
    expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.fullmatch(expression, file) is not None

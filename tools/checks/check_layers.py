"""Checks the layering of the packages, and the few rules of the tree that no compiler checks: `make check`.

- The siblings that a package imports, those that its pyproject.toml requires and those that its Bazel library depends
  on are the same set, and lie within its row of the table in docs/design.md. The meta package requires them all.
- Siblings are required by ranges, which hold the versions in the tree and the minor version after them.
- No private name crosses a package: siblings import each other's public modules and names alone. The test kit alone
  pins a sibling, and sees its insides.
- Every third-party import is declared, as a requirement or in an extra.
- Only the modules of COMMUNICATES import torch.distributed; values that it defines (VALUES) are for all.
- Only `_torch_private.py`, one per package, names private parts of torch, each with what would replace it.
- No other package imports the test kit.
- No modules import each other, be it lazily or for types alone.
- A module has one noun: at most 700 lines, and a warning from 400 on; none is called utils, common or helpers.
- A folder of sources, tools or benchmarks holds at most 15 loose modules.
- Every test file is in exactly one Bazel target, and every package is in the table of the top README.md.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from checks import import_cycles, torch_private
from checks.build_graph import BuildGraph, read_build_graph
from package_tree import KIT, Package, read_packages

TOP = Path(__file__).absolute().parents[2]
META = "vescale"
MOST_LINES, MANY_LINES = 700, 400
MOST_FILES = 15
NAMELESS = {"utils.py", "common.py", "helpers.py"}
PYTHON_FOLDERS = ("packages", "tools", "examples", "benchmarks")

# The modules that communicate, per package; all else is pure, and testable without processes.
COMMUNICATES = {
    "dtensor": {
        "checkpoints",  # tells torch's checkpoints which boxes a rank holds; sends nothing
        "_torch_private",  # names parts of it; sends nothing
        "collectives",  # executes conversions
        "collective_check",  # asks a group for its ranks
        "deaths",  # leaves word in the store of which process a rank is
        "endings",  # tells why a rank ended
        "objects",  # what ranks say to each other
        "pairs",  # what collectives does between two ranks
        "guard",  # asks which ranks a group has
        "hang",  # tells what ranks wait for that hang
        "mesh",  # looks up the process groups of a mesh
        "namespace",  # sends the name of a world to its ranks, once
        "session",  # what ranks tell each other while they stand in the debugger
        "communication",  # answers calls of torch.distributed on DTensors; sends nothing
        "transfer",  # sends and receives blocks of keys and values
    },
    "checkpoint": {
        "_torch_private",  # names parts of it; sends nothing
        "_neighbours",  # copies files from node to node
        "_sync",  # what ranks tell each other during a save or a load
    },
    "pipeline": {
        "_torch_private",  # names parts of it; sends nothing
        "faults",  # tells the first cause of a failure
        "p2p",  # sends and receives
        "words",  # tells small values through the store
    },
    "plans": {
        "_torch_private",  # names parts of it; sends nothing
        "_data_parallel",  # reduces gradients
        "dry_run",  # makes a world without processes
        "join",  # joins torchrun's process group
        "recompute",  # torch's checkpoint by hooks lives there
        "wrappers",  # names what torch distributes models by
    },
    "testkit": {
        "_torch_private",  # names parts of it; sends nothing
        "_group",  # the process group of the second device
        "allocations",  # waits after others' waits; sends nothing
        "ranks",  # makes meshes, and a world without processes
        "worker",  # a rank of the pool
        "world",  # whose ranks may be killed
    },
    "vescale": {
        "_torch_private",  # names parts of it; sends nothing
        "metrics",  # asks which rank this is
        "_full",  # waits for all ranks where others write files
        "probes",  # times sends
        "calibrate",  # starts ranks that measure together
        "device_check",  # whether accelerators reach each other
        "doctor",  # whether ranks reach each other
        "accelerate",  # of integrations: waits for all ranks where a script does
        "record",  # collects what ranks measured
        "_scaler",  # whether any rank's gradients are not finite
        "_stages",  # makes the groups of pipelines
        "stop",  # whether any rank was asked to end
        "timeline",  # asks for the rank
        "group",  # a process group in memory
        "store",  # the same for a store
        "state",  # of simulations: swaps what each rank has of it
        "simulate",  # makes a world of it
    },
}
# Modules that are not called as what is installed, by "_".
NAMED_OTHERWISE = {"pynvml": "nvidia_ml_py"}
# What torch.distributed defines that is a value: naming it neither communicates nor needs a process group.
VALUES = ("torch.distributed.device_mesh.DeviceMesh", "torch.distributed.tensor")


@dataclass(frozen=True)
class Repository:
    """A tree to check; each part is read once."""

    top: Path

    @cached_property
    def packages(self) -> list[Package]:
        return read_packages(self.top)

    @cached_property
    def graph(self) -> BuildGraph:
        return read_build_graph(self.top)

    @cached_property
    def layers(self) -> dict[str, set[str]]:
        """docs/design.md's table: package -> what it may import, as short names. Parentheses mean: not yet."""
        text = (self.top / "docs/design.md").read_text()
        rows = re.findall(r"^\| packages/(\w+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
        layers = {name: set(re.findall(r"\w+", allowed)) for name, allowed in rows}
        everything = set(layers) - {KIT} | {"torch"}
        return {name: everything - {name} if allowed == {"all"} else allowed for name, allowed in layers.items()}

    @cached_property
    def python_files(self) -> list[Path]:
        files = [path for folder in PYTHON_FOLDERS for path in (self.top / folder).rglob("*.py")]
        return sorted(path for path in files if not any(part.startswith(".") for part in self.relative(path).parts))

    def relative(self, path: Path) -> Path:
        return path.relative_to(self.top)


def check_table(repository: Repository) -> Iterator[str]:
    """The table has a row for each package, and no other."""
    folders = {package.name for package in repository.packages}
    for name in sorted(folders ^ set(repository.layers)):
        lacking = "the table of docs/design.md" if name in folders else "packages/"
        yield f"{lacking} lacks {name}"


def check_siblings(repository: Repository) -> Iterator[str]:
    """Imports = requirements = Bazel dependencies, within the table."""
    short_names = {package.module: package.name for package in repository.packages}
    by_distribution = {package.distribution: package.name for package in repository.packages}
    for package in repository.packages:
        imported = {short_names[found.top] for found in package.imports if found.top in short_names} - {package.name}
        required = {by_distribution[name] for name in package.requirements if name in by_distribution}
        library = repository.graph.targets.get(f"//packages/{package.name}:{package.module}")
        built = {short_names[dep.partition(":")[2]] for dep in library.deps} if library else set()
        may_import = repository.layers.get(package.name, set())

        if package.name == META:
            # It may re-export less than it installs: to bring them all is its purpose.
            expected, reason = set(short_names.values()) - {META, KIT}, "the meta package brings"
        else:
            expected, reason = imported, "its sources import"
        for name in sorted(imported - may_import):
            yield f"packages/{package.name}: imports {name}, which its row in docs/design.md does not allow"
        for what, actual in (("pyproject.toml", required), ("BUILD", built)):
            if actual != expected:
                yield f"packages/{package.name}/{what}: names {_set(actual)}; {reason} {_set(expected)}"


def check_ranges(repository: Repository) -> Iterator[str]:
    """Siblings are required by ranges that hold what is in the tree and the next minor version, so that each is
    released apart: what siblings of the minor version before import is kept (`sibling_names.py`)."""
    versions = {package.distribution: package.version for package in repository.packages}
    for package in repository.packages:
        for name, stated in package.requirements.items():
            pinned = "==" in stated
            if name in versions and pinned and not package.is_kit:
                yield f"packages/{package.name}/pyproject.toml: pins {name}; a range lets it be released apart"
            elif name in versions and versions[name] not in SpecifierSet(stated):
                found = f"requires {name}{stated}, and the tree has {versions[name]}"
                yield f"packages/{package.name}/pyproject.toml: {found}"
            elif name in versions and not pinned and next_minor(versions[name]) not in SpecifierSet(stated):
                following = next_minor(versions[name])
                found = f"requires {name}{stated}, which leaves out the next minor version, {following}"
                yield f"packages/{package.name}/pyproject.toml: {found}"


def next_minor(version: str) -> str:
    """The minor version after it: `0.2.0` of `0.1.7`."""
    major, minor, *_ = version.split(".")
    return f"{major}.{int(minor) + 1}.0"


def check_crossings(repository: Repository) -> Iterator[str]:
    """What a sibling may use of a package is public, so that each can be released apart."""
    for package in repository.packages:
        apart = {one.module for one in repository.packages if one != package and not package.pins(one)}
        for found in package.imports:
            is_private = any(part.startswith("_") and not part.startswith("__") for part in found.name.split("."))
            if found.top in apart and is_private:
                yield f"{repository.relative(found.path)}:{found.line}: imports {found.name}, which is private there"


def check_third_party(repository: Repository) -> Iterator[str]:
    """Every other import is declared; torch is, always."""
    own = {package.module for package in repository.packages} | set(sys.stdlib_module_names)
    for package in repository.packages:
        if package.requirements.get("torch") != ">=2.11":
            yield f"packages/{package.name}/pyproject.toml: does not require torch>=2.11"
        declared = {name.lower().replace("-", "_") for name in {*package.requirements, *package.optional}}
        declared |= {module for module, name in NAMED_OTHERWISE.items() if name in declared}
        for found in package.imports:
            if found.top not in own | declared:
                yield f"{repository.relative(found.path)}:{found.line}: imports {found.top}, which is not declared"


def check_communication(repository: Repository) -> Iterator[str]:
    """torch.distributed is for the modules that are named to communicate."""
    for package in repository.packages:
        allowed = COMMUNICATES.get(package.name, set())
        for found in package.imports:
            communicates = found.is_within("torch.distributed") and not any(map(found.is_within, VALUES))
            if communicates and found.path.stem not in allowed:
                where = f"{repository.relative(found.path)}:{found.line}"
                yield f"{where}: uses {found.name}, and is not one of the modules that communicate"
        path = torch_private.private_module(package)
        groups = {
            entry.name
            for entry in (torch_private.entries(path) if path else ())
            if any(f"{use.name}.".startswith("torch.distributed.") for use in entry.uses)
        }
        for file, name, line in imported_private(package):
            if name in groups and file.stem not in allowed:
                where = f"{repository.relative(file)}:{line}"
                yield f"{where}: uses {name} of torch.distributed, and is not one of the modules that communicate"


def check_private(repository: Repository) -> Iterator[str]:
    """torch's private names stand in one module per package, each with its reason, and are used."""
    for package in repository.packages:
        path = torch_private.private_module(package)
        for file in sorted(package.source.rglob("*.py")):
            for use in () if file == path else torch_private.uses_in(ast.parse(file.read_text(), file)):
                if use.is_private:
                    where = f"{repository.relative(file)}:{use.line}"
                    yield f"{where}: names {use.name}; private parts of torch are for {torch_private.FILE}"
        used = {name for _, name, _ in imported_private(package)}
        for entry in torch_private.entries(path) if path else ():
            where = f"{repository.relative(path)}:{entry.line}"
            if not entry.uses or torch_private.REASON not in entry.reason:
                yield f"{where}: {entry.name} does not say what would replace it ('{torch_private.REASON}')"
            if entry.name not in used:
                yield f"{where}: nothing imports {entry.name}"


def imported_private(package: Package) -> Iterator[tuple[Path, str, int]]:
    """Who imports what from the package's `_torch_private.py`: file, name, line."""
    for file in sorted(package.source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(), file)):
            if isinstance(node, ast.ImportFrom) and node.level and f".{node.module}".endswith("._torch_private"):
                yield from ((file, alias.name, node.lineno) for alias in node.names)


def check_kit(repository: Repository) -> Iterator[str]:
    """The test kit is for tests and tools."""
    for package in repository.packages:
        for found in package.imports:
            if found.top == f"vescale_{KIT}" and not package.is_kit:
                yield f"{repository.relative(found.path)}:{found.line}: imports the test kit"


def check_cycles(repository: Repository) -> Iterator[str]:
    """Which modules need each other."""
    for package in repository.packages:
        for cycle in import_cycles.cycles(package):
            yield f"packages/{package.name}: an import cycle, of {cycle}"


def check_modules(repository: Repository) -> Iterator[str]:
    """Sizes and names of modules."""
    for path in repository.python_files:
        if path.name in NAMELESS:
            yield f"{repository.relative(path)}: name it for what it holds"
        if (lines := count_lines(path)) > MOST_LINES:
            yield f"{repository.relative(path)}: {lines} lines, more than {MOST_LINES}; split it by noun"


def check_folders(repository: Repository) -> Iterator[str]:
    """How many modules lie loose in a folder of sources: of packages, tools, benchmarks and examples."""
    modules = [path for path in repository.python_files if path.name != "__init__.py"]
    loose = Counter(path.parent for path in modules if "tests" not in repository.relative(path).parts)
    for folder, count in sorted(loose.items()):
        if count > MOST_FILES:
            yield f"{repository.relative(folder)}: {count} modules, more than {MOST_FILES}; give some a folder"


def check_test_targets(repository: Repository) -> Iterator[str]:
    """Every test file is in exactly one Bazel target."""
    targets = Counter(source for test in repository.graph.tests() for source in test.sources)
    for path in repository.python_files:
        file = repository.relative(path).as_posix()
        if path.name.startswith("test_") and path.parent.name != "src" and targets[file] != 1:
            yield f"{file}: is in {targets[file]} Bazel targets, not in one"


def check_readmes(repository: Repository) -> Iterator[str]:
    """Every package has the files of its own, and its README is linked from the top one."""
    top_readme = (repository.top / "README.md").read_text()
    for package in repository.packages:
        for file in ("README.md", "CHANGELOG.md", "BUILD", f"src/{package.module}/py.typed"):
            if not (package.folder / file).is_file():
                yield f"packages/{package.name}: has no {file}"
        if f"(packages/{package.name}/README.md)" not in top_readme:
            yield f"README.md: does not link packages/{package.name}/README.md"


CHECKS: tuple[Callable[[Repository], Iterator[str]], ...] = (
    check_table,
    check_siblings,
    check_ranges,
    check_crossings,
    check_third_party,
    check_communication,
    check_private,
    check_kit,
    check_cycles,
    check_modules,
    check_folders,
    check_test_targets,
    check_readmes,
)


def long_modules(repository: Repository) -> Iterator[str]:
    """Modules that deserve a look: long, but not too long."""
    for path in repository.python_files:
        if MANY_LINES < (lines := count_lines(path)) <= MOST_LINES:
            yield f"{repository.relative(path)}: {lines} lines; does it hold two nouns?"


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _set(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("top", nargs="?", type=Path, default=TOP, help="the tree to check; this one by default")
    repository = Repository(parser.parse_args().top.absolute())

    for warning in long_modules(repository):
        print(f"layers: warning: {warning}")
    findings = [finding for check in CHECKS for finding in check(repository)]
    for finding in findings:
        print(f"layers: {finding}")
    if not findings:
        print(f"layers: {len(repository.packages)} packages are as docs/design.md says")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

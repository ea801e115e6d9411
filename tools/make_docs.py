"""Builds the documentation as a static site: the pages of docs/, the packages' READMEs, and every public name.

    python tools/make_docs.py [FOLDER]      default build/docs; open its index.html

The reference is made from docstrings, by Sphinx. A link that leads nowhere within the repository fails the build, and
so does a docstring that Sphinx cannot read.
"""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from package_tree import Package, read_packages

TOP = Path(__file__).absolute().parents[1]
COPIED = (".md", ".svg", ".png")


def write_pages(top: Path, folder: Path) -> None:
    """Lays the pages out as the repository does, so that their links between each other hold."""
    shutil.copy(top / "docs/site/index.md", folder)
    packages = read_packages(top)
    sys.path[:0] = [str(package.source.parent) for package in read_packages(TOP)]  # what is documented is this tree
    files = [file for file in sorted(top.glob("docs/**/*")) if file.suffix in COPIED and "site" not in file.parts]
    files += [top / "CONTRIBUTING.md", *sorted(top.glob("recipes/*"))]
    files += [file for package in packages for file in sorted(package.folder.glob("*")) if file.suffix in COPIED]
    files += [file for package in packages for file in package.source.rglob("*.py")]  # what pages link to
    for file in files:
        target = folder / file.relative_to(top)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (folder / "api").mkdir()
    facade = set(public_names("vescale"))
    for package in packages:
        (folder / "api" / f"{package.module}.rst").write_text(_reference(package, facade))


def public_names(module: str) -> dict[str, object]:
    """What a facade gives that is ours; torch's own classes are documented by torch."""
    found = vars(importlib.import_module(module))
    return {
        name: value
        for name, value in sorted(found.items())
        if not name.startswith("_") and not inspect.ismodule(value)
        if (getattr(value, "__module__", None) or module).startswith("vescale")
    }


def _reference(package: Package, facade: set[str]) -> str:
    """A package's page, in reStructuredText. What `vescale` has, too, is indexed there alone."""
    title = package.module
    lines = [title, "=" * len(title), "", f".. automodule:: {package.module}", "   :no-members:", ""]
    for name, value in public_names(package.module).items():
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
        lines.append(f".. auto{kind}:: {package.module}.{name}")
        if kind == "class":
            lines.append("   :members:")
        if package.name != "vescale" and name in facade:
            lines.append("   :no-index:")
        lines.append("")
    return "\n".join(lines)


def build(folder: Path, *, top: Path = TOP) -> int:
    """Builds the site into `folder`; the exit status, 0 if nothing was wrong."""
    with tempfile.TemporaryDirectory(prefix="vescale-docs-") as scratch:
        source = Path(scratch, "source")
        source.mkdir()
        write_pages(top, source)
        command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html"]
        command += ["-c", str(top / "docs/site"), "-d", str(Path(scratch, "doctrees")), str(source), str(folder)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else TOP / "build/docs").absolute()
    status = build(folder)
    print(f"docs: {folder / 'index.html'}" if status == 0 else "docs: see above")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Installs each package, with the siblings it names, into an empty environment, and uses it there.

    make smoke-install                  from the network, for real: torch and the build backend too
    fresh_install(..., offline=True)    in the tests: third-party packages are those of the running environment

Using it means: its module and those of its siblings come from the new environment, it imports no other package of
ours, its version is right, and its README's examples run, with the test kit beside it where they use that.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from package_tree import Package, read_packages
from readme_blocks import readme_program

TOP = Path(__file__).absolute().parents[1]
OWN_FILES = ("vescale", "_vescale", "__editable__", "_editable_impl")  # how our own entries of site-packages begin

# Imports argv[1] and prints which modules of ours that loaded, from where.
_PROBE = """
import importlib, json, sys
version = importlib.import_module(sys.argv[1]).__version__
ours = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("vescale") and "." not in name}
print(json.dumps({"version": version, "ours": ours}))
"""


class InstallError(RuntimeError):
    """A package did not install, or did not work where it was installed."""


def siblings(package: Package, packages: list[Package]) -> list[Package]:
    """The packages that `package` needs, those that they need included."""
    needed: list[Package] = []
    for other in packages:
        if other.distribution in package.requirements:
            needed += [found for found in (other, *siblings(other, packages)) if found not in needed]
    return needed


def fresh_install(package: Package, packages: list[Package], *, folder: Path, offline: bool) -> None:
    """Install `package` into a new environment in `folder` and use it; InstallError says what did not work."""
    venv.create(folder, with_pip=False, clear=True, symlinks=True)
    python = folder / "bin" / "python"
    needed = siblings(package, packages)
    options = ["-q", "--disable-pip-version-check"]
    if offline:
        lend_third_party(folder)
        options += ["--no-build-isolation", "--no-index"]
    else:
        options += ["-c", str(TOP / "constraints.txt")]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *options]
    _run([*install, *(str(found.folder) for found in (package, *needed))], cwd=folder)

    probe = json.loads(_run([str(python), "-I", "-c", _PROBE, package.module], cwd=folder).splitlines()[-1])
    if probe["version"] != package.version:
        raise InstallError(f"{package.module} is {probe['version']}, not {package.version}")
    for module, file in probe["ours"].items():
        if not Path(file).is_relative_to(folder):
            raise InstallError(f"{module} came from {file}, not from the new environment")
    if stray := set(probe["ours"]) - {found.module for found in (package, *needed)}:
        raise InstallError(f"{package.module} imports {', '.join(sorted(stray))}, which it does not require")

    program = folder / "readme.py"
    program.write_text(readme_program(package.folder / "README.md"))
    for kit in packages:
        if kit.is_kit and kit != package and kit.module in program.read_text():
            _run([*install, str(kit.folder)], cwd=folder)
    _run([str(python), "-I", str(program)], cwd=folder)


def lend_third_party(folder: Path) -> None:
    """Let the environment in `folder` see the running one's packages, ours excepted.

    A .pth file names a folder of links, not site-packages itself: there our own packages are, editable, and pip
    would find them already installed.
    """
    lent = folder / "third_party"
    lent.mkdir()
    for site_packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site_packages).iterdir():
            if not entry.name.startswith(OWN_FILES) and entry.suffix != ".pth":
                (lent / entry.name).symlink_to(entry)
    (python_site_packages(folder) / "third_party.pth").write_text(f"{lent}\n")


def python_site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


def _run(command: list[str], *, cwd: Path) -> str:
    """Run in an environment that names no source root of ours; the output, or InstallError with it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    run = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = run.stdout.decode(errors="replace")
    if run.returncode != 0:
        raise InstallError(f"{' '.join(command)}\n{output}")
    return output


def main() -> int:
    packages = read_packages(TOP)
    installed = 0
    for package in packages:
        started = time.monotonic()
        print(f"smoke-install: {package.distribution} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="vescale-install-") as scratch:
            try:
                fresh_install(package, packages, folder=Path(scratch), offline=False)
            except InstallError as error:
                print(f"smoke-install: {package.distribution} failed: {error}")
            else:
                installed += 1
                print(f"smoke-install: {package.distribution} works, after {time.monotonic() - started:.0f} s")
    print(json.dumps({"packages": len(packages), "installed": installed}))
    return 0 if installed == len(packages) else 1


if __name__ == "__main__":
    sys.exit(main())

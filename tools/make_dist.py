"""A wheel and a source archive of every package, as they go to an index, and a look at what is in them.

    make dist                           into dist/; the test kit into dist/testkit/
    make_dist(folder, wheels_only=True)    in the tests

The wheel is built from the source archive, so that what only this tree has cannot be missed later.
"""

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from package_tree import Package, read_packages

TOP = Path(__file__).absolute().parents[1]
WANTED = ("Metadata-Version:", "Author:", "License-Expression: Apache-2.0", "Classifier:", "Description-Content-Type:")


class DistError(RuntimeError):
    """A package did not build, or what was built lacks something."""


def make_dist(folder: Path, packages: list[Package], *, wheels_only: bool = False) -> list[Path]:
    """Builds all packages into `folder`, with the running environment's build tools; the wheels."""
    for package in packages:
        what = ["--wheel"] if wheels_only else []
        what += ["--outdir", str(_into(folder, package)), str(package.folder)]
        command = [sys.executable, "-m", "build", "--no-isolation", *what]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if run.returncode:
            raise DistError(f"{package.distribution} did not build:\n{run.stdout}{run.stderr}")
    wheels = [_wheel_of(package, folder) for package in packages]
    for package, wheel in zip(packages, wheels, strict=True):
        check_wheel(package, wheel)
    return wheels


def check_wheel(package: Package, wheel: Path) -> None:
    """Raises DistError for a wheel without the licence, the types' marker, or metadata that an index shows."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        missing = [line for line in WANTED if not any(each.startswith(line) for each in metadata.splitlines())]
        wanted = [f"{info}/licenses/LICENSE", f"{package.module}/py.typed", f"{package.module}/__init__.py"]
        missing += [name for name in wanted if name not in names]
        if not missing and archive.read(wanted[0]) != (TOP / "LICENSE").read_bytes():
            missing.append("the licence's text")
    if missing:
        raise DistError(f"{wheel.name} lacks {', '.join(missing)}")


def _into(folder: Path, package: Package) -> Path:
    """Returns the folder of archives: what trains lies together, to be installed whole."""
    return folder / package.name if package.is_kit else folder


def _wheel_of(package: Package, folder: Path) -> Path:
    (wheel,) = _into(folder, package).glob(f"{package.module}-{package.version}-*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    wheels = make_dist(parser.parse_args().folder, read_packages(TOP))
    print(json.dumps({"wheels": len(wheels), "bytes": sum(wheel.stat().st_size for wheel in wheels)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

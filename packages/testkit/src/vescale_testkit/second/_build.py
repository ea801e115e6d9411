"""Builds the device's C++ once per machine: into a cache folder that is named for its source and for torch.

Every process that needs it asks `library`; one of them compiles, under a lock of the file system, while the others
wait. Nothing is downloaded, and nothing is written beside the sources. A library is code that this process will run, so
a folder counts only if it is this user's, and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISDIR, S_IWGRP, S_IWOTH
from sysconfig import get_path

import torch

MODULE = "vescale_second"
SOURCES = tuple(Path(__file__).with_name(f"{name}.cpp") for name in "device streams graphs autocast backend".split())
HEADERS = tuple(Path(__file__).with_name(f"{name}.hpp") for name in ("streams", "graphs"))
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-w")
COMPILE_SECONDS = 600.0


class BuildError(RuntimeError):
    """The second device could not be built on this machine."""


def library() -> Path:
    """The built extension module, compiled first where no process of this machine has done so.

    Raises BuildError, in a sentence, where there is no C++ compiler or it fails.
    """
    name = f"{MODULE}-{_fingerprint()}.so"
    folder = next((one for one in _private() if (one / name).is_file() or os.access(one, os.W_OK)), None)
    if folder is None:
        raise BuildError(
            f"the second device has no folder to be built in: none of {[*map(str, _folders())]} is this user's alone, "
            "and writable. VESCALE_CACHE names another one"
        )
    if not (folder / name).is_file():
        with _locked(folder / f"{name}.lock"):
            if not (folder / name).is_file():
                _compile(folder, folder / name)
    return folder / name


def compiler() -> str:
    """The C++ compiler: $CXX, g++, c++ or clang++. Raises BuildError where there is none."""
    for command in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if command and (found := shutil.which(command)):
            return found
    raise BuildError("the second device is C++, and this machine has no compiler: install g++ (apt-get install g++)")


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.implementation.cache_tag} {FLAGS}".encode())
    for source in (*SOURCES, *HEADERS):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _folders() -> list[Path]:
    """Returns folders for it, the best place first. A sandbox may have no home, and may not write to the one it
    sees."""
    named = [os.environ.get("VESCALE_CACHE"), os.environ.get("XDG_CACHE_HOME")]
    with contextlib.suppress(RuntimeError):
        named.append(str(Path.home() / ".cache"))
    return [*(Path(name, "vescale") for name in named if name), Path(tempfile.gettempdir(), f"vescale-{os.getuid()}")]


def _private() -> Iterator[Path]:
    """The folders, each made as it is asked for, that are this user's and that nobody else may write to. They are named
    without links, which others could turn elsewhere after the check.
    """
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder = folder.resolve(strict=True)
            found = folder.lstat()
            if S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & (S_IWGRP | S_IWOTH):
                yield folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, target: Path) -> None:
    """Objects side by side, then the module, which appears whole or not at all."""
    from torch.utils.cpp_extension import include_paths, library_paths  # a second of imports

    command = [compiler(), *FLAGS, f"-DTORCH_EXTENSION_NAME={MODULE}", f"-I{get_path('include')}"]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [Path(scratch, f"{source.stem}.o") for source in SOURCES]
        with ThreadPoolExecutor() as threads:
            jobs = [[*command, "-c", str(source), "-o", str(object_)] for source, object_ in zip(SOURCES, objects)]
            list(threads.map(_run, jobs))
        built = Path(scratch, target.name)
        link = [compiler(), "-shared", *map(str, objects), "-o", str(built)]
        for path in library_paths():
            link += [f"-L{path}", f"-Wl,-rpath,{path}"]
        _run([*link, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"])
        os.replace(built, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the second device was not built: {error}") from error
    if done.returncode:
        first = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError("the second device was not built:\n" + "\n".join([*first[:8], shlex.join(command)]))

"""Registers the device `second` with torch, and tells where the host waited for it.

Once registered, a process keeps it: torch takes it for its accelerator. So it is for processes of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType, ModuleType

import torch

from .._torch_private import _register_device_module
from ._build import MODULE, library

NAME = "second"


@lru_cache(maxsize=1)
def register() -> ModuleType:
    """Loads the device into this process, for good; the same extension module every time.

    Raises BuildError where it cannot be built.
    """
    spec = importlib.util.spec_from_file_location(MODULE, library())
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(NAME)
    _register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=False)
    from ._group import register as register_group

    register_group(extension)
    return extension


def _module(extension: ModuleType) -> ModuleType:
    """`torch.second`: what torch asks of the module of an accelerator."""
    generator = extension.default_generator()
    module = ModuleType(f"torch.{NAME}")

    def synchronize(device: object = None) -> None:
        extension.note("synchronize the device")

    def set_rng_state(state: torch.Tensor, device: object = NAME) -> None:
        generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # what torch's checkpoint asks, before it keeps the generator's state
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=torch.accelerator.device_index,
        synchronize=synchronize,
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=lambda device=None: torch.accelerator.current_stream(),
        default_stream=lambda device=None: torch.accelerator.current_stream(),
        set_stream=torch.accelerator.set_stream,
        stream=lambda stream: stream,
        default_generators=(generator,),
        initial_seed=lambda: generator.initial_seed(),
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        get_rng_state=lambda device=NAME: generator.get_state(),
        set_rng_state=set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
    )
    return module


class HostWaits:
    """Where the host waited: `sites` counts by what waited and by the functions that asked for it."""

    def __init__(self) -> None:
        self.sites: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.sites.total()


@contextlib.contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Counts the host's waits for the device within the block, on all threads.

    A site reads `what  file:function < file:function`: the function of ours that was the innermost, and its caller in
    another file; line numbers would change with every edit.
    """
    extension, found = register(), HostWaits()

    def heard(what: str) -> None:
        found.sites[f"{what}  {_asker(sys._getframe().f_back)}"] += 1

    extension.listen(heard)
    try:
        yield found
    finally:
        extension.listen(None)


def _asker(frame: FrameType | None) -> str:
    """The innermost function that is neither this kit's nor torch's, and the next one out of another file."""
    found: list[tuple[str, str]] = []
    while frame is not None and len(found) < 2:
        place = _place(frame.f_code.co_filename)
        if place and (not found or found[-1][0] != place):
            found.append((place, frame.f_code.co_name))
        frame = frame.f_back
    # A kernel of a backward that is all C++ has no caller in Python on autograd's thread.
    return " < ".join(f"{file}:{function}" for file, function in found) or "autograd"


@lru_cache(maxsize=4096)
def _place(filename: str) -> str:
    """A file as sites name it: by its package; empty for what only passes calls on."""
    path = Path(filename)
    parts = path.parts
    for package in ("torch", "_second"):
        if package in parts[:-1]:
            return ""
    if path.name.startswith("<") or path.name in ("constructors.py", "worker.py", "contextlib.py", "threading.py"):
        return ""
    for i, part in enumerate(parts[:-1]):
        if part.startswith("vescale") and parts[i - 1] in ("src", "site-packages"):
            return "/".join([part.removeprefix("vescale_"), *parts[i + 1 :]])
    return path.name

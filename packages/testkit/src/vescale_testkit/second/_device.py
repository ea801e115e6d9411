"""Registers the device `second` with torch, and tells where the host waited for it.

Once registered, a process keeps it: torch takes it for its accelerator. So it is for processes of their own.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType

import torch

from .._torch_private import _register_device_module
from ._extension import extension
from ._group import register as register_group
from ._sites import asker

NAME = "second"


@lru_cache(maxsize=1)
def register() -> ModuleType:
    """Loads the device into this process, for good; the same extension module every time.

    Raises BuildError where it cannot be built.
    """
    loaded = extension()
    torch.utils.rename_privateuse1_backend(NAME)
    _register_device_module(NAME, _module(loaded))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=False)
    register_group()
    return loaded


def _module(loaded: ModuleType) -> ModuleType:
    """`torch.second`: what torch asks of the module of an accelerator."""
    generator = loaded.default_generator()
    module = ModuleType(f"torch.{NAME}")

    def synchronize(device: object = None) -> None:
        loaded.synchronize()

    def set_rng_state(state: torch.Tensor, device: object = NAME) -> None:
        generator.set_state(state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    def set_sync_debug_mode(mode: str | int) -> None:
        """As CUDA's: "warn" tells each wait of the host, with the line that asked for it."""
        loaded.listen(None if mode in ("default", 0) else warned)

    def warned(what: str) -> None:
        warnings.warn(f"called a synchronizing operation: {what}", stacklevel=2)

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
        get_sync_debug_mode=lambda: 0,
        set_sync_debug_mode=set_sync_debug_mode,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
    )
    return module


class HostWaits:
    """Waits of the host: `sites` counts by what waited and by the functions that asked for it."""

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
    loaded, found = register(), HostWaits()

    def heard(what: str) -> None:
        found.sites[f"{what}  {asker(sys._getframe().f_back)}"] += 1

    loaded.listen(heard)
    try:
        yield found
    finally:
        loaded.listen(None)

"""The C++ half of the device, as a module of this process."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from types import ModuleType

from ._build import MODULE, library


@lru_cache(maxsize=1)
def extension() -> ModuleType:
    """Builds it where that has not been done, and loads it, once. Raises BuildError where it cannot be built."""
    spec = importlib.util.spec_from_file_location(MODULE, library())
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded

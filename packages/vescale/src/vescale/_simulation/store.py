"""A store in memory, in which a rank that waits for a key hands over its turn."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .turns import Turns


class Store(dist.Store):
    """One rank's end of it; all share `values`."""

    def __init__(self, values: dict[str, bytes], turns: Turns) -> None:
        super().__init__()
        self._values, self._turns = values, turns

    def set(self, key: str, value: Any) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        if key not in self._values and _bytes(expected) == _bytes(desired):  # how one asks without waiting
            self._turns.ask_again(lambda: f"the store for {key}")
        if self._values.get(key, b"") == _bytes(expected):
            self._values[key] = _bytes(desired)
        return self._values.get(key, _bytes(expected))

    def check(self, keys: list[str]) -> bool:
        if not self._has(keys):
            self._turns.ask_again(lambda: f"the store for {', '.join(keys)}")
        return self._has(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._turns.wait_until(lambda: self._has(keys), lambda: f"the store for {', '.join(keys)}")

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def append(self, key: str, value: Any) -> None:
        self._values[key] = self._values.get(key, b"") + _bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nobody waits in vain: who does is told at once."""

    def clone(self) -> Store:
        return self


def _bytes(value: Any) -> bytes:
    """torch's own stores pass on what a program set as text, and what they set themselves as bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)

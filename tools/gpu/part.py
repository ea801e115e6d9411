"""One part of `make gpu`: its device, its time, and its findings, written one by one."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Part:
    """What a part is given.

    Arguments:
        device: "cuda", or "second" in a rehearsal.
        path: of its findings, a JSON object that is written anew with each.
        seconds: that it may take; it starts nothing when they are over.
        most: questions that it may ask; None: all.
    """

    def __init__(self, device: str, path: Path, seconds: float, most: int | None = None) -> None:
        self.device, self._path, self._until, self._left = device, path, time.monotonic() + seconds, most
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    @property
    def ranks(self) -> int:
        """Of worlds of this part: two at least, for one GPU serves several ranks of gloo."""
        return 2

    @property
    def devices(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 1

    def each(self, name: str, ask: Callable[[], Any]) -> None:
        """Notes what `ask` returns, or how it failed; nothing where it is known, or no time is left."""
        if name in self.found:
            return
        if time.monotonic() > self._until or self._left == 0:
            self.found.setdefault("not reached", []).append(name)
        else:
            self._left = None if self._left is None else self._left - 1
            began = time.monotonic()
            try:
                said = ask()
            except Exception as error:  # a finding, too: the other questions are asked all the same
                said = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            self.found[name] = said
            print(f"  {name}: {short(said)}  ({time.monotonic() - began:.1f} s)", flush=True)
        self._path.write_text(json.dumps(self.found, indent=1))


def short(said: Any) -> str:
    text = said if isinstance(said, str) else json.dumps(said)
    return text if len(text) <= 160 else f"{text[:157]}..."


def run(ask: Callable[[Part], None]) -> None:
    """The main function of a part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--most", type=int)
    given = parser.parse_args()
    part = Part(given.device, given.out, given.seconds, given.most)
    part.found.pop("not reached", None)
    if given.device == "second":
        from vescale_testkit.second import register

        register()
        import torch.testing._internal.distributed.fake_pg  # registers the world without processes

        torch.distributed.Backend.backend_capability["fake"].append("second")
    ask(part)

"""Owns a bucket's memory by stream, on an accelerator: autograd adds a gradient on the stream that its parameter was
first used on, which is one for all, unless a loop has streams of its own."""

from __future__ import annotations

import torch
from torch import Tensor


class Streams:
    """Streams that have written to a tensor which the current stream has made."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        is_host = tensor.device.type in ("cpu", "meta")
        self._all = [] if is_host else [torch.accelerator.current_stream(tensor.device)]

    def join(self) -> None:
        """The stream of now writes to it, too."""
        if self._all and (now := torch.accelerator.current_stream(self._tensor.device)) not in self._all:
            now.wait_event(self._all[0].record_event())
            self._tensor.record_stream(now)
            self._all.append(now)

    def take(self) -> Tensor:
        """The tensor, with all that was written to it, for the stream of now."""
        self.join()
        if len(self._all) > 1:
            now = torch.accelerator.current_stream(self._tensor.device)
            for stream in self._all:
                if stream != now:
                    now.wait_event(stream.record_event())
        return self._tensor

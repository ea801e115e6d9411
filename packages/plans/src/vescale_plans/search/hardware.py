"""Hardware profiles: what a device and its links can do, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..plan import PlanError

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """Between devices of one level.

    Arguments:
        latency: seconds per collective and further rank.
        bandwidth: bytes per second, per device and direction.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and how devices are joined.

    Arguments:
        name: of the profile.
        flops: dense matrix multiplications per second that a large one reaches, in the training dtype.
        small: size of a dimension at which a matrix multiplication reaches half of that.
        bandwidth: memory, bytes per second.
        memory: bytes of one device.
        launch: seconds per operator of eager code.
        node: devices joined by `inside`; across nodes by `across`.
        itemsize: bytes of an activation.
    """

    name: str
    flops: float
    small: int
    bandwidth: float
    memory: int
    launch: float
    node: int
    inside: Link
    across: Link
    itemsize: int = 2

    def link(self, stride: int, size: int) -> Link:
        """Of a mesh axis of `size` ranks that lie `stride` ranks apart."""
        return self.inside if stride * size <= self.node else self.across


PROFILES: Mapping[str, Hardware] = MappingProxyType(
    {
        one.name: one
        for one in (
            Hardware("a100", 250e12, 64, 2.0e12, 80 * GIB, 6e-6, 8, Link(8e-6, 230e9), Link(2e-5, 22e9)),
            Hardware("h100", 740e12, 128, 3.35e12, 80 * GIB, 6e-6, 8, Link(8e-6, 370e9), Link(2e-5, 46e9)),
            Hardware("h200", 740e12, 128, 4.3e12, 141 * GIB, 6e-6, 8, Link(8e-6, 370e9), Link(2e-5, 46e9)),
            Hardware("l40s", 180e12, 128, 0.8e12, 48 * GIB, 6e-6, 8, Link(1e-5, 22e9), Link(3e-5, 12e9)),
            Hardware("cpu", 50e9, 16, 8e9, 8 * GIB, 5e-6, 1 << 30, Link(3e-4, 1e9), Link(3e-4, 1e9), 4),
        )
    }
)
"""Start values from data sheets and published measurements; `cpu` is gloo on a small shared machine."""


def hardware_of(name: str | Hardware) -> Hardware:
    """The profile of that name; "auto" is the one whose name the first GPU here carries, "cpu" without a GPU.

    Raises PlanError for a name that no profile has.
    """
    if isinstance(name, Hardware):
        return name
    if name == "auto":
        device = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "cpu"
        name = next((one for one in PROFILES if one in device), device)
    if name not in PROFILES:
        raise PlanError(
            "generate_plan",
            f"no hardware profile is called {name!r}",
            [f"profiles  {', '.join(PROFILES)}"],
            [('hardware="h100"', ""), ("hardware=Hardware(...)", "a profile of your own")],
        )
    return PROFILES[name]

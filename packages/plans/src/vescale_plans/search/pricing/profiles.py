"""Profiles of devices, as data: figures of data sheets, and what of them large operations reach.

`node` is the domain of the fast links: eight GPUs of an HGX board, 72 of an NVL72 rack (18 trays of four), all ranks of
one host on a CPU. Another size is a `dataclasses.replace(hardware_of("h100"), node=6)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ..._plan.parts import PlanError
from .hardware import GIB, Hardware, Link

NVLINK_LATENCY, NETWORK_LATENCY = 8e-6, 2e-5


PCIE_3, PCIE_4, PCIE_5, C2C = (12e9, 15e9), (25e9, 40e9), (50e9, 60e9), (370e9, 200e9)
"""Bandwidth to the host: the link, and a GPU's share of the host's memory. The package's README has the sources."""


def _gpu(name, flops, small, bandwidth, memory, inside, across, peak, wide, host, node=8, segment=0) -> Hardware:
    links, (link, memory_of_host) = (Link(NVLINK_LATENCY, inside), Link(NETWORK_LATENCY, across)), host
    return Hardware(
        name, flops, small, bandwidth, memory * GIB, 6e-6, node, *links, peak=peak, wide=wide, segment=segment,
        host_link=link, host_bandwidth=memory_of_host,
    )  # fmt: skip


PROFILES: Mapping[str, Hardware] = MappingProxyType(
    {
        one.name: one
        for one in (
            _gpu("a100", 250e12, 64, 2.0e12, 80, 230e9, 22e9, 312e12, 18e12, PCIE_4),
            _gpu("h100", 740e12, 128, 3.35e12, 80, 370e9, 46e9, 989e12, 52e12, PCIE_5),
            _gpu("h200", 740e12, 128, 4.3e12, 141, 370e9, 46e9, 989e12, 52e12, PCIE_5),
            # The longer name first: "auto" takes the first that a device's name carries.
            _gpu("gb200", 1870e12, 128, 7.2e12, 186, 740e9, 46e9, 2500e12, 62e12, C2C, 72, 64),
            _gpu("b200", 1690e12, 128, 7.2e12, 180, 740e9, 46e9, 2250e12, 58e12, PCIE_5),
            _gpu("v100", 95e12, 64, 0.8e12, 32, 115e9, 11e9, 125e12, 14e12, PCIE_3),
            Hardware(
                "l40s", 180e12, 128, 0.8e12, 48 * GIB, 6e-6, 8, Link(1e-5, 22e9), Link(3e-5, 12e9), wide=60e12,
                peak=362e12, host_link=PCIE_4[0], host_bandwidth=PCIE_4[1],
            ),
            Hardware("cpu", 50e9, 16, 8e9, 8 * GIB, 5e-6, 1 << 30, Link(3e-4, 1e9), Link(3e-4, 1e9), 4, backend="gloo"),
        )
    }
)  # fmt: skip
"""In bfloat16 (float16 on a V100, which has no other) and, `wide`, in float32 as torch multiplies by default (no TF32);
`cpu` is gloo on a small shared machine, in float32."""


def calibrated_path() -> Path:
    """Returns the path at which `vescale calibrate` leaves this machine's profile, and "auto" looks for it."""
    base = os.environ.get("VESCALE_HARDWARE") or os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    path = Path(base).expanduser()
    return path if path.suffix == ".json" else path / "vescale" / "hardware.json"


def hardware_of(name: str | os.PathLike | Hardware) -> Hardware:
    """The profile of that name, or in that file.

    "auto" is what `vescale calibrate` wrote on this machine; else the profile whose name the first GPU here carries,
    "cpu" without a GPU.

    Raises PlanError for a name that no profile has, and for a file that is none.
    """
    if isinstance(name, Hardware):
        return name
    if name == "auto":
        if calibrated_path().is_file():
            return _read(calibrated_path())
        device = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "cpu"
        name = next((one for one in PROFILES if one in device), device)
    if name in PROFILES:
        return PROFILES[name]
    if isinstance(name, os.PathLike) or str(name).endswith(".json"):
        return _read(Path(name))
    raise PlanError(
        "generate_plan",
        f"no hardware profile is called {name!r}",
        [f"profiles  {', '.join(PROFILES)}"],
        [('hardware="h100"', ""), ('hardware="profile.json"', "that vescale calibrate wrote")],
    )


def _read(path: Path) -> Hardware:
    try:
        return Hardware.from_json(path.read_text())
    except OSError as error:
        remedies = [("vescale calibrate --out FILE", "writes one")]
        rule = f"the profile {path.name} cannot be read: {error.strerror}"
        raise PlanError("hardware", rule, (), remedies) from error

"""Profiles of devices, as data: figures of data sheets, what of them large operations reach, and where each is from.

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
"""Bandwidth to the host: the link, and a GPU's share of the host's memory, see SOURCES."""


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

SOURCES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "a100": {
            "peak, memory": "NVIDIA A100 data sheet, SXM 80 GB",
            "flops": "0.80 of the peak: large products of Megatron's reports (SC21); the most that any shape reached"
            " is 268e12 (ml-engineering's table of achievable products)",
            "bandwidth": "data sheet, 2.04 TB/s",
            "inside": "NVLink 3: 300 GB/s each way, of which NCCL's bus bandwidth is about 230",
            "across": "200 Gb/s a GPU, about 22 GB/s",
            "host_link, host_bandwidth": "PCIe 4 x16: 32 GB/s each way, 25 in copies; two sockets of eight DDR4-3200"
            " for eight GPUs, 0.8 of the share: assumed",
        },
        "h100": {
            "peak, memory, bandwidth": "NVIDIA H100 data sheet, SXM",
            "flops, small": "0.75 of the peak: large products for as long as a training runs. For moments, XLA's"
            " measured table (matmul_interpolator_data.h, sm_90) has 783e12 at 4096 x 4096 x 4096, 632e12 at 2048,"
            " 543e12 with 512 between, 175e12 at 512 x 512 x 4096: these terms give 0.84, 0.80, 0.86 and 1.15 of it",
            "attention": "0.60 of flops, 444e12 of all pairs: between FlashAttention-2 without a mask (torch's own"
            " forward 287e12 to 304e12, pytorch/benchmark, pull request 2296; both directions up to 335e12, arXiv"
            " 2307.08691) and under a causal one, of which it computes half the pairs",
            "inside": "NVLink 4: 450 GB/s each way; about 370 effective, by a maintainer of NCCL",
            "across": "400 Gb/s a GPU, 45 to 48 GB/s",
            "host_link, host_bandwidth": "PCIe 5 x16: 63 GB/s each way, 50 in copies; two sockets of eight DDR5-4800"
            " for eight GPUs, 0.8 of the share: assumed",
        },
        "h200": {
            "peak, memory": "NVIDIA H200 data sheet",
            "bandwidth": "measured copies, 4.3 of the sheet's 4.8 TB/s",
            "flops, inside, across, host_link, host_bandwidth": "as of an H100",
        },
        "b200": {
            "peak, memory": "NVIDIA HGX B200 data sheet, dense, a GPU's share",
            "bandwidth": "0.9 of the sheet's 8 TB/s, an H200's share: assumed, nothing was measured",
            "flops": "0.75 of the peak, an H100's share: assumed",
            "inside": "NVLink 5: 900 GB/s each way, at an H100's share: assumed",
            "across, host_link, host_bandwidth": "400 Gb/s a GPU, PCIe 5, as of an H100",
        },
        "gb200": {
            "peak, memory, node": "NVIDIA GB200 NVL72 data sheet, dense, a 72nd of the rack",
            "segment": "16 trays of four: NVIDIA's advice for jobs of 128 GPUs and more (developer blog, topology-aware"
            " scheduling with Slurm on GB200 NVL72)",
            "flops, bandwidth, inside, across": "as of a B200: assumed, nothing was measured",
            "host_link, host_bandwidth": "NVLink-C2C: 450 GB/s each way, at an H100's share; a Grace's 512 GB/s for two"
            " GPUs, 0.8 of the share: assumed",
        },
        "v100": {
            "peak, memory": "NVIDIA V100 data sheet, SXM2 32 GB, float16",
            "bandwidth": "0.9 of the sheet's 900 GB/s",
            "flops": "0.76 of the peak: assumed",
            "inside": "NVLink 2: 150 GB/s each way, at an A100's share: assumed",
            "across": "100 Gb/s a GPU",
            "host_link, host_bandwidth": "PCIe 3 x16: 16 GB/s each way, 12 in copies; two sockets of four DDR4-2400"
            " for eight GPUs, 0.8 of the share: assumed",
        },
        "l40s": {
            "peak, memory": "NVIDIA L40S data sheet, dense",
            "flops": "half of the peak: assumed, vendors list as much",
            "inside, across": "PCIe 4 x16, 20 to 25 GB/s; a network card for two",
            "host_link, host_bandwidth": "as of an A100: assumed",
        },
        "cpu": {"all": "two shared cores, measured roughly; vescale calibrate knows more"},
    }
)
"""Sources of a profile's figures, and which are assumed."""


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

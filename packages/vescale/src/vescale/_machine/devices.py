"""The device at hand: what it is, how many there are, and how they are linked."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass

import torch

from vescale_plans.search.pricing.profiles import PROFILES


@dataclass(frozen=True)
class Device:
    """A device to calibrate.

    Arguments:
        kind: "cuda" or "cpu".
        name: of the model.
        words: name, memory and links for people.
        memory: bytes of one device.
        count: devices of this machine.
        profile: the start profile that is nearest.
        base: unit of the sizes of matrix products.
        dtype: of training.
    """

    kind: str
    name: str
    words: str
    memory: int
    count: int
    profile: str
    base: int
    dtype: torch.dtype


def device_of(ranks: int) -> Device:
    """The GPUs, where there is one for each of `ranks`; else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < ranks or not count:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name = _cpu_name()
        words = f"{name}, {os.cpu_count()} cores, {memory / 2**30:.0f} GiB"
        return Device("cpu", name, words, memory, 1, "cpu", 256, torch.float32)
    facts = torch.cuda.get_device_properties(0)
    nearest = next((one for one in PROFILES if one in facts.name.lower()), "h100")
    words = ", ".join([facts.name, f"{facts.total_memory / 2**30:.0f} GiB", *_links(count)])
    return Device("cuda", facts.name, words, facts.total_memory, count, nearest, 1024, torch.bfloat16)


def busy_seconds() -> float:
    """Core seconds that all processes of the machine have worked so far; this one's own where the system does not say.

    Without interrupts: what sockets of one machine send each other is counted there, and belongs to whoever sends.
    """
    try:
        with open("/proc/stat") as lines:
            user, nice, system = (int(one) for one in next(lines).split()[1:4])
    except OSError:
        return own_seconds()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Core seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _links(count: int) -> list[str]:
    """NVLinks and PCIe of the first GPU, as the driver says; nothing if its library is not installed."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, or no driver that it can speak to
        return []
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        active = 0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                active += pynvml.nvmlDeviceGetNvLinkState(handle, link) == 1
            except pynvml.NVMLError:
                break
        words = [f"{count} GPUs", f"{active} NVLinks" if active else "no NVLink"]
        try:
            generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
            words.append(f"PCIe {generation} x{pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)}")
        except pynvml.NVMLError:
            pass
        return words
    finally:
        pynvml.nvmlShutdown()

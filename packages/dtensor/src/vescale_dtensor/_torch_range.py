"""The range of torch's releases that veScale is written for, and the warning where the installed one lies outside."""

import warnings

import torch

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The first and the last release, (major, minor). CI runs the suites on 2.13."""


def torch_release(version: str) -> tuple[int, int]:
    """(major, minor) of "2.13.0+cpu" or "2.16.0a0+git1234567"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_supported_torch(version: str) -> bool:
    return OLDEST_TORCH <= torch_release(version) <= NEWEST_TORCH


def supported_torch() -> str:
    """The range in words: "2.11 to 2.15"."""
    return " to ".join(f"{major}.{minor}" for major, minor in (OLDEST_TORCH, NEWEST_TORCH))


def warn_if_unsupported() -> None:
    """A UserWarning for a torch outside the range; called where the package is imported, which is once per process."""
    if not is_supported_torch(torch.__version__):
        warnings.warn(
            f"veScale supports torch {supported_torch()}, and this is {torch.__version__}: it uses private parts of "
            f'torch, which other releases may change. pip install "torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]},'
            f'<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}" installs one of these',
            UserWarning,
            stacklevel=3,
        )

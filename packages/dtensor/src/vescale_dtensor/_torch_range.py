"""The range of torch's releases that veScale is tested with, and the warning where the installed one lies outside."""

import warnings

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last release, (major, minor), that the suites are run on."""


def release(version: str) -> tuple[int, int]:
    """(major, minor) of "2.13.0+cpu" or "2.16.0a0+git1234567"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_tested(version: str) -> bool:
    return OLDEST <= release(version) <= NEWEST


def tested() -> str:
    """The range in words: "2.11 to 2.15"."""
    return " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))


def warn_if_untested() -> None:
    """A UserWarning for a torch outside the range; called where the package is imported, which is once per process."""
    if not is_tested(torch.__version__):
        warnings.warn(
            f"veScale is tested with torch {tested()}, and this is {torch.__version__}: it uses private parts of torch "
            "that other releases may change. `vescale doctor` says more; tools/torch_private.py says which are gone",
            UserWarning,
            stacklevel=3,
        )

"""A torch outside the supported range is warned about, once, where the package is imported; one inside never."""

import re
import subprocess
import sys

import pytest
import torch

from vescale_dtensor import _torch_range
from vescale_dtensor._torch_range import NEWEST_TORCH, OLDEST_TORCH, is_supported_torch


@pytest.mark.parametrize(
    "version, inside",
    [
        ("2.10.2", False), ("2.9.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.15.3", True),
        ("2.16.0", False), ("2.16.0a0+git1234567", False), ("3.0.0", False),
    ],
)  # fmt: skip
def test_range(version, inside):
    assert is_supported_torch(version) is inside


def test_the_torch_of_the_suite_is_in_the_range():
    assert is_supported_torch(torch.__version__)
    (major, oldest), (last, newest) = OLDEST_TORCH, NEWEST_TORCH
    assert _torch_range.supported_torch() == f"{major}.{oldest} to {last}.{newest}"


def test_outside_the_range_the_warning_names_both(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    text = f"supports torch {_torch_range.supported_torch()}, and this is 2.99.0+cpu"
    with pytest.warns(UserWarning, match=re.escape(text)):
        _torch_range.warn_if_unsupported()


@pytest.mark.parametrize("version, count", [("2.99.0", 1), (None, 0)])
def test_importing_warns_once(version, count):
    program = (
        "import warnings, torch\n"
        f"torch.__version__ = {version!r} or torch.__version__\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    import vescale_dtensor, vescale_dtensor.extend, vescale_testkit\n"
        "    import vescale_dtensor\n"
        "print(sum('veScale supports torch' in str(one.message) for one in told))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == count

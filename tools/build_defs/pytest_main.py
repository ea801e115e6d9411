"""Runs the files of one pytest_test target: the launcher that Bazel writes calls this, and tools/run_tests.py
does where there is no Bazel, so that both run the same thing.

    python3 -P pytest_main.py --roots packages/dtensor/src:packages/plans/src -- packages/plans/tests/values

What Bazel asks of a test through the environment is honoured: XML_OUTPUT_FILE, TESTBRIDGE_TEST_ONLY (--test_filter)
and TEST_TMPDIR. The working directory is the workspace.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path


def use_only(roots: list[str]) -> None:
    """Let imports of this repository come from `roots` alone, here and in child processes.

    The virtual environment holds every package editable, as entries of sys.path, and these would satisfy an import
    that the target does not declare.
    """
    absolute = [str(Path(root).absolute()) for root in roots]
    third_party = [entry for entry in sys.path if not Path(entry).match("packages/*/src")]
    sys.path[:] = absolute + third_party
    os.environ["PYTHONPATH"] = os.pathsep.join(absolute)


def isolate() -> None:
    """Keep tests away from the user's home, and from each other's cores."""
    scratch = os.environ.get("TEST_TMPDIR") or tempfile.mkdtemp(prefix="vescale-test-")
    os.environ["HOME"] = scratch
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(scratch, "hypothesis"))
    os.environ["OMP_NUM_THREADS"] = "1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roots", default="", help="source roots, separated by ':'")
    parser.add_argument("arguments", nargs="+", help="test files, and options for pytest")
    options = parser.parse_args()

    use_only([root for root in options.roots.split(":") if root])
    isolate()
    # Imported only now: what it loads must already see the path and the environment set above.
    import pytest

    arguments = ["-c", "pyproject.toml", "--import-mode=importlib", "-p", "no:cacheprovider", *options.arguments]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments.append(f"--junitxml={report}")
    only = os.environ.get("TESTBRIDGE_TEST_ONLY")
    if only:
        arguments += ["-k", only]
    status = pytest.main(arguments)
    filtered_away = only is not None and status == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if filtered_away else int(status)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the files of one pytest_test target: the launcher that Bazel writes calls this, and tools/run_tests.py
does where there is no Bazel, so that both run the same thing.

    python3 -P pytest_main.py --roots packages/dtensor/src:packages/plans/src -- packages/plans/tests/values

What Bazel asks of a test through the environment is honoured: XML_OUTPUT_FILE, TESTBRIDGE_TEST_ONLY (--test_filter)
and TEST_TMPDIR. The working directory is the workspace.

The core runs: all but what a package names in tests/beyond_the_core.txt (tools/power/core.py chooses). Where
VESCALE_GRID says what runs, and under plain pytest, nothing is left out.
"""

import argparse
import gc
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


class Core:
    """The pytest plugin that leaves out the tests of these node ids; one that no test of its file has is an error."""

    def __init__(self, beyond: set[str]) -> None:
        self.beyond = beyond

    def pytest_collection_finish(self) -> None:
        gc.enable()
        gc.freeze()  # no collection walks what imports left

    def pytest_collection_modifyitems(self, config, items) -> None:
        import pytest

        found = {item.nodeid for item in items}
        files = {name.partition("::")[0] for name in found}
        gone = sorted(name for name in self.beyond - found if name.partition("::")[0] in files)
        if gone and config.option.keyword == "":
            raise pytest.UsageError(f"beyond_the_core.txt names tests that are not there: {', '.join(gone)}")
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.beyond])
        items[:] = [item for item in items if item.nodeid not in self.beyond]


def beyond_the_core() -> set[str]:
    """The tests that are left out, by node id."""
    lists = Path().glob("packages/*/tests/beyond_the_core.txt")
    lines = [line for one in lists for line in one.read_text().splitlines()]
    return set() if os.environ.get("VESCALE_GRID") else {line for line in lines if line and line[0] != "#"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roots", default="", help="source roots, separated by ':'")
    parser.add_argument("arguments", nargs="+", help="test files, and options for pytest")
    options = parser.parse_args()

    use_only([root for root in options.roots.split(":") if root])
    isolate()
    gc.disable()
    # Imported only now: what it loads must already see the path and the environment set above.
    import pytest

    arguments = ["-c", "pyproject.toml", "--import-mode=importlib", "-p", "no:cacheprovider", *options.arguments]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        arguments.append(f"--junitxml={report}")
    only = os.environ.get("TESTBRIDGE_TEST_ONLY")
    if only:
        arguments += ["-k", only]
    status = pytest.main(arguments, plugins=[Core(beyond_the_core())])
    filtered_away = only is not None and status == pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if filtered_away else int(status)


if __name__ == "__main__":
    sys.exit(main())

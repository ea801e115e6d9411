"""Runs every test target and closes with the line `N passed, N failed`: what `make test` is.

The core of each target runs; with --all every test with its grids in full (hours; what passed is not run again where
Bazel has it in its cache, so that a run that was stopped goes on), and then `make verify`: what `make test-all` is.

With Bazel, `bazel test //...`; Bazel is installed from Debian's packages where it is missing and can be. Without it,
the same targets one after the other under pytest. Either way the counts are of test cases, read from the JUnit report
of each target, and a target that left no report counts as one failure. The whole run is bounded by DEADLINE_S.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse
from xml.etree import ElementTree

from checks.build_graph import BuildGraph, Target, read_build_graph

TOP = Path(__file__).absolute().parents[1]
DEADLINE_S, ALL_S = 80 * 60, 24 * 60 * 60
ALL_OF_A_TARGET_S = 4 * 60 * 60
INSTALL_S = 240
BUILD_S = 600
START_S = 120  # for Bazel's server to come up
BAZEL_RAN = {0, 3}  # all passed; some failed


@dataclass(frozen=True)
class Outcome:
    """What one target's test cases came to."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


NO_REPORT = Outcome(failed=1)


def read_report(report: Path, *, target_passed: bool) -> Outcome:
    """Count the cases of a JUnit report; a target that failed counts as at least one failure."""
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return Outcome() if target_passed else NO_REPORT
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    if not target_passed:
        failed = max(failed, 1)
    return Outcome(max(len(cases) - failed - skipped, 0), failed, skipped)


def environment() -> dict[str, str]:
    """This environment with the virtual environment's programs first, and a home, which Bazel needs."""
    own_bin = str(Path(sys.executable).parent)
    return {
        "HOME": str(Path.home()),
        **os.environ,
        "PATH": os.pathsep.join([own_bin, os.environ.get("PATH", os.defpath)]),
    }


def find_bazel() -> str | None:
    """Bazel, installed first where it is missing and apt-get may be used."""
    if (bazel := shutil.which("bazel")) or os.geteuid() != 0 or not shutil.which("apt-get"):
        return bazel
    print("test: installing Bazel from Debian's packages", flush=True)
    quiet_install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "bazel-bootstrap"]
    started = time.monotonic()
    for command in (["apt-get", "update", "-q"], quiet_install):
        try:
            subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=max(INSTALL_S - (time.monotonic() - started), 1),
            )
        except (OSError, subprocess.SubprocessError) as error:
            print(f"test: Bazel was not installed ({type(error).__name__} in {' '.join(command[:2])})")
            break
    return shutil.which("bazel")


def build_second_device() -> None:
    """Compiles the device that tests of GPU behaviour run on, with a compiler installed first where it is missing.

    What goes wrong here is told by the tests that need it, in a sentence.
    """
    may_install = os.geteuid() == 0 and shutil.which("apt-get")
    if may_install and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        print("test: installing a C++ compiler from Debian's packages", flush=True)
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", "g++"],
        ):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command,
                    env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=INSTALL_S,
                )
    build = "from vescale_testkit.second import library; library()"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([sys.executable, "-c", build], stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_S)


def starts(bazel: str) -> bool:
    """Whether Bazel's server comes up at all: it may be of a version that wants a network, or have no memory."""
    try:
        probe = subprocess.run(
            [bazel, "info", "release"],
            cwd=TOP,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_S,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"test: Bazel does not start ({type(error).__name__})")
        return False
    if probe.returncode != 0:
        print(f"test: Bazel does not start:\n{probe.stderr.strip()}")
    return probe.returncode == 0


def run_bazel(bazel: str, tests: Iterable[Target], seconds: float) -> Outcome:
    """`bazel test //...`; Bazel prints the progress, and the log of each target that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        events = Path(scratch, "events.json")
        # A test's home is a folder of its own, in which each target would compile the second device anew.
        built = f"--test_env=VESCALE_CACHE={Path(environment()['HOME'], '.cache')}"
        command = [bazel, "test", "//...", built, f"--build_event_json_file={events}"]
        if os.environ.get("VESCALE_GRID") == "full":
            command.append(f"--test_timeout={ALL_OF_A_TARGET_S}")
        client = subprocess.Popen(command, cwd=TOP, env=environment(), stdin=subprocess.DEVNULL)
        try:
            status = client.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            print(f"test: stopping Bazel after {seconds:.0f} s", flush=True)
            status = interrupt(client)
        outcomes = read_events(events)
    missing = [test.label for test in tests if test.label not in outcomes]
    for label in missing:
        print(f"test: {label} did not run")
    total = sum([*outcomes.values(), *[NO_REPORT] * len(missing)], Outcome())
    if status not in BAZEL_RAN and total.failed == 0:
        print(f"test: Bazel failed with exit status {status}")
        total += NO_REPORT
    return total


def interrupt(client: subprocess.Popen[bytes]) -> int:
    """Ask Bazel to stop its tests and their processes; end the client if it does not."""
    client.send_signal(signal.SIGINT)
    try:
        return client.wait(timeout=60)
    except subprocess.TimeoutExpired:
        client.kill()
        return client.wait()


def read_events(events: Path) -> dict[str, Outcome]:
    """The outcome of each target that Bazel ran or had cached, from its stream of events."""
    outcomes: dict[str, Outcome] = {}
    for line in events.read_text().splitlines() if events.exists() else ():
        event = json.loads(line)
        result = event.get("testResult")
        if result is None:
            continue
        outputs = {output["name"]: output["uri"] for output in result.get("testActionOutput", ()) if "uri" in output}
        report = Path(unquote(urlparse(outputs.get("test.xml", "")).path))
        outcomes[event["id"]["testResult"]["label"]] = read_report(report, target_passed=result["status"] == "PASSED")
    return outcomes


def run_pytest(graph: BuildGraph, seconds: float) -> Outcome:
    """Every target in its own pytest, one after the other, as python.bzl's launcher would run it."""
    deadline = time.monotonic() + seconds
    limit = ALL_OF_A_TARGET_S if os.environ.get("VESCALE_GRID") == "full" else None
    total = Outcome()
    for test in graph.tests():
        started = time.monotonic()
        outcome, log = run_target(graph, test, min(limit or test.timeout_s, deadline - started))
        print(f"{test.label:<44} {'FAILED' if outcome.failed else 'PASSED'} in {time.monotonic() - started:.1f}s")
        if outcome.failed:
            print(log)
        sys.stdout.flush()
        total += outcome
    return total


def run_target(graph: BuildGraph, test: Target, seconds: float) -> tuple[Outcome, str]:
    """One target's outcome and output; its processes, ranks included, are gone when it returns."""
    with tempfile.TemporaryDirectory(prefix="vescale-test-") as scratch:
        report, log = Path(scratch, "test.xml"), Path(scratch, "test.log")
        command = [sys.executable, "-P", "tools/build_defs/pytest_main.py", "--roots", ":".join(graph.roots(test))]
        command += ["--", *test.attributes.get("arguments", ()), *test.sources]
        with log.open("w") as output:
            session = subprocess.Popen(
                command,
                cwd=TOP,
                env={**environment(), "XML_OUTPUT_FILE": str(report), "TEST_TMPDIR": scratch},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = session.wait(timeout=max(seconds, 0))
            except subprocess.TimeoutExpired:
                status = -1
                output.write(f"\n{test.label} was stopped after {seconds:.0f} s\n")
            finally:
                kill_group(session)
        return read_report(report, target_passed=status == 0), log.read_text(errors="replace")


def kill_group(leader: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-bazel", action="store_true", help="run the targets under pytest in any case")
    parser.add_argument("--all", action="store_true", help="every test, grids in full, and then make verify")
    options = parser.parse_args()

    started = time.monotonic()
    seconds = ALL_S if options.all else DEADLINE_S
    if options.all:
        os.environ["VESCALE_GRID"] = "full"
    graph = read_build_graph(TOP)
    build_second_device()
    bazel = None if options.without_bazel else find_bazel()
    if bazel and starts(bazel):
        total = run_bazel(bazel, graph.tests(), seconds - (time.monotonic() - started))
    else:
        print("test: without Bazel, every target under pytest", flush=True)
        total = run_pytest(graph, seconds - (time.monotonic() - started))

    print(f"test: {time.monotonic() - started:.0f} s, {total.skipped} skipped", flush=True)
    print(f"{total.passed} passed, {total.failed} failed", flush=True)
    verified = subprocess.run([sys.executable, "tools/verify.py"], cwd=TOP).returncode if options.all else 0
    return 1 if total.failed or verified else 0


if __name__ == "__main__":
    sys.exit(main())

"""A pytest session that collects once, and then runs tests in forks of its process, as `__main__.py` asks.

A fork starts from what collection left, so that no cache of one mutant reaches the next. The fork server of the ranks
is shared by all of them, one after the other; what they left of ranks is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from vescale_testkit import worker_pool

from .board import Board

_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST_S, _TIMES = 20, 20
"""A test hangs after so many seconds, and so many times of what it took without a mutant."""
_START_S = 60


class Hung(BaseException):
    """Raised in a test at its limit."""


class Session:
    """The plugin. `work` gets this session when pytest has collected."""

    def __init__(self, work: Callable[[Session], None], board: Board) -> None:
        self._work, self.board = work, board
        self.items: dict[str, pytest.Item] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def run(
        self, tests: Sequence[str], out: Path, limits: Sequence[float], goes_on: Callable[[list[dict]], bool]
    ) -> list[dict[str, Any]]:
        """Runs tests in a fork until `goes_on` says no; returns a row per test, as far as the fork came.

        Arguments:
            out: a file of the rows' own.
            limits: seconds that each of the tests may take.
        """
        out.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                self._in_fork(tests, out, limits, goes_on)
            os._exit(0)
        self._wait(child, _START_S + sum(limits), out, max(limits, default=0))
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def _wait(self, child: int, seconds: float, out: Path, longest: float) -> None:
        """Until the fork has ended; kills it if it writes nothing for longer than a test may take, and its ranks."""
        ends = time.monotonic() + seconds
        written, since = 0, time.monotonic()
        while not os.waitpid(child, os.WNOHANG)[0]:
            size = out.stat().st_size if out.exists() else 0
            if size != written:
                written, since = size, time.monotonic()
            if time.monotonic() > ends or time.monotonic() > since + longest + _START_S:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)
        server = worker_pool.pool.server()
        for pid in _children(server._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _in_fork(
        self, tests: Sequence[str], out: Path, limits: Sequence[float], goes_on: Callable[[list[dict]], bool]
    ) -> None:
        worker_pool.pool._owner = os.getpid()
        worker_pool.ForkServer.is_running = property(lambda server: True)  # poll() knows only its own children
        signal.signal(signal.SIGALRM, _hung)
        rows: list[dict[str, Any]] = []
        with out.open("a") as file, open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            following = [*(self.items[test] for test in tests[1:]), None]
            for test, limit, after in zip(tests, limits, following):
                self.board.forget()
                signal.alarm(int(limit) + 1)
                before, began = _processor_seconds(), time.monotonic()
                try:
                    reports = runtestprotocol(self.items[test], nextitem=after, log=False)  # whose fixtures stay
                    outcome = _outcome(reports)
                except Hung:
                    outcome = "hung"
                signal.alarm(0)
                if time.monotonic() - began > limit:
                    outcome = "hung"
                rows.append(
                    {
                        "test": test,
                        "outcome": outcome,
                        "cpu": round(_processor_seconds() - before, 3),
                        "wall": round(time.monotonic() - began, 3),
                        "reached": self.board.reached(),
                    }
                )
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                if outcome == "hung" or not goes_on(rows):
                    break
        for world in worker_pool.pool._worlds.values():
            if world.is_open:
                world.close(kill=True)


def limit_of(wall: float) -> float:
    """Returns the seconds after which a test hangs that takes so long."""
    return _LEAST_S + _TIMES * wall


def _hung(*_: Any) -> None:
    raise Hung


def _outcome(reports: Sequence[pytest.TestReport]) -> str:
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped for report in reports) else "passed"


def _processor_seconds() -> float:
    """That this session's processes have used, with those that they have waited for."""
    return sum(sum(map(int, fields[11:15])) for _, fields in _processes() if int(fields[3]) == os.getsid(0)) / _TICKS


def _children(parent: int) -> list[int]:
    return [pid for pid, fields in _processes() if int(fields[1]) == parent]


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yields process ids, and the fields of their `stat` from the state on."""
    for one in os.listdir("/proc"):
        if one.isdigit():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{one}/stat").read_text()
                yield int(one), text[text.rindex(")") + 2 :].split()

"""The per-commit history, the gate and the dashboard, on a repository of five commits of which one is slowed."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

TOP = Path(__file__).absolute().parents[2]
SCRIPTS = TOP / "benchmarks"

SUITE = '''
"""A suite of one figure."""
import toy


class Toy:
    params = (["small", "large"],)

    def track_steps(self, size):
        return toy.steps(size)

    track_steps.unit = "x"


def track_other():
    return 7
'''
CONFIG = """
{"version": 1, "project": "toy", "repo": "..", "branches": ["main"], "dvcs": "git", "environment_type": "existing",
 "benchmark_dir": "benchmarks", "env_dir": ".asv/env", "results_dir": ".asv/results", "html_dir": ".asv/site/asv"}
"""
HEADLINES = """
[[headline]]
benchmark = "bench_toy.Toy.track_steps"
parameters = ["small"]
title = "steps <small>"
budget = 1.5

[[headline]]
benchmark = "bench_toy.Toy.track_steps"
parameters = ["large"]
title = "steps, large"
"""


def run(command, folder, home, status=0):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "GIT_DIR")}
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, **names, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Five commits, measured; the fourth is slowed for one of the two sizes, and the fifth is no better."""
    home = tmp_path_factory.mktemp("home")
    top = tmp_path_factory.mktemp("toy")
    source = top / "packages/toy/src/toy.py"
    suite = top / "benchmarks/benchmarks"
    source.parent.mkdir(parents=True)
    suite.mkdir(parents=True)
    (suite / "__init__.py").write_text("")
    (suite / "bench_toy.py").write_text(SUITE)
    (top / "benchmarks/asv.conf.json").write_text(CONFIG)
    (top / "benchmarks/headlines.toml").write_text(HEADLINES)
    (top / ".gitignore").write_text(".asv\n__pycache__\n")
    run(["git", "init", "-q", "-b", "main"], top, home)
    for name, factor in (("first", 1.0), ("second", 1.01), ("third", 1.02), ("slowed", 1.4), ("still slow", 1.41)):
        source.write_text(f'def steps(size):\n    return 1.2 if size == "small" else 10 * {factor}\n')
        run(["git", "add", "."], top, home)
        run(["git", "commit", "-q", "-m", name], top, home)
    return top, home


def script(repository, name, *words, status=0):
    top, home = repository
    command = [sys.executable, SCRIPTS / f"{name}.py", *words, "--config", top / "benchmarks/asv.conf.json"]
    return run([str(part) for part in command], top, home, status)


@pytest.fixture(scope="module")
def measured(repository):
    assert "0 measured before" in script(repository, "history", "5")
    return repository


def test_nothing_measured_is_not_a_pass(repository):
    top, home = repository
    (top / "benchmarks/empty.conf.json").write_text(CONFIG.replace(".asv/results", ".asv/elsewhere"))
    for name, words in (("gate", "no headline was measured"), ("dashboard", "nothing was measured yet")):
        command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--config", str(top / "benchmarks/empty.conf.json")]
        assert words in run(command, top, home, 2)


def test_the_gate_is_red_for_the_slowed_commit_and_those_after_it(measured):
    said = script(measured, "gate", status=1)
    assert "FAIL" in said and "steps, large: regressed at" in said and "from 14.000 to 14.100" in said
    assert "ok      1.200  steps <small>" in said
    assert "gate: 1 of 2 headlines fail" in said
    assert "not measured" not in said


def test_a_headline_that_was_not_measured_is_told(measured):
    top, home = measured
    (top / "benchmarks/more").mkdir()
    (top / "benchmarks/more/asv.conf.json").write_text(CONFIG.replace('".asv/results', '"../.asv/results'))
    extra = '[[headline]]\nbenchmark = "bench_toy.track_other"\nparameters = []\ntitle = "other"\n'
    (top / "benchmarks/more/headlines.toml").write_text(HEADLINES + extra)
    command = [sys.executable, str(SCRIPTS / "gate.py"), "--config", str(top / "benchmarks/more/asv.conf.json")]
    assert "1 of 2 headlines fail; 1 were not measured" in run(command, top, home, 1)


def test_a_measured_commit_is_not_measured_again(measured):
    assert "5 measured before" in script(measured, "history", "5")
    assert list((measured[0] / ".git/worktrees").glob("*")) == []


@pytest.mark.parametrize("cause", ["hooks: design, section 2", ""])
def test_a_headline_over_its_budget_says_why(measured, cause):
    top, home = measured
    (top / "benchmarks/over").mkdir(exist_ok=True)
    (top / "benchmarks/over/asv.conf.json").write_text(CONFIG.replace('".asv/results', '"../.asv/results'))
    known = f'budget = 1.1\ncause = "{cause}"' if cause else "budget = 1.1"
    (top / "benchmarks/over/headlines.toml").write_text(HEADLINES.replace("budget = 1.5", known))
    command = [sys.executable, str(SCRIPTS / "gate.py"), "--config", str(top / "benchmarks/over/asv.conf.json")]
    said = run(command, top, home, 1)
    assert "over its budget of 1.10" + (f" ({cause})" if cause else ", of unknown cause") in said


def test_more_tokens_per_second_are_no_regression(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from figures import Figure, Point

    def steps(name, *values):
        return Figure(name, (), "here", tuple(Point(str(i), value, "") for i, value in enumerate(values))).regressions

    assert steps("bench.track_tokens_per_second", 100, 140, 99) == (2,)
    assert steps("bench.track_ratio", 1.0, 1.4, 0.7) == (1,)


def test_headlines_alone_are_measured_unless_all_are_asked_for(measured):
    top, _ = measured
    found = [json.loads(path.read_text())["results"] for path in (top / "benchmarks/.asv/results").glob("*/*-*.json")]
    assert len(found) == 5 and all(set(results) == {"bench_toy.Toy.track_steps"} for results in found)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.scripts, self.text, self.titles, self.tag = [], 0, [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tag = tag
        self.scripts += tag == "script"
        self.links += [value for key, value in attributes if key in ("href", "src") and not value.startswith("data:")]

    def handle_data(self, data):
        (self.titles if self.tag == "title" else self.text).append(data)
        self.tag = ""


def test_the_dashboard_shows_the_regression(measured, tmp_path):
    record = {"commit": "c" * 40, "torch": "2.13.0", "machine": "x86_64"}
    check = {"point": "1.1", "title": "a check", "holds": True, "figures": {"ratio": 0.5}}
    (tmp_path / "2026.json").write_text(json.dumps({**record, "checks": [check]}))
    peers = {
        "sharded, hidden 512": {
            "FSDP2": {"ms": 31.5},
            "ours, auto": {"wall": 0.72, "ms": 22.7, "tokens per second": 45123, "peak bytes per rank": 1234567},
        }
    }
    run_of_peers = {**check, "title": "peers", "command": "python benchmarks/peers.py", "figures": peers}
    (tmp_path / "2027.json").write_text(json.dumps({**record, "checks": [run_of_peers]}))
    parts = {"training": {"gpt": {"holds": True}, "more": [{"holds": False}]}}
    gpu = {"device": "one H100", "date": "2026-01-02T03:04", "commit": "d" * 7, "parts": parts}
    (tmp_path / "gpu.json").write_text(json.dumps(gpu))
    # Not of make verify:
    (tmp_path / "figures.json").write_text(json.dumps({"checks": [{"point": "4.3", "unmet": []}]}))
    script(measured, "dashboard", "--results", tmp_path)
    site = measured[0] / "benchmarks/.asv/site"
    page = Links()
    page.feed((site / "index.html").read_text())
    text = " ".join(page.text)
    assert page.scripts == 0
    assert page.links == ["asv/index.html"] and all((site / link).exists() for link in page.links)
    assert "1 of 2 headlines fail" in text and "5 commits" in text
    assert text.count("slowed") == 1 and "10.200 to 14.000" in text
    assert any(re.fullmatch(r"\w{10} slowed: 14", title) for title in page.titles)
    assert "1,234,567 bytes" in text
    assert "45123" in text and "31.5" in text and "0.72" in text
    assert "On devices" in text and "1 of 2" in text and "one H100" in text and "2026-01-02" in text
    assert "Python" in text and "torch" in text  # with what it was measured
    assert "steps <small>" in text and "a check" in text and '{"ratio": 0.5}' in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@pytest.fixture
def served(measured, tmp_path):
    """The dashboard's address on this machine, as any web server would give it."""
    script(measured, "dashboard", "--results", tmp_path)
    handler = partial(Quiet, directory=str(measured[0] / "benchmarks/.asv/site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(BROWSER is None, reason="no browser: neither chromium nor google-chrome is on the PATH")
def test_a_browser_shows_it(served, tmp_path):
    """It renders, its links lead somewhere, and no script fails. (ASV's own pages load scripts from the network.)"""
    picture = tmp_path / "page.png"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--disable-crash-reporter",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--window-size=1200,900",
        "--virtual-time-budget=10000", f"--screenshot={picture}", "--dump-dom", f"{served}/index.html",
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path)}
    shown = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0, shown.stderr
    errors = re.findall(r".*CONSOLE.*(?:Uncaught|Error|Failed to load).*", shown.stderr)
    assert errors == []
    assert picture.stat().st_size > 5000
    dom = Links()
    dom.feed(shown.stdout)
    assert "1 of 2 headlines fail" in shown.stdout and "steps &lt;small&gt;" in shown.stdout
    assert dom.links and dom.scripts == 0
    for link in dom.links:
        assert urllib.request.urlopen(f"{served}/{link}", timeout=10).status == 200, link

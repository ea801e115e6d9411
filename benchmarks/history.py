"""Measures commits: each in a worktree of its own, all with the suite of this checkout and in one environment.

    make bench-history N=20            the last N commits that have no results yet: the headline benchmarks
    make bench-history N=5 ALL=1       every benchmark
    python benchmarks/history.py 5 --bench Dispatch --again

An environment per commit with torch in it is impractical, so a commit is measured by putting the source roots of its
worktree (packages/*/src) before everything else on the path. A benchmark that a commit cannot run has no point there.
The headlines of a commit take about 3 minutes of one core. TorchTitan, of whose host time headlines speak, and whose
tokens per second stand beside ours, wants an environment of its own: it is made once, and with it a commit takes twice
as long. Where it cannot be made (no network) its figures have no points, and that is said.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asv.results import get_existing_hashes
from rich.console import Console
from rich.progress import Progress

from figures import commits_of, read_config, read_headlines

CONFIG = Path(__file__).absolute().with_name("asv.conf.json")
COMMIT_S = 20 * 60
SIDE_BY_SIDE = CONFIG.parent / "torchtitan/side_by_side.py"
TOKENS = "bench_torchtitan.Throughput.track_tokens_per_second"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, help="how many commits, the newest ones")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--bench", default="", help="the benchmarks that match this regular expression")
    chosen.add_argument("--all", action="store_true", help="every benchmark, not the headlines' alone")
    parser.add_argument("--again", action="store_true", help="also commits that have results")
    parser.add_argument("--config", type=Path, default=CONFIG, help="another suite's asv.conf.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worktree goes too
    config = arguments.config.absolute()
    settings = read_config(config)
    headlines = sorted({row.benchmark for row in read_headlines(config)[0]})
    if any(name.startswith("bench_torchtitan.") for name in headlines) and has_torchtitan():
        headlines.append(TOKENS)
    bench = arguments.bench or ("" if arguments.all else f"^({'|'.join(map(re.escape, headlines))})")
    measured = set() if arguments.again else set(get_existing_hashes(settings.results_dir))
    wanted = commits_of(settings.repo, arguments.count)
    waiting = [commit for commit in wanted if commit not in measured]
    console = Console(stderr=True)
    console.print(f"{len(wanted)} commits, {len(wanted) - len(waiting)} measured before")
    failed = []
    with Progress(console=console) as progress:
        for commit in progress.track(waiting, description="measuring"):
            progress.console.print(f"  {subject(settings.repo, commit)}")
            began = time.monotonic()
            if not measure(config, settings.repo, commit, bench):
                failed.append(commit)
            progress.console.print(f"    {time.monotonic() - began:.0f} s")
    for commit in failed:
        console.print(f"[red]not every benchmark ran at {commit[:10]}[/red]; asv's words are above")
    return int(len(failed) == len(waiting) > 0)


def has_torchtitan() -> bool:
    """Whether TorchTitan's environment is there, or could be made."""
    if os.environ.get("TORCHTITAN_PYTHON") or (CONFIG.parents[1] / ".venv-torchtitan/bin/torchrun").exists():
        return True
    setup = [sys.executable, str(SIDE_BY_SIDE), "setup"]
    made = subprocess.run(setup, capture_output=True, text=True, timeout=COMMIT_S)
    if made.returncode:
        print("TorchTitan's environment could not be made, so that its figures have no points", file=sys.stderr)
    return made.returncode == 0


def measure(config: Path, repository: str, commit: str, bench: str) -> bool:
    """Runs the suite on one commit; False when asv says that something failed."""
    with tempfile.TemporaryDirectory(prefix="vescale-commit-") as folder:
        tree = Path(folder) / "tree"
        git(repository, "worktree", "add", "--detach", "--force", str(tree), commit)
        try:
            roots = [str(root) for root in sorted(tree.glob("packages/*/src"))]
            command = asv(config, "run", "-E", f"existing:{sys.executable}", "--set-commit-hash", commit)
            command += ["--bench", bench] if bench else []
            done = subprocess.run(
                command,
                cwd=config.parent,
                env={**os.environ, "ASV_PYTHONPATH": os.pathsep.join(roots)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMMIT_S,
                text=True,
            )
        finally:
            git(repository, "worktree", "remove", "--force", str(tree))
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-15:]), file=sys.stderr)
    return done.returncode == 0


def asv(config: Path, *words: str) -> list[str]:
    """A call of asv; the machine's description is made the first time."""
    base = [sys.executable, "-m", "asv"]
    if not (Path.home() / ".asv-machine.json").exists():
        subprocess.run([*base, "machine", "--yes", "--config", str(config)], check=True, capture_output=True)
    return [*base, *words, "--config", str(config)]


def subject(repository: str, commit: str) -> str:
    return git(repository, "log", "-1", "--format=%h %s", commit).strip()


def git(repository: str, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=repository, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout


if __name__ == "__main__":
    sys.exit(main())

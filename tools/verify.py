"""Runs what the issues list under "What it must show", in full, and writes what came out: `make verify`.

CHECKS is the register. A check is a command; it holds if its exit status is 0, and if its last line is JSON, that is
kept as its figures. Each run writes results/<date>-<commit>.json, small enough to commit, which closing notes cite.

    make verify                 everything
    make verify ONLY=2.6        one point; ONLY=2 is an issue, ONLY="2.4 2.6" several
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TOP = Path(__file__).absolute().parents[1]
RESULTS = TOP / "results"
PYTHON = sys.executable
MINUTES = 60


@dataclass(frozen=True)
class Check:
    """One thing that point `point` of issue `issue` must show."""

    issue: int
    point: int
    title: str
    command: Sequence[str]
    timeout_s: float = 10 * MINUTES

    @property
    def key(self) -> str:
        return f"{self.issue}.{self.point}"


@dataclass(frozen=True)
class Verdict:
    """What came of a check; `status` is None where it ran out of time."""

    check: Check
    status: int | None
    seconds: float
    figures: Any
    tail: Sequence[str]

    @property
    def holds(self) -> bool:
        return self.status == 0

    def as_json(self) -> dict[str, Any]:
        shown = [Path(part).name if Path(part).is_absolute() else part for part in self.check.command]
        record = {
            "point": self.check.key,
            "title": self.check.title,
            "holds": self.holds,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "command": " ".join(shown),
            "figures": self.figures,
        }
        return record if self.holds else {**record, "tail": list(self.tail)}


def tests(package: str, part: str = "") -> Sequence[str]:
    """The command that runs a package's tests with every grid in full: all, a folder, or a file (without `.py`)."""
    path = f"packages/{package}/tests/{part}"
    return (*PYTEST, f"{path}.py" if "test_" in part else path)


def predicted(*options: str) -> Sequence[str]:
    """The benchmark of predictions; what it has measured already, in its folder, is kept."""
    return (PYTHON, "benchmarks/predicted.py", *options)


def sweep(*options: str) -> Sequence[str]:
    """The operator sweep named by OPDB_SWEEP; it fails, and says why, when none is named."""
    if not SWEEP:
        return (PYTHON, "-c", "raise SystemExit('set OPDB_SWEEP to the sweep program')")
    return (PYTHON, SWEEP, "vescale", *options)


# A sweep of torch's operator database that is not ours: `python FILE vescale [--grad]`, one line of JSON at its end.
SWEEP = os.environ.get("OPDB_SWEEP", "")

FOLDER = ("--folder", "predicted_output")
PYTEST = (PYTHON, "-m", "pytest", "-q")
PLANNER = "planning/test_planner"

CHECKS: tuple[Check, ...] = (
    Check(2, 1, "GPT and Llama as on one device; Megatron's minimum", tests("vescale", "end_to_end/test_training")),
    Check(2, 1, "the main job", (PYTHON, "examples/demo.py", "--out", "demo_output"), 15 * MINUTES),
    Check(2, 2, "no operator is wrong, forward", sweep(), 60 * MINUTES),
    Check(2, 2, "no operator is wrong, with gradients", sweep("--grad"), 60 * MINUTES),
    Check(2, 3, "every conversion pair", tests("dtensor", "conversions/test_conversion"), 30 * MINUTES),
    Check(2, 3, "every family of rules", tests("dtensor"), 60 * MINUTES),
    Check(2, 4, "dispatch and block ratios", (PYTHON, "benchmarks/ratios.py")),
    Check(2, 5, "bad input of tensors", tests("dtensor", "contracts/test_errors")),
    Check(2, 5, "bad input of plans", tests("plans")),
    Check(2, 6, "offline install of each package", tests("vescale", "distribution/test_install")),
    Check(2, 6, "networked install of each package", ("make", "-s", "smoke-install"), 30 * MINUTES),
    Check(2, 6, "the layers", (PYTHON, "tools/checks/check_layers.py")),
    Check(2, 6, "bazel test //... on a clean clone", (PYTHON, "tools/clean_clone.py"), 40 * MINUTES),
    Check(3, 1, "no operator is wrong on 2x2 meshes", (PYTHON, "tools/sweeps/operator_sweep.py"), 60 * MINUTES),
    Check(3, 1, "native rules, and what they move", (PYTHON, "tools/sweeps/operator_coverage.py", "--check")),
    Check(3, 2, "random programs", tests("dtensor", "contracts/test_programs"), 30 * MINUTES),
    Check(3, 3, "torch's module tests", tests("dtensor", "core/test_modules"), 30 * MINUTES),
    Check(4, 1, "random numbers bitwise, CPU", tests("rng"), 30 * MINUTES),
    Check(3, 1, "vmap and torch.func raise", tests("dtensor", "core/test_functorch")),
    Check(3, 1, "autocast, inference mode, parametrizations", tests("dtensor", "core/test_subsystems")),
    Check(4, 3, "what fills cost", (PYTHON, "benchmarks/runtime/fills.py")),
    Check(4, 4, "Llama 70B deferred on a fake mesh of 64", (PYTHON, "benchmarks/runtime/deferred_llama.py")),
    Check(4, 1, "deferred HuggingFace models", tests("vescale", "models/test_huggingface")),
    Check(4, 2, "training with dropout", tests("vescale", "end_to_end/test_dropout_training")),
    Check(4, 2, "torch's own DTensor beside it", (PYTHON, "benchmarks/runtime/stock_dropout.py")),
    Check(4, 4, "deferred models into ZeRO-3 buffers", tests("plans", "core/test_deferred_buffers")),
    Check(5, 1, "GPT and Llama, all ZeRO stages", tests("vescale", "end_to_end/test_training"), 30 * MINUTES),
    Check(5, 1, "ZeRO stages alike to the bit", tests("plans", "core/test_zero"), 20 * MINUTES),
    Check(5, 1, "optimizers, clipping, scaling", tests("plans", "optimizers/test_optim")),
    Check(5, 2, "memory per rank", (PYTHON, "benchmarks/runtime/zero.py", "memory")),
    Check(5, 2, "padding and planning time", (PYTHON, "benchmarks/runtime/zero.py", "packing")),
    Check(5, 3, "step time over FSDP2 and DDP", (PYTHON, "benchmarks/runtime/zero.py", "step")),
    Check(5, 3, "copies around collectives", (PYTHON, "benchmarks/runtime/zero.py", "copies")),
    Check(5, 3, "host time per block", (PYTHON, "benchmarks/runtime/zero.py", "host")),
    Check(5, 4, "lines to write, at most 12", tests("vescale", "models/test_lines")),
    Check(5, 5, "wrong plans, each with a remedy", tests("plans", "values/test_wrong_plans")),
    Check(5, 5, "a failure on one rank fails all", tests("plans", "core/test_together")),
    Check(5, 6, "HuggingFace models, TP and DP x TP with ZeRO-3", tests("vescale", "models/test_huggingface")),
    Check(7, 1, "every schedule, bitwise", tests("vescale", "pipelines/test_pipeline"), 40 * MINUTES),
    Check(7, 1, "beside data, tensor and ZeRO", tests("vescale", "pipelines/test_pipeline_meshes"), 20 * MINUTES),
    Check(7, 1, "losses weighed as one device's", tests("vescale", "pipelines/test_pipeline_losses")),
    Check(7, 1, "batch normalization", tests("vescale", "pipelines/test_pipeline_buffers")),
    Check(7, 1, "cuts by cost", tests("pipeline", "test_balance")),
    Check(7, 1, "clipping, scaling, accumulation", tests("vescale", "pipelines/test_pipeline_loop")),
    Check(7, 1, "a rejected schedule never starts", tests("vescale", "pipelines/test_pipeline_schedule")),
    Check(7, 2, "500 random models", tests("vescale", "pipelines/test_pipeline_random"), 60 * MINUTES),
    Check(7, 2, "unmodified models and skips", tests("vescale", "pipelines/test_pipeline_models")),
    Check(7, 3, "mutants judged by all orders", tests("pipeline", "test_verify_mutants"), 30 * MINUTES),
    Check(7, 3, "what verify says", tests("pipeline", "test_verify")),
    Check(7, 3, "published bubbles and memories", tests("pipeline", "test_simulate")),
    Check(7, 3, "a verdict within a second", (PYTHON, "benchmarks/runtime/schedules.py")),
    Check(7, 4, "makespans as simulated", (PYTHON, "benchmarks/runtime/pipeline_makespan.py")),
    Check(7, 4, "the runtime's cost over torch's", (PYTHON, "benchmarks/runtime/pipeline_overhead.py")),
    Check(7, 5, "faults end all ranks", tests("vescale", "pipelines/test_pipeline_faults")),
    Check(9, 1, "structure without names", tests("plans", "planner/test_structure")),
    Check(9, 1, "HuggingFace's plans, and names changed", (*tests("vescale", PLANNER), "-k", "names"), 90 * MINUTES),
    Check(
        9, 2, "three steps on 2 and 4 ranks",
        (*tests("vescale", PLANNER), "-k", "three_steps or packed"), 60 * MINUTES,
    ),
    Check(9, 5, "the pruned search is brute force", tests("plans", "planner/test_search")),
    Check(9, 5, "Llama-3 405B on 16,384 H100s, DeepSeek-V3 on 2,048", (PYTHON, "benchmarks/planner.py")),
    Check(9, 6, "odd and infeasible requests", tests("plans", "planner/test_requests")),
    Check(9, 6, "what is chosen, and refused", tests("plans", "planner/test_generate")),
    Check(9, 6, "plan.explain", tests("plans", "planner/test_explain")),
    Check(9, 6, "vescale plan", tests("vescale", "planning/test_plan_command")),
    Check(9, 3, "dry runs count what real runs issue", tests("vescale", "planning/test_dry_run")),
    Check(9, 3, "profiles, predictions and calibration", tests("vescale", "planning/test_predict")),
    Check(9, 3, "predicted against measured, 2 ranks", predicted("all", "--ranks", "2", *FOLDER), 60 * MINUTES),
    Check(9, 3, "predicted against measured, 4 ranks", predicted("all", "--ranks", "4", *FOLDER), 90 * MINUTES),
    Check(9, 3, "peak memory of 100 random plans", predicted("memory", *FOLDER), 60 * MINUTES),
    Check(9, 4, "published configurations", (PYTHON, "benchmarks/published.py"), 30 * MINUTES),
    Check(25, 2, "memory by the allocator", tests("vescale", "memory/test_memory_by_allocator"), 20 * MINUTES),
    Check(25, 4, "rules of thumb on 60 problems", tests("plans", "planner/test_thumb"), 15 * MINUTES),
    Check(25, 1, "blind published runs", (PYTHON, "benchmarks/planning/published_blind.py"), 10 * MINUTES),
    Check(10, 1, "mixtures of experts as on one device", tests("vescale", "models/test_experts")),
    Check(10, 1, "experts of a user's own making", tests("plans", "experts/test_experts")),
    Check(10, 1, "experts in lists", tests("vescale", "models/test_expert_lists")),
    Check(10, 1, "a capacity, the same on every mesh", tests("plans", "experts/test_expert_capacity")),
    Check(10, 3, "what spreading experts is worth", (PYTHON, "benchmarks/runtime/experts.py")),
    Check(6, 3, "object stores by fsspec, on several ranks", tests("checkpoint", "test_remote")),
    Check(6, 1, "resumed under other plans, and resharded online", tests("vescale", "checkpoints/test_checkpoint")),
    Check(6, 2, "twelve groups of faults, every mesh change", tests("checkpoint"), 30 * MINUTES),
    Check(
        20, 2, "states that share memory, under any plan",
        tests("vescale", "checkpoints/test_checkpoint_states"), 60 * MINUTES,
    ),
    Check(20, 2, "2,000 random trainings", tests("vescale", "models/test_trainings"), 120 * MINUTES),
    Check(20, 2, "4,000 harmful inputs of each kind", tests("checkpoint", "test_harm"), 60 * MINUTES),
    Check(6, 2, "checkpoints from a shell", tests("vescale", "checkpoints/test_checkpoint_command")),
    Check(6, 3, "checkpoints against raw work", (PYTHON, "benchmarks/runtime/checkpoint_ratios.py"), 20 * MINUTES),
    Check(6, 4, "a HuggingFace Llama and back", tests("vescale", "checkpoints/test_checkpoint_huggingface")),
    Check(11, 1, "equal to the bit on every mesh", tests("vescale", "reproducible/test_reproducible"), 60 * MINUTES),
    Check(
        20, 2, "200 random graphs, equal to the bit on four meshes",
        tests("vescale", "reproducible/test_reproducible_graphs"), 60 * MINUTES,
    ),
    Check(11, 2, "the reproducible mode's cost", (PYTHON, "benchmarks/runtime/reproducible.py")),
    Check(11, 3, "ten bugs of one rank, named by compare", tests("vescale", "comparing/test_compare")),
    Check(11, 3, "what recording costs", (PYTHON, "benchmarks/recording.py")),
    Check(26, 1, "compile mode on one rank", tests("vescale", "compile/test_one_rank"), 20 * MINUTES),
    Check(8, 4, "what changes between steps", tests("vescale", "compile/test_guards"), 20 * MINUTES),
    Check(8, 4, "changes, and what outlives a call", tests("plans", "compile/test_changes")),
    Check(20, 2, "586 programs that read Python state", tests("plans", "compile/test_python_state"), 30 * MINUTES),
    Check(8, 1, "everyday programs, compiled", tests("plans", "compile/test_everyday_programs"), 20 * MINUTES),
    Check(8, 2, "the example Llama's step over the same by hand", (PYTHON, "benchmarks/runtime/llama_step.py")),
    Check(20, 1, "hooks and buffers under checkpoints", tests("plans", "training/test_hooks_that_replace")),
    Check(20, 1, "freezing and thawing", tests("plans", "training/test_freezing"), 30 * MINUTES),
    Check(20, 1, "plain tensors beside a model", tests("plans", "training/test_plain_tensors")),
    Check(20, 1, "values that one rank alone reads", tests("dtensor", "core/test_reads")),
    Check(20, 1, "what one rank asks for alone", tests("vescale", "debugging/test_hang_collectives")),
    Check(20, 1, "what one rank computes alone", tests("vescale", "debugging/test_collective_check")),
    Check(20, 1, "who holds parameters, or their memory", tests("plans", "training/test_identity")),
    Check(22, 1, "every adapter, with its package", (PYTHON, "tools/ecosystem.py"), 120 * MINUTES),
    Check(22, 2, "mistakes: one device's result or a typed error", tests("vescale", "integrations/test_mistakes")),
    Check(22, 3, "what others write of a model", tests("vescale", "checkpoints/test_files_of_others")),
    Check(22, 4, "from wheels to generated text", (PYTHON, "tools/newcomer.py")),
    Check(22, 4, "wheels and source archives are whole", tests("vescale", "distribution/test_dist")),
    Check(12, 1, "five commits, one slowed", (*PYTEST, "tools/tests/test_benchmark_history.py")),
    Check(12, 1, "five commits of this repository", ("make", "-s", "bench-history", "N=5"), 60 * MINUTES),
    Check(12, 1, "its dashboard, and no headline red", ("make", "-s", "dashboard")),
    Check(12, 2, "the comparison's own tests", (*PYTEST, "tools/tests/test_torchtitan_comparison.py")),
    Check(12, 2, "beside TorchTitan", (PYTHON, "benchmarks/torchtitan/side_by_side.py", "all"), 60 * MINUTES),
    Check(12, 3, "a newcomer's path", (PYTHON, "tools/clean_clone.py", "--newcomer"), 120 * MINUTES),
    Check(12, 3, "READMEs, guides, pictures", tests("vescale", "distribution/test_readme")),
    Check(12, 3, "examples: every flag, resume, curve", tests("vescale", "models/test_examples"), 30 * MINUTES),
    Check(18, 0, "every fix that strict() names", tests("dtensor", "debugging/test_strict")),
    Check(18, 0, "optimizers of users", tests("plans", "optimizers/test_optim_kinds")),
    Check(18, 0, "traits of functions, by numbers", tests("dtensor", "rules/test_traits"), 30 * MINUTES),
    Check(12, 0, "an environment's faults, named and mended", tests("vescale", "distribution/test_doctor")),
    Check(12, 0, "a step's timeline over ranks", tests("vescale", "comparing/test_timeline")),
    Check(
        19,
        1,
        "every training on the second device",
        tests("vescale", "second_device/test_second_device"),
        20 * MINUTES,
    ),
    Check(
        21, 1, "unmodified architectures, those found right", tests("vescale", "architectures/test_architectures"),
        120 * MINUTES,
    ),
    Check(21, 1, "98 of 100 of the listed right", (PYTHON, "-m", "architectures", "check")),
    Check(
        24, 1, "13 stock models on several meshes",
        tests("vescale", "end_to_end/test_context"), 120 * MINUTES,
    ),
    Check(
        24, 1, "the same bits on 1, 2 and 4 parts",
        tests("vescale", "reproducible/test_reproducible_context"), 60 * MINUTES,
    ),
    Check(23, 1, "sessions in a terminal and a notebook", tests("vescale", "debugging/test_notebook"), 20 * MINUTES),
    Check(23, 2, "simulated ranks to the bit", tests("vescale", "debugging/test_simulate"), 30 * MINUTES),
    Check(23, 2, "64 ranks over their sum", (PYTHON, "benchmarks/planning/simulation.py")),
    Check(23, 3, "sixty expressions; stops in planning", tests("vescale", "debugging/test_breakpoint"), 30 * MINUTES),
    Check(23, 3, "who comes late, dies, thinks", tests("dtensor", "debugging/test_debugger"), 20 * MINUTES),
    Check(23, 5, "pictures of plans; boundaries explained", tests("vescale", "debugging/test_pictures")),
    Check(23, 1, "one rank in an IDE", tests("vescale", "debugging/test_ide")),
    Check(23, 5, "pages in a browser", tests("vescale", "comparing/test_browser")),
    Check(23, 6, "the tutorial as it stands", tests("vescale", "debugging/test_tutorial")),
    Check(24, 1, "a long text in four parts", tests("vescale", "end_to_end/test_long_context")),
    Check(
        24, 2, "memory of a rank, longest sequence",
        (PYTHON, "benchmarks/runtime/context_ring.py", "memory"), 30 * MINUTES,
    ),
    Check(24, 3, "work balanced: windows, 20 packings", tests("plans", "core/test_context_balance"), 30 * MINUTES),
    Check(
        24, 4, "a ring over one written by hand", (PYTHON, "benchmarks/runtime/context_ring.py", "step"), 20 * MINUTES,
    ),
    Check(24, 4, "transfers hidden under slow products", (PYTHON, "benchmarks/runtime/context_ring.py", "hidden")),
    Check(24, 5, "300 random problems, traffic", tests("dtensor", "conversions/test_context"), 60 * MINUTES),
    Check(24, 6, "wrong use", tests("vescale", "end_to_end/test_context_refusals"), 20 * MINUTES),
    Check(19, 3, "mutants of the engine", (PYTHON, "-m", "mutants"), 60 * MINUTES),
    Check(19, 4, "a hang between stages", tests("vescale", "debugging/test_hang_pipelines")),
    Check(19, 6, "`make gpu` from end to end, rehearsed", (PYTHON, "-m", "gpu", "--device", "second"), 30 * MINUTES),
    Check(22, 2, "forty mistakes", tests("vescale", "integrations/test_mistakes")),
    Check(22, 2, "what one rank does alone", tests("vescale", "integrations/test_one_rank_alone")),
    Check(22, 3, "what others write of a state", tests("vescale", "checkpoints/test_state_of_others")),
    Check(22, 4, "what one watches", tests("vescale", "end_to_end/test_metrics")),
    Check(19, 1, "its manners", tests("testkit", "test_second_device")),
    Check(26, 1, "torch's own parallelism at real sizes", (PYTHON, "benchmarks/peers.py"), 60 * MINUTES),
    Check(26, 1, "peers: the short form runs", tests("vescale", "comparing/test_peers"), 20 * MINUTES),
    Check(
        26, 1, "compile mode over plain torch.compile", (PYTHON, "benchmarks/runtime/compile_ratio.py"), 60 * MINUTES,
    ),
    Check(
        48, 4, "compile mode on two ranks over eager mode",
        (PYTHON, "benchmarks/runtime/compile_shards.py", "--deep", "32"), 60 * MINUTES,
    ),
    Check(26, 3, "what starting costs a rank of 64, 1,024 and 16,384", (PYTHON, "benchmarks/planning/startup.py")),
    Check(50, 5, "one rank is apart", (PYTHON, "tools/sweeps/watchdog.py", "run", ".sweeps/ways"), 30 * MINUTES),
    Check(50, 5, "restarts after kills", (PYTHON, "tools/sweeps/restarts.py", "run", ".sweeps/restarts"), 30 * MINUTES),
)


def run_check(check: Check) -> Verdict:
    """Run it; one that runs out of time takes its processes with it."""
    started = time.monotonic()
    command = subprocess.Popen(
        check.command,
        cwd=TOP,
        env={**os.environ, "VESCALE_GRID": "full", "PYTHONPATH": f"{TOP / 'tools'}{os.pathsep}{TOP / 'examples'}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = command.communicate(timeout=check.timeout_s)
        status = command.returncode
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        output, _ = command.communicate()
        status = None
    lines = output.decode(errors="replace").splitlines()
    return Verdict(check, status, time.monotonic() - started, last_json(lines), lines[-20:])


def last_json(lines: Sequence[str]) -> Any:
    """The figures on the last line, if it holds any."""
    try:
        return json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return None


def describe_tree_and_machine() -> dict[str, Any]:
    """What the figures belong to."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=TOP, check=True, capture_output=True, text=True).stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def show(verdicts: Sequence[Verdict], console: Console) -> None:
    table = Table("point", "what it must show", "holds", "seconds", "figures")
    for verdict in verdicts:
        holds = "yes" if verdict.holds else "out of time" if verdict.status is None else f"no ({verdict.status})"
        figures = "" if verdict.figures is None else json.dumps(verdict.figures)
        table.add_row(verdict.check.key, verdict.check.title, holds, f"{verdict.seconds:.0f}", figures)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="points (2.6) or issues (2); all by default")
    only = set(parser.parse_args().only)
    chosen = [check for check in CHECKS if not only or only & {check.key, str(check.issue)}]
    if not chosen:
        parser.error(f"no check is registered under {', '.join(sorted(only))}")

    console = Console()
    began = datetime.now(UTC)
    verdicts = []
    for check in chosen:
        console.print(f"{check.key} {check.title} ...", highlight=False)
        verdicts.append(run_check(check))
        if not verdicts[-1].holds:
            console.print("\n".join(verdicts[-1].tail), markup=False, highlight=False)
    show(verdicts, console)

    tree = describe_tree_and_machine()
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / f"{began:%Y-%m-%dT%H%M%SZ}-{tree['commit'][:8]}.json"
    record = {"began": f"{began:%Y-%m-%dT%H:%M:%SZ}", **tree, "checks": [verdict.as_json() for verdict in verdicts]}
    written.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {written.relative_to(TOP)}", highlight=False)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

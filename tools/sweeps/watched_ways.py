"""The ways in which one rank of a training (`watched_training.py`) departs from the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

WITHIN_S, FOREVER_S = 3, 600
"""Seconds that every rank has to wait; and that none has."""


class Raising(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError("an item that cannot be read")


def trained(job: Any, rows: int = 8, forwards: int = 1, *, backward: bool = True, clip: bool = True, step: bool = True,
            look: Callable[[Any], object] = id) -> None:  # fmt: skip
    """A step, or parts of it."""
    loss = sum(job.model(*job.batch(rows)) for _ in range(forwards))
    look(loss)
    if backward:
        loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    if step:
        job.optimizer.step()
    job.optimizer.zero_grad()


def in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join()


def evaluate(job: Any) -> None:
    with torch.no_grad():
        print(job.model(*job.batch()).item())


def write(job: Any) -> None:
    with torch.no_grad():
        job.model.get_parameter("blocks.0.weight").mul_(2)


def stop_for_a_while() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {WITHIN_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def take_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_crosswise() -> None:
    one, other, met = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def run(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            met.wait()
            second.acquire()

    threading.Thread(target=run, args=(one, other), daemon=True).start()
    run(other, one)


def loop() -> None:
    while True:
        pass


def compile_one() -> None:
    def wave(x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            x = (x * i).sin() + x.cumsum(0)
        return x

    torch.compile(wave, fullgraph=True)(torch.ones(64))


def fail(job: Any, error: type[BaseException] = ValueError) -> None:
    raise error("of this rank")


def go_on_after_an_error(job: Any) -> None:
    loss = job.model(*job.batch())
    loss.register_hook(fail)
    try:
        loss.backward()
    except ValueError:
        job.optimizer.zero_grad()


BEFORE: dict[str, Callable[[Any], object]] = {
    "own_barrier": lambda job: dist.barrier(),
    "own_all_reduce": lambda job: dist.all_reduce(torch.ones(3)),
    "own_all_reduce_of_a_group": lambda job: dist.all_reduce(torch.ones(3), group=job.pair),
    "own_send": lambda job: dist.send(torch.ones(1 << 20), 1 - job.rank),
    "own_receive": lambda job: dist.recv(torch.ones(3), 1 - job.rank),
    "own_objects": lambda job: dist.broadcast_object_list([1], 1 - job.rank),
    "own_group": lambda job: dist.new_group([0, 1]),
    "started_and_waited_for": lambda job: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "collective_of_a_thread": lambda job: in_a_thread(lambda: dist.all_reduce(torch.ones(3))),
    "own_end_of_the_group": lambda job: dist.destroy_process_group(),
    "one_step_more": lambda job: job.step(),
    "one_forward_more": lambda job: job.model(*job.batch()),
    "evaluates_alone": evaluate,
    "clips_alone": lambda job: nn.utils.clip_grad_norm_(job.model.parameters(), 1.0),
    "saves_alone": lambda job: job.vescale.save(f"{job.folder}/alone", job.state(), step=1),
    "loads_alone": lambda job: job.vescale.load(f"{job.folder}/first", job.state()),
    "gathers_alone": lambda job: job.weight().full_tensor(),
    "reads_a_norm_alone": lambda job: job.weight().norm().item(),
    "exits": lambda job: sys.exit(0),
    "exits_at_once": lambda job: os._exit(3),
    "killed": lambda job: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda job: os.kill(os.getpid(), signal.SIGSTOP),
    "sleeps": lambda job: time.sleep(FOREVER_S),
    "loops": lambda job: loop(),
    "holds_the_interpreter": lambda job: re.match(r"(a*)*b", "a" * 40),
    "waits_for_a_lock": lambda job: take_twice(),
    "two_threads_wait": lambda job: wait_crosswise(),
    "waits_for_a_process": lambda job: subprocess.run(["sleep", "40"], check=False),
    "raises": fail,
    "worker_raises": lambda job: next(iter(DataLoader(Raising(), num_workers=1))),
    "data_ends": lambda job: fail(job, StopIteration),
    "another_batch": lambda job: job.generator.manual_seed(9),
    "freezes_alone": lambda job: next(iter(job.model.parameters())).requires_grad_(False),
    "writes_alone": write,
    "draws_alone": lambda job: torch.rand(1),
}
"""What is done before a step."""
INSTEAD: dict[str, Callable[[Any], object]] = {
    "no_backward": lambda job: trained(job, backward=False),
    "no_step": lambda job: trained(job, step=False),
    "no_clip": lambda job: trained(job, clip=False),
    "nothing_of_a_step": lambda job: job.batch(),
    "reads_alone": lambda job: trained(job, look=lambda loss: loss.item()),
    "prints_alone": lambda job: trained(job, look=lambda loss: print(f"{loss:.3f}")),
    "another_shape": lambda job: trained(job, rows=4),
    "another_loss": lambda job: trained(job, forwards=2),
    "goes_on_after_an_error": go_on_after_an_error,
}
LEGAL: dict[str, Callable[[Any], object]] = {
    "nothing": lambda job: None,
    "stopped_for_a_while": lambda job: stop_for_a_while(),
    "sleeps_for_a_while": lambda job: time.sleep(WITHIN_S),
    "compiles": lambda job: compile_one(),
}
"""What is done before a step, and the training goes on as if it had not been."""
MADE = ("another_plan", "another_model", "another_order")
"""Ways in which a rank makes its model, or its optimizer, otherwise."""
WAYS = (*BEFORE, *INSTEAD, *LEGAL, *MADE)
SHARDED = {"gathers_alone", "reads_a_norm_alone"}
"""Ways that are odd only where a parameter is sharded."""
SHARED = {"freezes_alone"}
"""Ways that are odd only where several ranks hold a parameter: of its one owner they are values like others."""


def depart(way: str, job: Any) -> None:
    """The culprit's step."""
    if way in INSTEAD:
        INSTEAD[way](job)
        return
    if way not in MADE:
        (BEFORE | LEGAL)[way](job)
    job.step()

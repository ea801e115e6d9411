"""Worlds whose ranks may be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback

import torch
import torch.distributed as dist

from ..worker import dumps, loads


class World:
    """Fresh processes with a process group whose store lives here, as torchrun's does in its agent.

    preload: modules that the ranks have imported.
    after: an ended world in whose place this one comes, in the same store, as torchrun's next attempt does. (What torch
    itself left there is deleted: gloo would look for ranks that are dead.)
    """

    def __init__(self, size, function, args, after=None, preload=()):
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "vescale_dtensor", *preload])
        self.store = after.store if after else dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for key in self.store.list_keys() if after else ():
            if "vescale" not in key:
                self.store.delete_key(key)
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            call = dumps((function, args))
            process = context.Process(target=_rank, args=(theirs, rank, size, self.store.port, call))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def answers(self, timeout=60):
        """Per rank ("returned", value), ("raised", type name, text), or ("died", exit code)."""
        found = []
        for pipe, process in zip(self._pipes, self.processes):
            answer = None
            with contextlib.suppress(EOFError):
                if not pipe.poll(timeout):
                    raise TimeoutError(f"a rank of {self.size} gave no answer in {timeout} s")
                answer = pipe.recv()
            process.join(timeout)
            found.append(answer or ("died", process.exitcode))
        return found

    def close(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(pipe, rank, size, port, call):
    torch.set_num_threads(1)
    if size > 1:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        function, args = loads(call)
        answer = ("returned", function(rank, *args))
    except BaseException as error:
        answer = ("raised", type(error).__name__, str(error), traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # the others of a world that lost a rank cannot end it in order

"""One processor for all ranks of a simulation: its caches hold what they share, and a turn goes over within it.

Ranks run one at a time, so a second processor gains nothing; but systems wake a thread on an idle one, and every turn
would then begin with cold caches: 64 ranks of a small GPT took 1.8 times as long. Where a system cannot bind threads
(macOS, Windows), nothing is done.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def one_processor() -> Iterator[Callable[[], None]]:
    """Within: a function that binds the thread which calls it to the processor that the caller runs on now.

    The caller's own thread may go anywhere again afterwards.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield lambda: None
        return
    allowed = os.sched_getaffinity(0)
    here = ctypes.CDLL(None).sched_getcpu()
    try:
        yield lambda: os.sched_setaffinity(0, {here} & allowed or allowed)
    finally:
        os.sched_setaffinity(0, allowed)

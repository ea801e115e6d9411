"""Other threads that may look at a model while one of its calls runs.

A region takes the class DTensor off parameters while it computes, and another thread would meet plain shards. No lock
keeps that thread out, for what it reads are attributes of tensors; so a call is static only where no other thread runs
whose code could be a user's. By allow-list: threads of libraries that compute nothing of a user's with tensors.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident

# Of the code that a thread runs, the first part of its module's name. These threads work on what they are handed: data
# loaders' queues and pinning, progress bars, shells and debuggers, writers of logs.
LIBRARIES = frozenset(
    "torch multiprocessing tqdm rich IPython ipykernel zmq tornado debugpy pydevd tensorboard wandb fsspec".split()
)
_OURS, _LIBRARYS = "vescale", "a library's"
_NOTED = "_vescale_code"  # on a thread: whose code it runs, which is told from what it forgets when it ends

_LOOKS, _BETWEEN_S = 40, 0.005

_living = threading._active  # by ident; `threading.enumerate` takes a lock for a copy of it


def are_others_looking() -> bool:
    """Whether another thread of this process may read the model during a call that begins now."""
    return len(_living) > 1 and looking_thread() is not None


def looking_thread() -> threading.Thread | None:
    """One that may."""
    own = get_ident()
    for ident, thread in _living.copy().items():
        whose = _LIBRARYS if ident == own else thread.__dict__.get(_NOTED) or _note(thread)
        if whose in (_LIBRARYS, "ours") or whose == "a pool's" and not _runs_users_code(ident):
            continue
        if type(thread) is threading._MainThread and _note(_living.get(own)) == "ours":
            continue  # it waits for simulated ranks, which are threads of ours
        return thread
    return None


def outlasts(holds: Callable[[], bool]) -> bool:
    """Whether something still holds when other threads have had time to let go of this one's frames.

    A watch for hangs reads where this thread stands, and frames that it has in hand keep their tensors a moment longer
    than their calls. What a rank finds must not depend on that: ranks would differ.
    """
    for _ in range(_LOOKS if len(_living) > 1 else 0):
        if not holds():
            return False
        time.sleep(_BETWEEN_S)
    return holds()


def _runs_users_code(ident: int) -> bool:
    """Of a pool's thread. One that waits for work gets none during a call: whoever gives it some is seen himself."""
    frame = sys._current_frames().get(ident)
    while frame is not None:
        first = frame.f_globals.get("__name__", "").partition(".")[0]
        if not (first in sys.stdlib_module_names or first in LIBRARIES or first.startswith(_OURS)):
            return True
        frame = frame.f_back
    return False


def _note(thread: threading.Thread | None) -> str:
    """Whose code a thread runs: "ours", "a library's", "a pool's" or "a user's"."""
    found = "a user's"
    if type(thread) is threading._DummyThread:  # C's, such as autograd's for a device
        found = _LIBRARYS
    elif thread is not None:
        target = getattr(thread, "_target", None) or getattr(thread, "function", None)  # a Timer's
        module = getattr(target, "__module__", None) or "" if target is not None else type(thread).__module__
        first = module.partition(".")[0]
        if first.startswith(_OURS):
            found = "ours"
        elif first in LIBRARIES:
            found = _LIBRARYS
        elif first == "concurrent":  # an executor of threads, such as inductor keeps
            found = "a pool's"
        thread.__dict__[_NOTED] = found
    return found

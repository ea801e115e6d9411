"""Puts changed source into a running process: functions keep who they are and get other code.

So tables, subclasses and names that were imported stay right, and nothing is imported twice. A file is compiled anew
with the helper in it, and each function whose code differs gets that of the new file, by its name and line.
"""

from __future__ import annotations

import builtins
import gc
import marshal
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType

from . import effects, grammar


def put(helper: effects.Helper, files: Mapping[str, bytes]) -> None:
    """The helper stands where it does in `files`: marshalled code of whole files, by the files' paths."""
    builtins.__dict__[grammar.HELPER] = helper
    new = {path: _codes(marshal.loads(code)) for path, code in files.items()}
    gc.unfreeze()  # which a fork server did with what its ranks share
    for function in [one for one in gc.get_objects() if type(one) is FunctionType]:
        code = function.__code__
        found = new.get(code.co_filename, {}).get(_key(code))
        if found is not None and found != code:
            function.__code__ = found


def compiled(path: Path, source: str, only: int | None = None, first: int = 0) -> bytes:
    """A file's code with the helper in it, for `put`; see `grammar.changed`."""
    return marshal.dumps(compile(grammar.changed(source, only, first), str(path), "exec"))


def unseen() -> None:
    """The helpers' frames belong to nobody: what asks for lines of users, or counts waits by file, passes them by."""
    for kind in (effects.Helper, effects.Survey, effects.Mutant):
        for function in vars(kind).values():
            if type(function) is FunctionType:
                function.__code__ = _unseen(function.__code__)
    for name in ("_overwrite", "_is_on_device", "_bits", "_self_of"):
        function = getattr(effects, name)
        function.__code__ = _unseen(function.__code__)


def _unseen(code: CodeType) -> CodeType:
    inner = tuple(_unseen(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename="<mutants>", co_consts=inner)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """All code within, but for lambdas, of which several may lie on one line."""
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_name != "<lambda>":
                found[_key(inner)] = inner
            found.update(_codes(inner))
    return found

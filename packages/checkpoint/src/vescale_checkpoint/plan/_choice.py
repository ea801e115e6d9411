"""The user's choices for a load, made strict: what it takes, under which names, and the conversions it permits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .._errors import MismatchError
from ..format._dtypes import DTYPES, is_lossless

LOSSLESS = "lossless"


@dataclass(frozen=True)
class Report:
    """The result of a load.

    matched: names of the state that were loaded.
    missing: names of the state that the checkpoint lacks; they kept their values.
    extra: names of the checkpoint, under keys that the state has, that were not used.
    skipped: keys of the checkpoint that the state does not have, and names outside `only`.
    converted: name -> "from->to", for each converted dtype.
    """

    path: str
    step: int
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    skipped: tuple[str, ...]
    converted: Mapping[str, str] = field(default_factory=dict)
    bytes_read: int = 0

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(getattr(self, what))} {what}" for what in ("matched", "missing", "extra", "skipped", "converted")
        )
        return f"step {self.step} of {self.path}: {counts}; {self.bytes_read} bytes read"


class Choice:
    """The options of one load.

    Arguments:
        only: globs over names of the state ("model.*"); None for everything.
        rename: name in the checkpoint -> name in the state, without the key of the model or optimizer;
            one "*" on each side stands for the same text. The first that matches decides.
        cast: conversions that are permitted: "lossless", and "float32->bfloat16" for others.
        missing: "error", or "keep" for names that the checkpoint lacks.
        extra: "error", or "ignore" for names that the state lacks.
    """

    def __init__(
        self,
        only: Iterable[str] | str | None,
        rename: Mapping[str, str] | None,
        cast: Iterable[str] | str,
        missing: str,
        extra: str,
    ) -> None:
        self.only = None if only is None else _texts(only)
        self.casts = frozenset(_texts(cast))
        self.keeps_missing = _option("missing", missing, "keep")
        self.ignores_extra = _option("extra", extra, "ignore")
        rename = {} if rename is None else rename
        self._rules = [_rule(old, new) for old, new in rename.items()]
        self._idle = {f"only={pattern!r}" for pattern in self.only or ()} | {f"rename={old!r}" for old in rename}
        self._said = [f"rename={old!r}" for old in rename]
        for name in self.casts - {LOSSLESS}:
            if not all(part in DTYPES for part in name.split("->")) or name.count("->") != 1:
                raise MismatchError(
                    "load", f"cast {name!r} is neither 'lossless' nor of the form 'float32->bfloat16'",
                    [f"dtypes  {', '.join(DTYPES)}"],
                )  # fmt: skip

    def takes(self, name: str) -> bool:
        if self.only is None:
            return True
        matching = [pattern for pattern in self.only if fnmatchcase(name, pattern)]
        self._idle.difference_update(f"only={pattern!r}" for pattern in matching)
        return bool(matching)

    @property
    def idle(self) -> list[str]:
        """The globs and names that nothing asked about has matched."""
        return sorted(self._idle)

    def renamed(self, name: str) -> str:
        """Returns the state's name for the checkpoint's `name`."""
        said, new = self._renaming(name)
        self._idle.discard(said)
        return new

    def would_rename(self, name: str) -> str:
        """The same, of a name that is only tried: no rule counts as used."""
        return self._renaming(name)[1]

    def _renaming(self, name: str) -> tuple[str, str]:
        for said, (pattern, new) in zip(self._said, self._rules):
            found = pattern.fullmatch(name)
            if found:
                return said, new.replace("*", found[1]) if found.groups() else new
        return "", name

    def permits(self, source: str, target: str) -> bool:
        if source == target or f"{source}->{target}" in self.casts:
            return True
        return LOSSLESS in self.casts and is_lossless(source, target)


def _texts(given: Iterable[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _option(name: str, value: str, other: str) -> bool:
    if value not in ("error", other):
        raise MismatchError("load", f"{name}={value!r} is neither 'error' nor {other!r}")
    return value == other


def _rule(old: str, new: str) -> tuple[re.Pattern[str], str]:
    if old.count("*") > 1 or new.count("*") > old.count("*"):
        raise MismatchError(
            "load", f"rename {old!r} -> {new!r} has more than one '*', or one only in the new name", (),
            [('rename={"transformer.*": "model.*"}', "")],
        )  # fmt: skip
    return re.compile(re.escape(old).replace(r"\*", "(.*)"), re.DOTALL), new

"""Explains how a checkpoint and a state do not fit, with the calls that would fit. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from .._errors import MismatchError

_SHOWN = 8


def misfit(
    missing: Sequence[str], extra: Sequence[str], faults: Sequence[str], lacking: Sequence[str], unused: Sequence[str],
    untied: Mapping[str, str], stored: Collection[str], *, matches: bool,
) -> MismatchError:  # fmt: skip
    """The error for names that are missing or extra without permission, and other faults.

    lacking, unused: all names of the state, or of the checkpoint, that found no other. untied: names of the checkpoint
    that the state ties to another, where the values of the two differ. stored: all names of the checkpoint. matches:
    whether any name matched.
    """
    operands = [f"missing in the checkpoint  {_near(name, unused)}" for name in missing[:_SHOWN]]
    for name in extra[:_SHOWN]:
        tie = untied.get(name)
        other = _near(name, lacking) if tie is None else f"{name} (tied to {tie} there, and stored with other values)"
        operands.append(f"not in the state  {other}")
    operands += faults[:_SHOWN]
    counts = f"{len(missing)} missing, {len(extra)} extra, {len(faults)} of another shape, dtype or kind"
    rule = f"the checkpoint does not fit the state: {counts}"
    if missing and not matches:
        rule += "; no name is in both"
        if not extra:
            operands += [f"the checkpoint has  {name}" for name in [*stored][:_SHOWN]]
    remedies = _other_state(missing, stored)
    if missing and extra and not remedies:
        renamed = f"rename={{{_short(extra[0])!r}: {_short(missing[0])!r}}}"
        remedies.append((renamed, "name in the checkpoint: name in the state"))
    if missing and matches:
        remedies.append(('missing="keep"', "they keep the values they have"))
    if extra and (matches or not missing):
        remedies.append(('extra="ignore"', ""))
    return MismatchError("load", rule, operands, remedies)


def _other_state(missing: Sequence[str], stored: Collection[str]) -> list[tuple[str, str]]:
    """The state to give where the checkpoint's names and the state's differ in the model's key alone."""
    if missing and all(_short(name) in stored and _short(name) != name for name in missing):
        return [("load(path, dict(model.state_dict()))", "the checkpoint's names have no key in front")]
    for key in dict.fromkeys(name.partition(".")[0] for name in stored):
        if missing and all(f"{key}.{name}" in stored for name in missing):
            return [(f'load(path, {{"{key}": model}})', f"the checkpoint's names stand under {key!r}")]
    return []


def _near(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others[:4096], 1)
    return f"{name} (nearest: {close[0]})" if close else name


def _short(name: str) -> str:
    return name.partition(".")[2] or name

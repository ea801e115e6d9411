"""Converts optimizer groups saved by torch, by `get_state_dict` or `optimizer.state_dict()`, to this package's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def of_torch(saved: Any) -> dict[str, Any] | None:
    """An optimizer's entry, from one with `param_groups`: a list with names of parameters, or with their numbers (see
    `numbers`); or flattened, with an entry for each parameter and option, of which equal ones are a group. None
    of anything else."""
    if not isinstance(saved, dict):
        return None
    given, state = saved.get("param_groups"), saved.get("state")
    if isinstance(given, list):
        groups = [
            {"params": group["params"], "options": {key: value for key, value in group.items() if key != "params"}}
            for group in given
            if isinstance(group, dict) and (_are(str, group.get("params")) or _are(int, group.get("params")))
        ]
    else:
        options: dict[str, dict[str, Any]] = {}
        for key, value in saved.items():
            kind, _, rest = key.partition(".")
            if kind == "param_groups":
                name, _, option = rest.rpartition(".")
                options.setdefault(name, {})[option] = value
        together: dict[str, list[str]] = {}
        for name, one in options.items():
            together.setdefault(json.dumps(one, sort_keys=True), []).append(name)
        groups = [{"params": names, "options": json.loads(text)} for text, names in together.items()]
    values = {name: one for name, one in state.items() if isinstance(one, dict)} if isinstance(state, dict) else {}
    return {"state": values, "groups": groups} if groups else None


def numbers(saved: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, str] | None:
    """Maps the numbers of a saved optimizer's parameters to their names: as in torch, numbers count through the groups.

    Arguments:
        saved: what `of_torch` returned, or an entry of this package.
        groups: the names of each group of the optimizer that is loaded.

    Returns: an empty mapping where the saved optimizer has names; None where its groups have other lengths.
    """
    counts = [len(group["params"]) for group in saved["groups"] if _are(int, group["params"])]
    if not counts:
        return {}
    names = [name for group in groups for name in group]
    return {str(i): name for i, name in enumerate(names)} if counts == [len(group) for group in groups] else None


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)

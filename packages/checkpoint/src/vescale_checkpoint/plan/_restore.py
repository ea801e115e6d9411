"""Matches a checkpoint's manifest with a user's state: which stored tensor fills which memory, and what is set
afterwards.

Three phases, so that an error leaves the state as it was: `Restore` matches names,
shapes and dtypes and touches nothing; then the targets are read; then `apply` sets
what is no tensor, and hands fresh optimizer states and objects their values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Layout
from vescale_dtensor.engine import forget_all, local_only, written
from vescale_trace.values import parts

from .._errors import FormatError, MismatchError
from ..format._box import Piece, full_box, pieces_of, stored
from ..format._dtypes import DTYPES, NAMES
from ..format._text import shown
from ..format._values import as_kind_of, decode, encode
from ..manifest import Manifest, Stored
from ._choice import Choice
from ._load_plan import Target
from ._misfit import misfit
from ._state import (
    PLAN_KEY,
    another_kind,
    first_names,
    is_optimizer,
    named_parameters_of,
    optimizer_parts,
    parameter_names,
)
from ._torch_groups import numbers, of_torch

_ABSENT = object()
_detach = Tensor.detach  # DTensor's own asks whether it is to be dispatched


class Apart(NamedTuple):
    """A tensor of the checkpoint that the state ties to another one there, `first`; and what this rank has of it."""

    name: str
    first: str
    tensor: Tensor
    pieces: Sequence[Piece]


class Restore:
    """A state matched with a manifest. `check` raises what does not fit; until then nothing is touched."""

    def __init__(self, manifest: Manifest, state: MutableMapping[str, Any], choice: Choice) -> None:
        self._manifest, self._choice = manifest, choice
        self._stored: dict[str, tuple[str, Stored]] = {}
        for name, tensor in manifest.tensors.items():
            for alias in (name, *tensor.tied):
                self._stored[alias] = (name, tensor)
        self.targets: list[Target] = []
        self.memories: list[Tensor] = []  # of the targets: tensors whose local memory is contiguous
        self.matched: list[str] = []
        self.missing: list[str] = []
        self.skipped: list[str] = []
        self.converted: dict[str, str] = {}
        self.apart: list[Apart] = []
        self._faults: list[str] = []
        self._wanted: list[tuple[str, str, Tensor]] = []
        self._used: set[str] = set()
        self._after: list[Callable[[], None]] = []
        self._names = parameter_names(state)
        values = manifest.values if isinstance(manifest.values, dict) else {}
        for key in state:
            if key != PLAN_KEY:
                self._item(key, state, key, values.get(key, _ABSENT))
        self._fill_all()
        self.extra = self._unused(state, values)

    def check(self, gathered: Callable[[str, bytes], Sequence[bytes]]) -> None:
        """Raises MismatchError for what does not fit, on all ranks. `gathered`: a session's `gather`.

        Under pipeline stages a rank has a part of the names. Extra is what no rank has, and of the choice nothing
        matches what matches on no rank.
        """
        untied = {apart.name: apart.first for apart in self.apart if apart.name not in self._used}
        mine = self.extra, self._choice.idle, untied, len(self.matched)
        everywhere = [json.loads(text) for text in gathered("extra", json.dumps(mine).encode())]
        extras, idles, unties, counts = zip(*everywhere)
        for others in unties:  # two tensors differ if any rank's parts do
            untied |= others
        extra, idle = set.intersection(*map(set, extras)) | untied.keys(), set.intersection(*map(set, idles))
        self.extra = [name for name in self._manifest.tensors if name in extra]
        if idle:
            raise MismatchError(
                "load", f"{', '.join(sorted(idle))} matches nothing", (),
                [
                    ('only="model.*"', "globs over names of the state, with its keys"),
                    ('rename={"encoder.*": "body.*"}', "the checkpoint's names in a model, without the model's key"),
                ],
            )  # fmt: skip
        self._check(untied, any(counts))

    def joined(self, name: str) -> None:
        """A name of `apart` has the values of its first: nothing of the checkpoint is lost."""
        self._used.add(name)
        self.extra.remove(name)

    def apply(self) -> None:
        """Sets everything that is not memory of the state's own tensors."""
        for step in self._after:
            step()
        forget_all()
        for _, _, tensor in self._wanted:
            written(tensor)

    # --- one entry of the state -----------------------------------------------------

    def _item(self, path: str, container: Any, key: Any, saved: Any) -> None:
        value = container[key]
        if isinstance(value, Tensor):
            name = _part(saved, "$tensor")
            self._fill(path, name if isinstance(name, str) else path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value, _part(saved, "$module"))
        elif is_optimizer(value):
            self._optimizer(path, value, of_torch(saved) or _part(saved, "$optimizer"))
        elif hasattr(value, "state_dict"):
            self._object(path, value, saved)
        elif isinstance(value, dict) and value and (saved is _ABSENT or _is_plain(saved)):
            for inner, item in value.items():
                full = f"{path}.{inner}"
                if isinstance(item, Tensor):  # as most of many
                    self._fill(full, full, item)
                else:
                    self._item(full, value, inner, _ABSENT if saved is _ABSENT else saved.get(inner, _ABSENT))
        elif isinstance(value, list) and isinstance(saved, list) and len(value) == len(saved):
            for i in range(len(value)):
                self._item(f"{path}.{i}", value, i, saved[i])
        elif type(value) is tuple and _holds_objects(value) and _length(_part(saved, "$tuple")) == len(value):
            items = list(value)
            for i, one in enumerate(saved["$tuple"]):
                self._item(f"{path}.{i}", items, i, one)
            self._after.append(lambda: container.__setitem__(key, tuple(items)))
        elif isinstance(value, dict) and _holds_objects(value) and _length(_part(saved, "$dict")) is not None:
            kept = self._by_key(saved["$dict"])
            for inner in value:
                self._item(f"{path}.{inner}", value, inner, kept.get(inner, _ABSENT))
        elif not self._choice.takes(path):
            self.skipped.append(path)
        elif saved is _ABSENT:
            self.missing.append(path)
        elif _holds_objects(value):
            kinds = f"a {type(value).__name__} of {len(value)} that holds tensors or objects"
            self._faults.append(f"{path}  is {kinds}, saved as {shown(saved, 80)}")
        else:
            loaded = decode(saved, cache(self._fresh))  # now, so that what is none fails before anything is touched
            self.matched.append(path)
            self._after.append(lambda: container.__setitem__(key, as_kind_of(value, loaded)))

    def _by_key(self, pairs: list) -> dict[Any, Any]:
        """The encoded values of a dict whose keys are not plain text."""
        try:
            return {decode(key, self._fresh): value for key, value in pairs}
        except (TypeError, ValueError) as error:
            raise FormatError("load", f"{shown(pairs, 80)} are not the pairs of a dict") from error

    def _module(self, path: str, module: nn.Module, saved: Any) -> None:
        index = self._index(f"{path}.")
        first, extra = first_names(module), {}
        for name, value in module.state_dict().items():
            full = f"{path}.{name}"
            if not isinstance(value, Tensor):
                if isinstance(saved, dict) and name in saved and self._choice.takes(full):
                    extra[name] = decode(saved[name], self._fresh)
            elif first.get(name, name) != name:
                self._alias(index.get(name), index.get(first[name]), value)
            else:
                aliases = [alias for alias, one in first.items() if one == name] or [name]
                found = next((index[alias] for alias in aliases if alias in index), full)
                self._fill(full, found, value)
        if extra:
            self._after.append(lambda: module.load_state_dict(extra, strict=False) and None)

    def _alias(self, mine: str | None, firsts: str | None, tensor: Tensor) -> None:
        """A further name of a tied parameter: served by the first if the checkpoint ties them too."""
        if mine is None:
            return
        name = self._stored[mine][0]
        if firsts is None or name == self._stored[firsts][0]:
            self._used.add(name)
        elif self._choice.only is None and not self._choice.ignores_extra:
            layout = tensor.mesh_layout if type(tensor) is DTensor else None
            self.apart.append(Apart(name, self._stored[firsts][0], tensor, _held(tensor, layout)))

    def _optimizer(self, path: str, optimizer: Any, saved: Any) -> None:
        if not any(self._choice.takes(f"{path}.{part}") for part in ("state.", "groups")):
            self.skipped.append(path)
            return
        saved = saved if isinstance(saved, dict) else {"state": {}, "groups": []}
        own = [group["params"] for group in optimizer_parts(optimizer, self._names, materialize=False)["param_groups"]]
        by_number = numbers(saved, own)
        if by_number is None:
            theirs = [len(group["params"]) for group in saved["groups"]]
            self._faults.append(
                f"{path}: was saved by numbers of parameters, of groups of {theirs}, where this optimizer's have "
                f"{[len(names) for names in own]}; torch's get_state_dict saves names, which load anywhere"
            )
            return

        def named(saved_name: str) -> str:
            return by_number.get(saved_name) or self._choice.renamed(saved_name)

        index: dict[str, dict[str, str]] = {}
        for rest, name in self._index(f"{path}.state.", renames=False).items():
            parameter, _, key = rest.rpartition(".")
            index.setdefault(named(parameter), {})[key] = name
        values = {named(name): entries for name, entries in saved["state"].items()}
        groups = [
            {**group, "params": [named(str(one)) for one in decode(group["params"], self._fresh)]}
            for group in saved["groups"]
        ]
        load = self._sharded_optimizer if hasattr(optimizer, "sharded_state_dict") else self._plain_optimizer
        load(path, optimizer, index, values, groups)

    def _sharded_optimizer(self, path: str, optimizer: Any, index: Mapping, values: Mapping, groups: list) -> None:
        parts = optimizer_parts(optimizer, self._names, materialize=True)
        for name in self._without_state(index, values, groups) & parts["state"].keys():
            self._after += [_zeroed(part) for part in parts["state"].pop(name).values() if isinstance(part, Tensor)]
        for name, entries in parts["state"].items():
            for key, value in entries.items():
                full = f"{path}.state.{name}.{key}"
                if isinstance(value, Tensor):
                    self._fill(full, index.get(name, {}).get(key, full), value)
                elif key in values.get(name, {}):
                    entries[key] = decode(values[name][key], self._fresh)
                    self.matched.append(full)
        for names, group in zip((group["params"] for group in parts["param_groups"]), optimizer.param_groups):
            for name, parameter in zip(names, group["params"]):
                if name not in parts["state"] and (entries := self._entries(path, name, parameter, {}, index, values)):
                    parts["state"][name] = entries  # of an optimizer whose first step alone says what it keeps
        names = [group["params"] for group in parts["param_groups"]]
        for options, group in self._groups(path, optimizer, names, groups):
            self._after.append(lambda group=parts["param_groups"][group], options=options: group.update(options))
        self._after.append(lambda: optimizer.load_sharded_state_dict(parts))

    def _plain_optimizer(self, path: str, optimizer: Any, index: Mapping, values: Mapping, groups: list) -> None:
        named, fresh = list(named_parameters_of(optimizer, self._names)), self._without_state(index, values, groups)
        for name, parameter in named:
            if name in fresh:
                self._after.append(lambda p=parameter: optimizer.state.pop(p, None) and None)
            entries = self._entries(path, name, parameter, optimizer.state.get(parameter, {}), index, values)
            if entries:
                self._after.append(lambda p=parameter, entries=entries: optimizer.state[p].update(entries))
        by_id = {id(parameter): name for name, parameter in named}
        names = [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        for options, group in self._groups(path, optimizer, names, groups):
            self._after.append(lambda group=optimizer.param_groups[group], options=options: group.update(options))

    def _entries(
        self, path: str, name: str, parameter: Tensor, there: Mapping, index: Mapping, values: Mapping
    ) -> dict[str, Any]:
        """A parameter's state as it was saved, to be filled: in the memory that is there, else in fresh."""
        entries: dict[str, Any] = {}
        for key, found in index.get(name, {}).items():
            entries[key] = self._state_tensor(parameter, there.get(key), found)
            self._fill(f"{path}.state.{name}.{key}", found, entries[key])
        for key, value in values.get(name, {}).items():
            entries[key] = decode(value, self._fresh)
            self.matched.append(f"{path}.state.{name}.{key}")
        return entries

    def _without_state(self, index: Mapping, values: Mapping, groups: list) -> set[str]:
        """Parameters that the saved optimizer had, and no state of: no step was taken yet, or they are frozen."""
        return {name for group in groups for name in group["params"]} - index.keys() - values.keys()

    def _state_tensor(self, parameter: Tensor, there: Any, name: str) -> Tensor:
        """The memory for one tensor of a parameter's state: what is there, or fresh and laid out like the parameter."""
        tensor = self._stored[name][1]
        dtype = DTYPES[tensor.dtype]
        if isinstance(there, Tensor):
            return there
        if tensor.shape == tuple(parameter.shape):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return torch.empty(tensor.shape, dtype=dtype)

    def _groups(self, path: str, optimizer: Any, names: list[list[str]], saved: list) -> list[tuple[dict, int]]:
        """Returns, for each of the optimizer's groups, the saved options of the group that its parameters were in."""
        of = {name: i for i, group in enumerate(saved) for name in group["params"]}
        found = []
        for i, group in enumerate(names):
            sources = {of[name] for name in group if name in of}
            if not group and len(names) == len(saved):  # of a pipeline's stage that trains nothing
                sources = {i}
            if len(sources) > 1:
                self._faults.append(f"{path}: group {i} has parameters of the saved groups {sorted(sources)}")
            elif sources:
                options = saved[sources.pop()]["options"]
                options = decode(options, cache(self._fresh))
                other = another_kind(options, optimizer, optimizer.param_groups[i])
                if other is not None and not (self._choice.keeps_missing and self._choice.ignores_extra):
                    self._faults.append(f"{path}: group {i} {other}; only='model.*' loads no optimizer")
                found.append((options, i))
                self.matched.append(f"{path}.groups.{i}")
            elif group:
                self.missing.append(f"{path}.groups.{i}")
        return found

    def _object(self, path: str, value: Any, saved: Any) -> None:
        """Anything with state_dict and load_state_dict: the saved tree is rebuilt and handed over whole."""
        tree = _part(saved, "$state")
        if not self._choice.takes(path):
            self.skipped.append(path)
            return
        if tree is _ABSENT:
            self.missing.append(path)
            return
        own: dict[str, Tensor] = {}
        encode(value.state_dict(), path, lambda name, tensor: own.setdefault(name, tensor) is None or name)
        loaded = decode(tree, cache(lambda name: self._fresh(name, own.get(name))))
        self.matched.append(path)
        self._after.append(lambda: value.load_state_dict(loaded))

    # --- tensors --------------------------------------------------------------------

    def _index(self, prefix: str, *, renames: bool = True) -> dict[str, str]:
        """Maps the state's names of stored tensors under a prefix, without it, to their stored (or tied) names."""
        size = len(prefix)
        return {
            (self._choice.renamed(name[size:]) if renames else name[size:]): name
            for name in self._stored
            if name.startswith(prefix)
        }

    def _fresh(self, name: str, like: Tensor | None = None) -> Tensor:
        """New memory for a stored tensor, laid out like `like` if that is a DTensor of the same shape."""
        if name not in self._stored:
            raise MismatchError("load", f"the checkpoint names a tensor {name!r} that it does not hold")
        tensor = self._stored[name][1]
        dtype = DTYPES[tensor.dtype]
        if type(like) is DTensor and tuple(like.shape) == tensor.shape:
            fresh = torch.empty_like(like.detach(), dtype=dtype)
        else:
            fresh = torch.empty(tensor.shape, dtype=dtype)
        self._fill(name, name, fresh)
        return fresh

    def _fill(self, full: str, name: str, tensor: Tensor) -> None:
        """Notes that `tensor`, called `full` in the state, is to be filled from the stored `name`."""
        self._wanted.append((full, name, tensor))

    def _fill_all(self) -> None:
        """Makes targets of what was noted: in one go, as there may be many."""
        choice, stored_, used, targets = self._choice, self._stored, self._used, self.targets
        takes_all = choice.only is None
        copies: list[Callable[[], None]] = []
        with local_only():
            for full, name, tensor in self._wanted:
                found = stored_.get(name)
                if not (takes_all or choice.takes(full)):
                    self.skipped.append(full)
                    if found is not None:
                        used.add(found[0])
                    continue
                if found is None:
                    self.missing.append(full)
                    continue
                canonical, kept = found
                used.add(canonical)
                layout = tensor.mesh_layout if type(tensor) is DTensor else None
                if tensor.is_meta:
                    self._faults.append(f"{full}  is on the meta device, where nothing can be loaded")
                    continue
                shape = tuple(tensor.shape) if layout is None else layout.shape
                if shape != kept.shape:
                    self._faults.append(f"{full}  has shape {list(shape)}, saved {list(kept.shape)}")
                    continue
                dtype = NAMES.get(tensor.dtype, "a dtype that is not stored")
                if dtype != kept.dtype:
                    cast = f"{kept.dtype}->{dtype}"
                    if not choice.permits(kept.dtype, dtype):
                        self._faults.append(f"{full}  is {dtype}, saved as {kept.dtype}: cast={cast!r} permits it")
                        continue
                    self.converted[full] = cast
                self.matched.append(full)
                pieces = _held(tensor, layout)
                memory = tensor
                if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                    local = _detach(tensor)
                    memory = torch.empty(local.shape, dtype=local.dtype, device=local.device)
                    copies.append(lambda local=local, memory=memory: local.copy_(memory))
                targets.append(Target(full, canonical, kept, pieces, dtype))
                self.memories.append(memory)
        self._after[:0] = copies  # before objects are handed their tensors

    # --- what does not fit ----------------------------------------------------------

    def _unused(self, state: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
        extra = []
        for name in self._manifest.tensors:
            if name in self._used:
                continue
            asked = any(name == key or name.startswith(f"{key}.") for key in state)
            (extra if asked and self._choice.only is None else self.skipped).append(name)
        self.skipped.extend(key for key in values if key not in state)
        return extra

    def _check(self, untied: Mapping[str, str], matches: bool) -> None:
        keeps = self._choice.keeps_missing and (matches or not self.missing)  # else there is nothing that it would load
        missing = [] if keeps else self.missing
        extra = [] if self._choice.ignores_extra else self.extra
        if missing or extra or self._faults:
            raise misfit(
                missing, extra, self._faults, self.missing, self.extra, untied, self._stored.keys(), matches=matches
            )


def _zeroed(tensor: Tensor) -> Callable[[], None]:
    """Makes a state what it is before the first step."""

    def zero() -> None:
        with local_only():
            tensor.detach().zero_()

    return zero


def _held(tensor: Tensor, layout: Layout | None) -> Sequence[Piece]:
    """Returns the pieces of a tensor in this rank's memory."""
    return _pieces(tuple(tensor.shape)) if layout is None else pieces_of(layout, layout.mesh.coordinate)


@lru_cache(maxsize=4096)
def _pieces(shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """Pieces of a tensor that is whole here."""
    return (stored(full_box(shape)),) if prod(shape) else ()


def _part(saved: Any, kind: str) -> Any:
    return saved[kind] if isinstance(saved, dict) and set(saved) == {kind} else _ABSENT


def _length(saved: Any) -> int | None:
    return len(saved) if isinstance(saved, list) else None


def _holds_objects(value: Any) -> bool:
    """True if a container holds objects that are filled in place, and so must not be replaced by a value."""
    inside = parts(value)
    return inside is not None and any(
        isinstance(item, Tensor) or hasattr(item, "state_dict") or _holds_objects(item) for item in inside.values()
    )


def _is_plain(saved: Any) -> bool:
    return isinstance(saved, dict) and next(iter(saved), "")[:1] != "$"

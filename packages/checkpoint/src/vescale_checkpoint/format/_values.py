"""Python values as JSON and back, exactly: what a checkpoint holds beside tensors.

JSON's own kinds stand for themselves. Everything else is an object with one key
that begins with "$": tuples, dicts with other keys than text, floats that JSON
lacks, bytes, dtypes, devices, numpy's numbers and arrays, and the place of a tensor. A value that is none of
these is an error when it is saved, with what to do instead; nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._errors import CheckpointError, FormatError, MismatchError, UnsafeError
from ._dtypes import DTYPES, NAMES
from ._text import reason_of, shown

MOST_LEVELS = 64  # of containers in each other, which as JSON are at most three times as many
MOST_BITS = 8192  # of an int: Python reads and writes the digits of no more than about 14,000
MOST_ARRAY_BYTES = 1 << 20  # of one of numpy's: beside the manifest's text, a tensor is for more
_NUMBERS = "biufc"  # numpy's kinds of dtypes that hold numbers
NAMES_KEY = "$names"  # a list of names that different ranks hold parts of
_DICTS = (dict, OrderedDict, defaultdict)


def encode(value: Any, path: str, tensor: Callable[[str, Tensor], str], level: int = 0) -> Any:
    """JSON for `value`; `tensor` is told of each tensor found, by its path, and gives the name it is stored under.

    Raises UnsafeError that names the path of what cannot be stored. `level`: in how many containers the value stands.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if level > MOST_LEVELS and kind in (*_DICTS, list, tuple, torch.Size, Counter):
        raise UnsafeError("save", f"{path[:200]!r} is nested more than {MOST_LEVELS} deep")
    if kind is int:
        if value.bit_length() > MOST_BITS:
            raise UnsafeError(
                "save", f"{path!r} is an int of {value.bit_length()} bits, and the format holds {MOST_BITS}",
                (), [("store its bytes", "value.to_bytes(...)")],
            )  # fmt: skip
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": tensor(path, value)}
    if kind in _DICTS:
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {
                key: encode(item, f"{path}.{key}" if path else key, tensor, level + 1) for key, item in value.items()
            }
        return {"$dict": _pairs(value, path, tensor, level + 1)}
    if kind is list:
        return [encode(item, f"{path}.{i}", tensor, level + 1) for i, item in enumerate(value)]
    if kind is tuple or kind is torch.Size:
        return {"$tuple": [encode(item, f"{path}.{i}", tensor, level + 1) for i, item in enumerate(value)]}
    if kind is Counter:
        return {"$counter": _pairs(value, path, tensor, level + 1)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    is_number = isinstance(value, np.generic)
    if (is_number or kind is np.ndarray) and value.dtype.kind in _NUMBERS and value.nbytes <= MOST_ARRAY_BYTES:
        shape = None if is_number else list(value.shape)
        return {"$numpy": [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]}
    if kind is torch.dtype and value in NAMES:
        return {"$dtype": NAMES[value]}
    if kind is torch.device:
        return {"$device": str(value)}
    raise UnsafeError(
        "save",
        f"{path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without pickle",
        (),
        [
            ("give it a state_dict() of tensors and plain values, and load_state_dict()", ""),
            ("save value.tolist(), or torch.as_tensor(value)", "for numpy's texts, dates, and arrays above 1 MiB"),
        ],
    )


def _pairs(value: Mapping, path: str, tensor: Callable[[str, Tensor], str], level: int) -> list:
    def one(i: int, key: Any, item: Any) -> list:
        place = f"{path}.{key}" if type(key) in (int, str) else f"{path}.item{i}"
        return [encode(key, f"{place}.key", tensor, level), encode(item, place, tensor, level)]

    return [one(i, key, item) for i, (key, item) in enumerate(value.items())]


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that was encoded; `tensor` gives the tensor of a name. Raises FormatError for what is no encoding."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind[:1] != "$":
        return {key: decode(item, tensor) for key, item in value.items()}
    read = _DECODERS.get(kind)
    try:
        if read is not None and len(value) == 1:
            return read(value[kind], tensor)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise FormatError("load", f"{shown(value)} is not a value of this format: {reason_of(error)}") from error
    raise FormatError("load", f"{shown(kind)} is not a kind of value that this version reads")


def _read_pairs(pairs: Any, tensor: Callable[[str], Any]) -> dict:
    return {decode(key, tensor): decode(item, tensor) for key, item in pairs}


def _read_numpy(parts: Any, _: Callable[[str], Any]) -> Any:
    text, shape, data = parts
    dtype = np.dtype(text if type(text) is str else object)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"{shown(text)} is no dtype of numbers")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype).copy()
    if shape is None:
        return array.reshape(())[()]
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shown(shape)} is no shape")
    return array.reshape(shape)


_DECODERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "$float": lambda text, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "$tensor": lambda name, tensor: tensor(name),
    "$dict": _read_pairs,
    "$tuple": lambda items, tensor: tuple(decode(item, tensor) for item in items),
    "$counter": lambda pairs, tensor: Counter(_read_pairs(pairs, tensor)),
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$numpy": _read_numpy,
    "$dtype": lambda name, _: DTYPES[name],
    "$device": lambda text, _: torch.device(text),
    NAMES_KEY: lambda names, _: list(names),
}


def as_kind_of(there: Any, loaded: Any) -> Any:
    """`loaded` with its dicts as OrderedDicts or defaultdicts where `there` has such: they are stored as dicts."""
    if isinstance(loaded, dict) and isinstance(there, dict):
        items = {key: as_kind_of(there.get(key), item) for key, item in loaded.items()}
        if type(there) is OrderedDict:
            return OrderedDict(items)
        return defaultdict(there.default_factory, items) if type(there) is defaultdict else type(loaded)(items)
    if isinstance(loaded, list | tuple) and isinstance(there, list | tuple):
        return type(loaded)(as_kind_of(*pair) for pair in zip(there, loaded)) if len(there) == len(loaded) else loaded
    return loaded


def merge(values: list[Any], path: str = "") -> Any:
    """One encoded value of those of several ranks: dicts are united, names too, all else must be equal.

    Raises MismatchError that names the first path at which two ranks differ.
    """
    first = values[0]
    if all(value == first for value in values[1:]):
        return first
    if all(isinstance(value, dict) for value in values):
        if all(set(value) == {NAMES_KEY} for value in values):
            return {NAMES_KEY: list(dict.fromkeys(name for value in values for name in value[NAMES_KEY]))}
        if not any(key[:1] == "$" and key not in _UNITED for value in values for key in value):
            keys = dict.fromkeys(key for value in values for key in value)
            return {
                key: merge([value[key] for value in values if key in value], f"{path}.{key}" if path else key)
                for key in keys
            }
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [merge(list(items), f"{path}.{i}") for i, items in enumerate(zip(*values))]
    odd = next(rank for rank, value in enumerate(values) if value != first)
    raise MismatchError(
        "save",
        f"the value of {path!r} is not the same on all ranks",
        [f"rank 0  {shown(first)}", f"rank {odd}  {shown(values[odd])}"],
        [
            ("make it the same on every rank", "it is stored once"),
            (f'{{f"rank{{rank}}": {path.rpartition(".")[2] or "value"}}}', "a separate key for each rank"),
        ],
    )


_UNITED = ("$module", "$optimizer", "$state")

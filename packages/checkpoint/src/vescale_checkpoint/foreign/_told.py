"""Recognizes other formats by their first bytes, and names the command that gets such weights into a model."""

from __future__ import annotations

import contextlib
import fnmatch
import posixpath
import re
from collections.abc import Iterator

from .. import dcp
from .._errors import CheckpointError, FormatError, StorageError, UnsafeError
from ..io import _huggingface
from ..io._storage import Storage
from ..manifest import NAME

_MOST_LEVELS, _MOST_ENTRIES = 3, 512
_HEAD_BYTES = 512
_ARCHIVE, _PICKLE = (b"PK\x03\x04", b"/data.pkl"), b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of torch.save's files, with the first name in its archives; and of those from before torch 1.6."""
_GGUF = b"GGUF"
_SHARDED = {  # what only its writer's own program joins
    "*mp_rank_*_model_states.pt": (
        "DeepSpeed",
        "python {folder}/zero_to_fp32.py {folder} OUT --safe_serialization",
        "the script that DeepSpeed puts there; then load(OUT, ...)",
    ),
    "*mp_rank_*/model_optim_rng.pt": (
        "Megatron-LM",
        "python tools/checkpoint/convert.py --model-type GPT --loader core --saver ...",
        "in Megatron-LM; what it writes in HuggingFace's format is loaded",
    ),
}


def told(storage: Storage, path: str) -> CheckpointError | None:
    """The error of a load that says what `path` is, and which command converts it; None if that is not known."""
    with contextlib.suppress(OSError):
        if not storage.is_dir(path):
            return _file(storage, path, path) if storage.exists(path) else None
        found = list(_entries(storage, path))
        inner = [name for name, is_dir in found if is_dir and _is_read(storage, f"{path}/{name}")]
        if inner:
            newest = max(inner, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
            rule = f"no step is committed; what `load` reads lies inside, {len(inner)} in number"
            return StorageError(
                "load", rule, [f"path  {path}", *(f"inside  {name}" for name in inner[:8])],
                [(f"load({f'{path}/{newest}'!r}, ...)", "the one with the highest numbers" if inner[1:] else "")],
            )  # fmt: skip
        for name, is_dir in found:
            error = None if is_dir else _file(storage, f"{path}/{name}", path)
            if error is not None:
                return error
    return None


def _entries(storage: Storage, path: str) -> Iterator[tuple[str, bool]]:
    """Yields the entries of a directory and its subdirectories, upper ones first, and whether each is a directory."""
    waiting = [""]
    for _ in range(_MOST_ENTRIES):
        if not waiting:
            return
        folder = waiting.pop(0)
        for name in storage.names(f"{path}/{folder}".rstrip("/"))[:_MOST_ENTRIES]:
            inner = posixpath.join(folder, name)
            is_dir = storage.is_dir(f"{path}/{inner}")
            yield inner, is_dir
            if is_dir and inner.count("/") + 1 < _MOST_LEVELS:
                waiting.append(inner)


def _is_read(storage: Storage, folder: str) -> bool:
    is_ours = storage.exists(f"{folder}/{NAME}")
    return is_ours or dcp.is_folder(storage, folder) or _huggingface.is_folder(storage, folder)


def _file(storage: Storage, file: str, path: str) -> CheckpointError | None:
    """The error of a file that is known by its first bytes."""
    head = bytearray()
    with contextlib.suppress(OSError, EOFError), contextlib.closing(storage.open(file)) as reader:
        head = bytearray(min(_HEAD_BYTES, reader.nbytes))
        reader.read_into(head, 0)
    if head.startswith(_GGUF):
        code = f"AutoModel.from_pretrained({posixpath.dirname(file)!r}, gguf_file={posixpath.basename(file)!r})"
        remedies = [(f"{code}.save_pretrained(OUT)", "of transformers; then load(OUT, ...)")]
        return FormatError("load", "it is a file of llama.cpp (gguf)", [f"path  {file}"], remedies)
    if not (head.startswith(_ARCHIVE[0]) and _ARCHIVE[1] in head or head.startswith(_PICKLE)):
        return None
    rule, remedies = "it is a pickle of torch.save", []
    for pattern, (writer, code, cost) in _SHARDED.items():
        if fnmatch.fnmatch(file, pattern):
            rule = f"it is a checkpoint of {writer}, a pickle per rank"
            remedies = [(code.format(folder=path), cost)]
    remedies.append(
        (
            f"model.load_state_dict(torch.load({file!r}, weights_only=True))",
            "if the file holds a whole model; perhaps under a key, as ['module'], ['model'] or ['state_dict']",
        )
    )
    return UnsafeError("load", f"{rule}, which may run any code: it is not read", [f"path  {file}"], remedies)

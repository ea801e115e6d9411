"""The rows that `vescale train` trains on: documents are tokenised once, kept in files, and packed to a length."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .config import ConfigError, Data, library

_AT_ONCE = 1000
"""Documents that are tokenised in one call, on all cores."""
_PIECE = 1 << 20
"""Characters after which a long text is cut at the end of a line."""
_IGNORED = -100
_POLL_S, _TOLD_S, _SILENT_S = 0.2, 10.0, 600.0
"""Seconds between looks at who tokenises, until it is told, and that its files may stand still."""


class Bytes:
    """The tokenizer without files: a byte is a token, and 0 ends a document."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 256

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def tokenizer_of(data: Data, model: str | None) -> Any:
    """Returns the tokenizer that the configuration names; None for tokens without one."""
    name = data.tokenizer or (None if data.tokens is not None else model)
    if name is None or name == "bytes":
        return None if name is None else Bytes()
    transformers = library("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many types
        remedies = [('tokenizer = "bytes"', "needs no files"), ('tokenizer = "folder"', "with a tokenizer.json")]
        raise ConfigError("vescale train", f"there is no tokenizer {name!r}: {error}", (), remedies) from error


class Rows(Dataset):
    """Rows of `length` tokens, packed: inputs, labels, and positions where documents have positions of their own."""

    def __init__(self, data: Data, tokens: np.ndarray, counted: np.ndarray | None, end: int | None) -> None:
        self._length, self.tokens, self.counted = data.length, tokens, counted
        self.end = end if data.documents else None
        self._first, self._count = 0, len(tokens) // data.length

    def parted(self, held_out: float) -> tuple[Rows, Rows]:
        """Returns the rows to train on, and the last ones, which are held out."""
        kept = round(self._count * held_out) if held_out else 0
        train, rest = (object.__new__(Rows) for _ in range(2))
        train.__dict__ |= self.__dict__ | {"_count": self._count - kept}
        rest.__dict__ |= self.__dict__ | {"_count": kept, "_first": self._count - kept}
        return train, rest

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = (self._first + index) * self._length
        tokens = torch.from_numpy(self.tokens[at : at + self._length].astype(np.int64))
        row = {"input_ids": tokens, "labels": tokens}
        if self.counted is not None:
            counted = torch.from_numpy(self.counted[at : at + self._length].astype(bool))
            row["labels"] = tokens.where(counted, _IGNORED)
        if self.end is not None:
            places = torch.arange(self._length)
            begins = torch.cat([places.new_zeros(1), (places + 1).where(tokens == self.end, 0)[:-1]])
            row["position_ids"] = places - begins.cummax(0).values
        return row


def rows_of(data: Data, tokenizer: Any, vocabulary: int | None) -> Rows:
    """Returns the packed rows, tokenised now if no process has done so before.

    vocabulary: of the model, which has no row for a larger token. Raises ConfigError.
    """
    end = getattr(tokenizer, "eos_token_id", None)
    if data.documents and end is None:
        rule = "data.documents needs a tokenizer with a token that ends a document"
        remedies = [("documents = false", ""), ('tokenizer = "bytes"', "ends a document with 0")]
        raise ConfigError("vescale train", rule, (), remedies)
    if data.tokens is not None:
        tokens, counted = _given(data.tokens), None
    else:
        tokens, counted = _tokenised(data, tokenizer)
    if len(tokens) < data.length:
        rule = f"there are {len(tokens):,} tokens, and data.length = {data.length} needs more for a row"
        raise ConfigError("vescale train", rule, (), [(f"length = {max(len(tokens) // 100, 1)}", "or more text")])
    most = len(tokenizer) - 1 if tokenizer is not None else int(tokens.max())
    if vocabulary is not None and most >= vocabulary:
        rule = f"token {most} has no row in the model's vocabulary of {vocabulary}"
        raise ConfigError("vescale train", rule, (), [(f"vocab_size = {most + 1}", "in [model.config]")])
    return Rows(data, tokens, counted, end)


def _given(path: str) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        rule, remedies = f"data.tokens = {path!r} cannot be read: {error}", [("numpy.save(path, tokens)", "makes one")]
        raise ConfigError("vescale train", rule, (), remedies) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        rule = f"data.tokens = {path!r} holds {tokens.dtype} of shape {tokens.shape}, and not a line of integers"
        raise ConfigError("vescale train", rule, (), [("numpy.save(path, tokens.ravel().astype('uint32'))", "")])
    return tokens


class _Source(NamedTuple):
    """Data that is to be tokenised: what tells it from other data, and its documents."""

    identity: list[Any]
    documents: Callable[[], Iterator[dict[str, Any]]]


def _source(data: Data) -> _Source:
    pattern = data.text or data.rows or ""
    files = sorted(filter(os.path.isfile, glob.glob(os.path.expanduser(pattern), recursive=True)))
    if not files and data.text is not None:
        rule = f"data.text = {pattern!r} matches no file"
        raise ConfigError("vescale train", rule, (), [('text = "folder/*.txt"', "relative to where the command runs")])
    known = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    if data.text is not None:
        return _Source(known, lambda: ({"text": Path(file).read_text(errors="replace")} for file in files))
    if files:
        return _Source(known, lambda: _objects(files))
    datasets = library("datasets")
    try:
        held = datasets.load_dataset(pattern, split="train")
    except Exception as error:  # of the hub's, of many types
        rule = f"data.rows = {pattern!r} matches no file, and is no data set that datasets reads: {error}"
        remedies = [('rows = "data/*.jsonl"', "a JSON object a line"), ('rows = "owner/name"', "of the hub's")]
        raise ConfigError("vescale train", rule, (), remedies) from error
    return _Source([pattern, held._fingerprint], lambda: iter(held))


def _objects(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in files:
        with open(name, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = json.loads(line) if line.strip() else None
                except json.JSONDecodeError as error:
                    raise ConfigError("vescale train", f"{name}, line {number} is no JSON: {error}", (), ()) from error
                if found is not None:
                    yield found


def _tokenised(data: Data, tokenizer: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """The tokens, and which of them count in the loss (None: all), from the cache's files."""
    source = _source(data)
    kind = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    about = [source.identity, _identity(tokenizer), data.objective, kind.str]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    folder = Path(data.cache).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    tokens, counted = folder / f"{name}.tokens", folder / f"{name}.counted"
    with _alone(folder, name):
        if not tokens.exists():
            _write(source.documents(), data, tokenizer, kind, tokens, counted)
    masks = np.memmap(counted, np.uint8, "r") if data.objective == "sft" else None
    return np.memmap(tokens, kind, "r"), masks


def _identity(tokenizer: Any) -> list[Any]:
    """Tells a tokenizer from others, and from itself with another vocabulary or chat template."""
    rules = getattr(tokenizer, "backend_tokenizer", None)
    told = [getattr(tokenizer, name, None) for name in ("name_or_path", "chat_template", "eos_token_id")]
    return [*told, len(tokenizer), repr(type(tokenizer)), rules and rules.to_str()]


def _write(
    documents: Iterator[dict[str, Any]], data: Data, tokenizer: Any, kind: np.dtype, tokens: Path, counted: Path
) -> None:
    """The tokens' file appears when it is complete, after that of what counts."""
    encode = _dialogues if data.objective == "sft" else _texts
    drafts = [path.with_suffix(f"{path.suffix}.{os.getpid()}") for path in (tokens, counted)]
    with open(drafts[0], "wb") as ids, open(drafts[1], "wb") as masks:
        while some := list(islice(documents, _AT_ONCE)):
            for words, mask in encode(some, tokenizer):
                np.asarray(words, kind).tofile(ids)
                np.asarray(mask, np.uint8).tofile(masks)
    if not drafts[0].stat().st_size:
        raise ConfigError("vescale train", "the data holds no token", [str(data.text or data.rows)], ())
    os.replace(drafts[1], counted)
    os.replace(drafts[0], tokens)


Encoded = Iterator[tuple[list[int], list[int]]]


def _texts(documents: list[dict[str, Any]], tokenizer: Any) -> Encoded:
    """Each document with an end behind it, where the tokenizer has one."""
    pieces = [(piece, is_last) for one in documents for piece, is_last in _pieces(_column(one, "text"))]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = tokenizer([piece for piece, _ in pieces], add_special_tokens=False)["input_ids"]
    for words, (_, is_last) in zip(found, pieces):
        words = words + end if is_last else words
        yield words, [1] * len(words)


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """A text, long ones cut at ends of lines, and whether a piece is the last."""
    at = 0
    while len(text) - at > _PIECE and (cut := text.find("\n", at + _PIECE)) != -1 and cut + 1 < len(text):
        yield text[at : cut + 1], False
        at = cut + 1
    yield text[at:], True


def _dialogues(documents: list[dict[str, Any]], tokenizer: Any) -> Encoded:
    """Dialogues by the tokenizer's chat template; what the assistant says counts."""
    for one in documents:
        if "messages" not in one:
            turns = zip(("user", "assistant"), (_column(one, "prompt"), _column(one, "completion")))
            messages = [{"role": role, "content": text} for role, text in turns]
        else:
            messages = one["messages"]
        render = partial(tokenizer.apply_chat_template, return_dict=False)
        words = render(messages)
        mask = [0] * len(words)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                start, stop = len(render(messages[:at], add_generation_prompt=True)), len(render(messages[: at + 1]))
                mask[start:stop] = [1] * (stop - start)
        yield words, mask


def _column(row: dict[str, Any], name: str) -> str:
    if isinstance(row, dict) and isinstance(row.get(name), str):
        return row[name]
    has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
    raise ConfigError("vescale train", f"a row of the data has no text {name!r}", [f"it has  {has}"], ())


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Lets one process at a time in. A lock goes with its process, so that nobody waits for a dead one; one whose files
    stand still for _SILENT_S ends the wait with a ConfigError."""
    told, sizes, since = False, {}, time.monotonic()
    with open(folder / f"{name}.lock", "a") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            now, seen = time.monotonic(), sizes
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                seen = {one: one.stat().st_size for one in folder.glob(f"{name}.*.*")}
            if seen != sizes:
                sizes, since = seen, now
            if not told and now - since > _TOLD_S:
                told = True
                print(f"vescale train: another process tokenises the data ({file.name})", file=sys.stderr, flush=True)
            if now - since > _SILENT_S:
                rule = f"another process holds {file.name}, and has written no token for {_SILENT_S:.0f} s"
                raise ConfigError("vescale train", rule, (), [(f"fuser {file.name}", "names the process")])
            time.sleep(_POLL_S)
        yield

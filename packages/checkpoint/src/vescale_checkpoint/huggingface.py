"""HuggingFace folders, written so that `from_pretrained` loads them; `io/_huggingface.py` reads them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from vescale_dtensor import DTensor

from ._errors import ConflictError, UnsafeError
from .format._box import full_box, stored
from .format._dtypes import DTYPES, NAMES, SIZES, header_entry
from .io._storage import LocalStorage, Path, Storage, guarded, storage_of
from .io._write import Source, chunks_of, flat_of
from .plan._state import first_names
from .sync._sync import Session, session_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 << 30
Place = tuple[str, tuple[int, ...], tuple[int, ...]]
Places = Mapping[str, Sequence[Place]]


class FullTensor(NamedTuple):
    """A whole tensor that is to be written: made when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


def export_huggingface(
    path: Path,
    model: nn.Module,
    *,
    config: Any = None,
    also: Iterable[Any] = (),
    places: Places | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the model to a folder in HuggingFace's format, for `from_pretrained` or the hub. Call it on every rank.

    Arguments:
        path: the folder; it must not exist.
        model: its names are written unchanged, tied parameters once.
        config: any object with `save_pretrained(folder)`; by default the model's own `config`. The file names the
            model's class, as `save_pretrained` of a model does. A `generation_config` is written too.
        places: the names under which parts of a parameter are written in its place: name -> (name of a part, the
            indices at which it begins, its shape) each. `vescale.export_huggingface` asks transformers for them.
        also: further objects with `save_pretrained(folder)`, such as the tokenizer or a processor.
        shard_bytes: the largest size of a file, unless one tensor is larger.

    Raises ConflictError if the folder exists, StorageError, UnsafeError. Communication: an all-gather per sharded
    tensor, and the tensors of a pipeline's other stages are sent to rank 0. Rank 0 writes, and holds one whole tensor
    at a time.
    """
    with session_of("export") as session:
        first = first_names(model)
        own = _own(model.state_dict(), first)
        own = {one.name: one for name, whole in own.items() for one in in_parts(whole, (places or {}).get(name))}
        tensors = _of_all_ranks(session, own)
        config = getattr(model, "config", None) if config is None else config
        parts = [part for part in (config, getattr(model, "generation_config", None), *also) if part is not None]
        writes = session.rank == 0
        if writes:
            _check_absent(path)
        session.gather("begin")
        write_folder(path, tensors, lambda folder: _write_parts(folder, parts, model), shard_bytes, writes=writes)
        session.gather("written")


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Gathers the `model.state_dict()` of a single device, as full plain tensors in host memory, for other libraries to
    write: `torch.save`, safetensors, `save_pretrained(folder, state_dict=...)`, PEFT. Call it on every rank; the first
    one gets the state, the others an empty dict. It includes all stages of a pipeline, and tied names still share one
    tensor; any other tensor has memory of its own.

    Raises UnsafeError for a dtype that checkpoints do not support. Communication: an all-gather per sharded tensor, and
    the tensors of a pipeline's other stages are sent to rank 0, which holds the whole model.
    """
    with session_of("whole_state_dict") as session:
        first = first_names(model)
        state = model.state_dict()
        own = _own(state, first)
        made: dict[str, Any] = {}
        for one in _of_all_ranks(session, own):
            value = one.make()
            if session.rank == 0:
                value = value.cpu()
                # Others write a tensor's whole storage, and take two in one storage for tied weights.
                is_part = value.untyped_storage().nbytes() > value.nbytes
                made[one.name] = value.clone() if is_part else value
        aliases = {name: first[name] for name in state if first.get(name, name) != name}
        said = session.gather("made", json.dumps(aliases).encode())  # a pipeline's later stages have ties of their own
    if session.rank:
        return {}
    firsts = {alias: name for text in said for alias, name in json.loads(text).items()}
    tied = {alias: made[name] for alias, name in firsts.items() if alias not in made and name in made}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return {**dict.fromkeys(state), **made, **tied, **rest}


def _own(state: Mapping[str, Any], first: Mapping[str, str]) -> dict[str, FullTensor]:
    """The tensors of a state, tied ones under their `first` name alone."""
    return {
        name: FullTensor(name, _dtype(name, value), tuple(value.shape), partial(_full, value))
        for name, value in state.items()
        if isinstance(value, Tensor) and first.get(name, name) == name
    }


def in_parts(whole: FullTensor, places: Sequence[Place] | None) -> Iterator[FullTensor]:
    """The tensors that are written in place of one: made once, and held until the last of them is."""
    if places is None:
        yield whole
        return
    held: list[Tensor] = []

    def made(place: Place) -> Tensor:
        if not held:
            held.append(whole.make())
        _, begin, shape = place
        sizes = (*(1,) * (len(begin) - len(shape)), *shape)
        part = held[0][tuple(slice(at, at + size) for at, size in zip(begin, sizes))].reshape(shape)
        if place is places[-1]:
            held.clear()
        return part

    for place in places:
        yield FullTensor(place[0], whole.dtype, place[2], partial(made, place))


def _of_all_ranks(session: Session, own: dict[str, FullTensor]) -> list[FullTensor]:
    """Every tensor that some rank has, in the same order on all: this rank's own, and on rank 0 those that the first
    rank that has them sends there."""
    rows = json.dumps([(one.name, one.dtype, one.shape) for one in own.values()]).encode()
    said = session.gather("names", rows)
    if all(text == said[0] for text in said):
        return list(own.values())
    found: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    for rank, text in enumerate(said):
        for name, dtype, shape in json.loads(text):
            found.setdefault(name, (rank, dtype, tuple(shape)))
    return [
        FullTensor(name, dtype, shape, partial(_sent, session, own.get(name), source, dtype, shape))
        for name, (source, dtype, shape) in found.items()
        if name in own or session.rank == 0
    ]


def _sent(session: Session, own: FullTensor | None, source: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor, on the ranks that have it and on rank 0."""
    made = own.make() if own is not None else None
    if source and session.rank in (0, source):
        return session.sent_to_first(made, source, shape, DTYPES[dtype])
    return cast(Tensor, made)  # listed where it is held or sent to


def write_folder(
    path: str | os.PathLike[str], tensors: Sequence[FullTensor], finish: Callable[[str], None] = lambda folder: None,
    shard_bytes: int = SHARD_BYTES, *, writes: bool = True, progress: Callable[[int], None] = lambda nbytes: None,
) -> None:  # fmt: skip
    """Writes the tensors in order, and commits the folder by one rename. `writes=False` only makes them.

    `finish` is given the folder before that, where it is one of this machine.
    """
    storage, folder = storage_of(path, "export")
    if not writes:
        for tensor in tensors:
            tensor.make()
        return
    _check_absent(path)
    local = isinstance(storage, LocalStorage)
    draft = f"{folder}.tmp-{secrets.token_hex(4)}" if local else folder
    with guarded("export", draft, "cannot make the folder"):
        storage.make_dirs(draft)
    try:
        shards = _shards(tensors, shard_bytes)
        names = [SINGLE] if len(shards) == 1 else [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]  # fmt: skip
        for name, shard in zip(names, shards):
            _write_shard(storage, f"{draft}/{name}", shard, progress)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
                "weight_map": {tensor.name: name for name, shard in zip(names, shards) for tensor in shard},
            }
            _write_text(storage, f"{draft}/{INDEX}", json.dumps(index, indent=2))
        if isinstance(storage, LocalStorage):
            finish(draft)
            with guarded("export", folder, "cannot commit the folder"):
                storage.sync_dir(draft)
                storage.rename(draft, folder)
    except BaseException:
        if local:
            storage.remove_tree(draft)
        raise


def _write_parts(folder: str, parts: Sequence[Any], model: nn.Module) -> None:
    """Configurations and the like, by their own `save_pretrained`; and the model's class, which a model's adds."""
    for part in parts:
        part.save_pretrained(folder)
    path = f"{folder}/config.json"
    if os.path.exists(path):
        with open(path) as file:
            fields = json.load(file)
        if not fields.get("architectures"):
            with open(path, "w") as file:
                json.dump({**fields, "architectures": [type(model).__name__]}, file, indent=2)
                file.write("\n")


def _write_shard(storage: Storage, path: str, tensors: Iterable[FullTensor], progress: Callable[[int], None]) -> None:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        code, shape = header_entry(tensor.dtype, tensor.shape)
        fields[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": (at, at + tensor.nbytes)}
        at += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with guarded("export", path, f"cannot write {8 + len(text) + at} bytes"):
        writer = storage.create(path)
        try:
            writer.write([len(text).to_bytes(8, "little"), text])
            for tensor in tensors:
                flat = flat_of(tensor.make())
                if len(flat):
                    for chunk in chunks_of(Source(flat, stored(full_box(tensor.shape)))):
                        writer.write([chunk])
                        progress(len(chunk))
        finally:
            writer.close()


def _write_text(storage: Storage, path: str, text: str) -> None:
    with guarded("export", path, "cannot write the index"):
        writer = storage.create(path)
        writer.write([text.encode()])
        writer.close()


def _shards(tensors: Sequence[FullTensor], most: int) -> list[list[FullTensor]]:
    shards: list[list[FullTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.nbytes > most:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def _check_absent(path: str | os.PathLike[str]) -> None:
    storage, folder = storage_of(path, "export")
    if storage.exists(folder):
        raise ConflictError("export", "the folder exists", [f"path  {folder}"], [("export to a new folder", "")])


def _dtype(name: str, tensor: Tensor) -> str:
    found = NAMES.get(tensor.dtype)
    if found is None:
        raise UnsafeError("export", f"{name!r} is of {tensor.dtype}, which safetensors does not have")
    return found


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

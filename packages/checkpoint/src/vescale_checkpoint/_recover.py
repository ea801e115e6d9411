"""Brings the newest step that the nodes' memory holds as a whole to the run's directory, where `load` looks."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import manifest
from ._errors import CheckpointError
from .format._step import folder_of
from .io import _node
from .io._commit import Root
from .io._read import Files
from .io._source import Source, read_manifest
from .io._storage import Path, guarded
from .sync._sync import Session
from .tools import file_faults, sections_by_file

_log = logging.getLogger("vescale")


class _Step(NamedTuple):
    """A step in memory. `nodes`: those that committed it; of each file, `wrote`: that which wrote it, `holders`: those
    that have it."""

    number: int
    identity: str
    nodes: list[str]
    wrote: dict[str, str]
    holders: dict[str, list[str]]


def recover(session: Session, path: Path, *, says: bool = True) -> None:
    """Commits the newest step that the memory of the nodes of all ranks holds as a whole, with all checksums, in the
    run's directory, if it is newer than those there. Call it on every rank; rank 0 says it in the log.

    Never a mixture: of a step of which a part is lost on all nodes nothing is used. Communication: a few hundred bytes
    through the store; the data goes through the run's directory.
    """
    root, began = Root(path, session.operation), time.monotonic()
    mark = session.gather("mark", _node.mark_of(root).encode() if session.rank == 0 else b"")[0].decode()
    if not mark:
        return
    here = _node.memory(mark, session.operation)
    own = "" if here is None else _node.node(session.operation)
    newest = max(root.committed(), default=-1) if session.rank == 0 else -1
    told = json.dumps([own, newest, list(_listed(here)) if own else []]).encode()
    said = [json.loads(text) for text in session.gather("steps", told)]
    newest, lost, ranks = said[0][1], "", {node: [] for node, *_ in said if node}
    for rank, (node, *_) in enumerate(said):
        if node:
            ranks[node].append(rank)
    for step in _merged({node: listed for node, _, listed in said if node}):
        if step.number <= newest:
            break
        if came := _brought(session, root, here, own, ranks, step):
            lost += f"step {step.number} of {root.given} is back from memory: {came}; {time.monotonic() - began:.1f} s"
            break
        lost += f"step {step.number} of {root.given} was in memory, and no node that is left has all of it; "
    else:
        says = says and session.operation == "protect"  # who else looks may be on other nodes than the job
        lost = lost if ranks else f"what memory held of {root.given} is lost with its nodes; "
        if lost:
            lost += f"the newest step is {newest}, on disk" if newest >= 0 else "there is none on disk"
    if says and lost and session.rank == 0:
        _log.warning("%s", lost)


def _listed(here: Root) -> Iterator[tuple[int, str, dict[str, str], list[str]]]:
    """A node's steps: number, identity, who wrote each file, and the files that are here."""
    for number in here.committed():
        folder = f"{here.path}/{folder_of(number)}"
        with contextlib.suppress(CheckpointError):  # one that cannot be read is none
            kept, found = manifest.parse(read_manifest(here.storage, folder), folder), []
            for file in kept.files:
                with contextlib.suppress(CheckpointError):
                    _check(Source(here.storage, folder, kept), [file])
                    found.append(file)
            yield number, kept.identity, {file: kept.about["nodes"][int(file[:5])] for file in kept.files}, found


def _check(source: Source, names: Sequence[str]) -> None:
    """Raises CheckpointError where files are not there, or have other sizes or headers."""
    with contextlib.closing(Files(source.storage, source.folder, source.manifest.files, True)) as files:
        files.check(names)


def _merged(listed: Mapping[str, Any]) -> list[_Step]:
    """The steps of all nodes, the newest first."""
    steps: dict[tuple[int, str], _Step] = {}
    for node, rows in listed.items():
        for number, identity, wrote, found in rows:
            fresh = _Step(number, identity, [], wrote, {file: [] for file in wrote})
            step = steps.setdefault((number, identity), fresh)
            step.nodes.append(node)
            for file in found:
                step.holders[file].insert(0 if node == wrote[file] else len(step.nodes), node)
    return [steps[key] for key in sorted(steps, reverse=True)]


def _brought(
    session: Session, root: Root, here: Root | None, own: str, ranks: Mapping[str, list[int]], step: _Step
) -> str:
    """Says from where the files came; "" if a file is nowhere as it was written."""
    if not all(step.holders.values()):
        return ""
    todo, came, first = sorted(step.wrote), {}, ranks[step.nodes[0]][0]
    folder = f"{here.path if here else ''}/{folder_of(step.number)}"
    own_text = read_manifest(here.storage, folder) if session.rank == first else b""
    text = session.gather(f"manifest {step.identity}", own_text)[first]
    kept, draft = manifest.parse(text, root.path), None
    sections, source = sections_by_file(kept), Source(here.storage if here else root.storage, folder, kept)
    try:
        if session.rank == 0:
            draft = root.begin(step.number, overwrite=False)
            draft.mark()
        name = session.gather(f"draft {step.identity}", draft.name.encode() if draft else b"")[0].decode()
        for tries in range(len(step.nodes)):
            if not todo or not all(step.holders[file] for file in todo):
                break
            came |= {file: step.holders[file].pop(0) for file in todo}
            of = {file: ranks[came[file]] for file in todo}
            mine = [file for at, file in enumerate(todo) if of[file][at % len(of[file])] == session.rank]
            wrong = [file for file in mine if not _copied(source, file, sections[file], root, name)]
            parts = session.gather(f"copied {step.identity} {tries}", json.dumps(wrong).encode())
            todo = sorted(file for part in parts for file in json.loads(part))
        if draft and not todo:
            _check(Source(root.storage, draft.path, kept), sorted(kept.files))
            draft.commit(text)
        session.gather(f"committed {step.identity}")
    finally:
        if draft:
            draft.discard()  # unless it is committed
    copies = sum(step.wrote[file] != node for file, node in came.items())
    told = f"{len(came) - copies} of its {len(came)} files as their nodes wrote them, {copies} from a neighbour's copy"
    return "" if todo else told


def _copied(source: Source, file: str, sections: Sequence[Any], root: Root, draft: str) -> bool:
    """False if the file is not as it was written."""
    try:
        if any(file_faults(source, file, sections)):
            return False
    except CheckpointError:
        return False
    path, doing = f"{root.path}/{draft}/{file}", f"cannot write {source.manifest.files[file].nbytes} bytes"
    with guarded(root.operation, path, doing), contextlib.closing(root.storage.create(path)) as writer:
        writer.write([np.memmap(f"{source.folder}/{file}", np.uint8, "r")])
    return True

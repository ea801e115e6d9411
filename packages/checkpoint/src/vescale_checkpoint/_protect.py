"""Steps in the memory of the nodes, beside those on disk: what a job that is killed goes on from.

One save into memory is a save like any other (`_job`), into a folder per node: each rank writes into its own node's,
a rank of the next node has a copy, and every node commits with the same manifest. A step is whole if the nodes that
are left hold all of its files; `_recover` brings the newest whole one to the run's directory, from where it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import manifest
from ._errors import MismatchError
from ._job import PendingSave, SaveJob, started, wait_for_save
from ._recover import recover
from .format._step import step_number
from .io import _node
from .io._commit import Root
from .io._source import read_manifest
from .io._storage import Path, guarded
from .manifest import FileInfo
from .plan._state import Contents, contents_of
from .sync._neighbours import Nodes, exchange
from .sync._sync import Session, session_of


def protect(path: Path, state: Mapping[Any, Any], *, every: int = 10, copies: int = 1) -> Protected:
    """Keeps `state` in the nodes' memory beside training, as steps that `load` and `latest` find. Call it on every
    rank, in a `with`:

        with vescale.protect("runs/one", state, every=10) as protected:
            while state["step"] < 1000:
                ...  # one step
                state["step"] += 1
                protected.step()

    Arguments:
        path: the run's directory. Steps that are saved there stay as they are.
        state: as for `save`; `state["step"]` is the number of the last step.
        every: how many steps there are from one that is kept to the next. The one before stays until the next is whole.
        copies: on how many other nodes there is a copy of each rank's part, or on as many as there are.

    In memory, a step is files as on disk, in /dev/shm or the folder that VESCALE_PROTECT_DIR names, which outlive the
    ranks. After a restart `latest`, `load` or `protect` brings the newest step that is whole, with all its checksums,
    to the run's directory, if it is newer than those there, and a line in the log says so. So does the end of the
    block, where the memory is freed. An exception in the block leaves it there.

    Raises, on all ranks alike, StorageError where a step does not fit into memory or the folder is not private,
    ConflictError where another process protects the run, MismatchError, PeerError. Communication: as `save`, and each
    rank's part to `copies` ranks, in the background.
    """
    if every < 1 or copies < 0:
        raise MismatchError("protect", f"every={every}, copies={copies}: from 1, and from 0 on")
    wait_for_save()
    with session_of("protect") as session:
        recover(session, path)
        return Protected(session, path, state, every, copies)


class Protected:
    """A run of which every so many steps are kept in the nodes' memory. `step()` is called after each step."""

    def __init__(self, session: Session, path: Path, state: Mapping[Any, Any], every: int, copies: int) -> None:
        self._path, self._state, self._every, self.copies, self.last = path, state, every, copies, -1
        root = Root(path, "protect")
        mark = session.gather("run", _node.marked(root).encode() if session.rank == 0 else b"")[0].decode()
        own = _node.node("protect", makes=True)
        self.nodes = Nodes([name.decode() for name in session.gather("node", own.encode())])
        self.leads = self.nodes.ranks[own][0] == session.rank
        if self.leads:
            _node.begin(mark, root.given)
        session.gather("begun")
        self.here = _node.memory(mark, "protect")
        session.gather("found")
        _node.hold(self.here.path, self.leads)
        self.group = self.nodes.group() if len(self.nodes.ranks) > 1 and copies else None

    def step(self) -> PendingSave | None:
        """Keeps the state if it is the step's turn: this rank's part is written when it returns, the rest is done
        beside training. What fails there is raised by the next one, by `save`, or by the end of the block."""
        number = step_number("protect", self._state.get("step"), 'state["step"]')
        if number % self._every or number == self.last:
            return None
        wait_for_save()
        found = started("protect", lambda session: MemoryJob(session, self, contents_of(self._state), number), True)
        self.last = number
        return found

    def __enter__(self) -> Protected:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                wait_for_save()
                with session_of("protect") as session:
                    recover(session, self._path, says=False)
                    if self.leads:
                        _node.end(self.here, Root(self._path, "protect") if session.rank == 0 else None)
        finally:
            _node.release(self.here.path)


class MemoryJob(SaveJob):
    """One save into the memory of the nodes: a draft per node, in which this rank's file is written at once."""

    def __init__(self, session: Session, kept: Protected, contents: Contents, step: int) -> None:
        self._kept, self._report = kept, None
        super().__init__(session, kept.here, contents, step, None, {}, overwrite=True)

    def _check_folder(self) -> None:
        """Begins on each node, if there is room: of the steps before, the last that all nodes committed stays."""
        session, root, kept, outline = self.session, self.root, self._kept, self._outline
        steps = root.committed() if kept.leads else {}
        if kept.leads and session.rank:
            self._draft = root.begin(self._where["step"], overwrite=True)
        name = self._draft.name if kept.leads else ""
        nbytes = outline.header.nbytes + outline.header.data_nbytes if outline.writes else 0
        told = [json.loads(text) for text in session.gather("parts", json.dumps([nbytes, name, [*steps]]).encode())]
        mine = kept.nodes.ranks[kept.nodes.names[session.rank]]
        self._where["name"] = told[mine[0]][1]
        self._sizes = [size for size, *_ in told]
        whole = set.intersection(*({*told[ranks[0]][2]} for ranks in kept.nodes.ranks.values()))
        for step, old in steps.items():
            if step != max(whole, default=-1):
                root.take_away(f"{root.path}/{old}", step)
        self._peers = [kept.nodes.receivers(rank, kept.copies) for rank in range(session.size)]
        self._here = [rank for rank, peers in enumerate(self._peers) if {rank, *peers} & {*mine}]
        if kept.leads:
            _node.check_room(root, sum(self._sizes[rank] for rank in self._here))
        session.gather("room")

    def _set_aside(self) -> None:
        self._report = super()._write()

    def _write(self) -> dict[str, Any]:
        """Copies this rank's file, and takes those of others, which are not on this node."""
        if self._report is None:
            self._set_aside()
        rank, folder = self.session.rank, f"{self.root.path}/{self._where['name']}"
        files = [(peer, f"{folder}/{self._file(peer)}", size) for peer, size in enumerate(self._sizes) if size]
        takes = [file for file in files if rank in self._peers[file[0]]]
        with guarded("protect", folder, "cannot take copies"):
            for _, path, nbytes in takes:
                self.root.storage.create(path, nbytes).close()
        sends = [(peer, *own[1:]) for own in files if own[0] == rank for peer in self._peers[rank]]
        exchange(sends, takes, self._kept.group)
        return self._report

    def _check_files(self, infos: Mapping[str, FileInfo]) -> None:
        here = {self._file(rank) for rank in self._here}
        super()._check_files({name: info for name, info in infos.items() if name in here})

    def _spread(self) -> None:
        """Every node commits, with the manifest of rank 0."""
        own = b"" if self.session.rank else read_manifest(self.root.storage, self._draft.final)
        text = self.session.gather("manifest", own)[0]
        if self._draft is not None and self.session.rank:
            self._check_files(manifest.parse(text, self._draft.path).files)
            self._draft.commit(text)

    def _about(self) -> dict[str, Any]:
        return super()._about() | {"nodes": self._kept.nodes.names}

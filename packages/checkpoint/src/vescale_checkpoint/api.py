"""save and load: the order of things, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from ._errors import CheckpointError, MismatchError
from ._job import PendingSave, SaveJob, started, wait_for_save
from ._recover import recover
from ._tied import compare_tied
from .format._step import Step, step_number, step_of, step_replaced
from .format._text import printable
from .io._commit import Root
from .io._memory import without_collector
from .io._read import Files, read_all
from .io._retention import Retention, check_metrics
from .io._source import opened
from .io._storage import Path
from .plan._bare_names import with_model_key
from .plan._choice import Choice, Report
from .plan._joined import Join, with_joined
from .plan._load_plan import plan_reads
from .plan._restore import Restore
from .plan._state import contents_of
from .sync._sync import Session, forget_finished, session_of

_SHOWN = 8


def save(
    path: Path,
    state: Mapping[Any, Any],
    *,
    asynchronous: bool = False,
    step: Step = None,
    retention: Retention | None = None,
    metrics: Mapping[Any, Any] | None = None,
    overwrite: bool = False,
) -> PendingSave:
    """Saves `state` as one step under `path`. Call it on every rank.

    Arguments:
        path: the run's directory, or a URL that fsspec knows. The step becomes `path/step-N`, complete or not at all.
        state: any of "plan" (for information), models, optimizers, tensors and DTensors, objects with `state_dict`, and
            plain values, in nested dicts and lists. Values that are not sharded must be the same on all ranks.
        asynchronous: return when the values are copied; a thread does the rest. At most one save is in flight: the next
            one waits for it. In `vescale.simulate`, everything is done before it returns.
        step: its number, 0 to 10**18 - 1; by default `state["step"]`, or else one more than the last.
        retention: what to delete once this step is committed; by default nothing.
        metrics: numbers that belong to this step, for `Retention(best=...)`.
        overwrite: replace a committed step of this number once the new one is complete.

    Returns: a `PendingSave`; for a synchronous save it is already done.

    Raises the first cause, on all ranks alike: UnsafeError for values that cannot be stored without pickle,
    MismatchError for an invalid step or metric and if ranks disagree, StorageError, ConflictError, PeerError if a rank
    dies. The next save, `wait` or `close` raises a background failure. Communication: some hundred bytes per rank
    through the process group's store (also catalogues, if ranks hold different tensors), and each rank's checksums to
    rank 0.
    """

    def job(session: Session) -> SaveJob:
        number, measured = _step_of(state, step), check_metrics(metrics)
        return SaveJob(session, Root(path, "save"), contents_of(state), number, retention, measured, overwrite)

    wait_for_save()
    return started("save", job, asynchronous)


def load(
    path: Path,
    state: MutableMapping[Any, Any],
    *,
    step: Step = None,
    only: Iterable[str] | str | None = None,
    rename: Mapping[str, str] | None = None,
    join: Join | None = None,
    cast: Iterable[str] | str = (),
    missing: str = "error",
    extra: str = "error",
    verify: bool | str = True,
) -> Report:
    """Fills `state` from a checkpoint that was saved under any mesh and plan. Call it on every rank.

    Tensors and optimizers are filled in place, objects get `load_state_dict`, and plain values are replaced in `state`.
    Every rank reads only the bytes of its own shards.

    Arguments:
        path: a run's directory (its latest committed step is loaded), or that of one step; or a HuggingFace folder of
            safetensors, or one such file, for the single model of the state; or a directory of torch's DCP, of a state
            or of a model's state dict alone.
        state: as for `save`; keys that it lacks are not loaded.
        step: a committed step of the run.
        only: globs over names of the state, such as "model.*"; the rest is not changed. One that matches nothing is an
            error.
        rename: the checkpoint's names -> the state's, of what a model holds, without the model's key ("encoder.*", not
            "model.encoder.*"); one "*" on each side stands for the same text. Optimizer states follow their parameters.
            A name that matches nothing is an error.
        join: a function of the checkpoint's names and shapes, for tensors that it holds in parts. It returns, by names
            of the state, the names of the parts, each with the indices at which it begins: a stack of two matrices is
            {"model.stack": [("model.0", (0, 0, 0)), ("model.1", (1, 0, 0))]}.
        cast: permitted conversions of dtypes: "lossless", or by name, such as "float32->bfloat16". None by default.
        missing: "error", or "keep" the values that the checkpoint lacks; still an error if it lacks all of them.
        extra: "error", or "ignore" names that the state lacks.
        verify: whether to check each block that is read (CRC-32C). "first" checks all of them before any tensor is
            changed, which reads everything twice.

    Returns: a Report of what was matched, missing, extra and converted.

    Raises, on all ranks alike: MismatchError, FormatError, StorageError, and CorruptError. Names, shapes, dtypes, files
    and their sizes are checked before any tensor is changed. An altered block is found when it is read, and the state
    is then partly loaded: the error's `touched` has the names of the tensors that this rank has overwritten. With
    verify="first" there are none. Communication: some hundred bytes per rank through the process group's store.
    """
    if verify not in (True, False, "first"):
        raise MismatchError("load", f"verify={verify!r} is none of True, False, 'first'")
    wait_for_save(raises=False)
    choice = Choice(only, rename, cast, missing, extra)
    touched: list[str] = []
    try:
        with session_of("load") as session, without_collector():
            recover(session, path)
            return _load(session, path, state, step, choice, join, verify, touched)
    except CheckpointError as error:
        error.touched = tuple(touched)
        if touched:
            shown = ", ".join(touched[:_SHOWN]) + (", ..." if len(touched) > _SHOWN else "")
            error.add_note(
                printable(f"the state is partly overwritten: {len(touched)} of its tensors on this rank ({shown})")
            )
        raise


def latest(path: Path) -> int | None:
    """Returns the number of the newest committed step under `path`, or None where there is none yet. Call it on every
    rank: rank 0 looks, and all ranks get its answer.

        if (step := vescale.latest("runs/one")) is not None:
            vescale.load("runs/one", state, step=step)

    Raises, on all ranks alike, StorageError, and CorruptError where the newest step has lost its manifest.
    Communication: some hundred bytes per rank through the process group's store.
    """
    with session_of("latest") as session:
        recover(session, path)
        root = Root(path, "latest")
        found = b""
        if session.rank == 0 and root.storage.exists(root.path) and (root.committed() or root.headless()):
            found = root.resolve(None).encode()
        name = session.gather("newest", found)[0].decode()
    if not name:
        return None
    step = step_of(name)
    return step_replaced(name) if step is None else step


def _load(
    session: Session, path: Path, state: MutableMapping[str, Any], step: int | None, choice: Choice,
    join: Join | None, verify: bool | str, touched: list[str],
) -> Report:  # fmt: skip
    """A function of its own, so that what it made is gone before the collector is back."""
    with opened(session, path, step, state) as source:
        manifest = source.manifest
        if source.is_torchs:
            manifest = with_model_key(manifest, state, choice, session.gather)
        if join is not None:
            manifest = with_joined(manifest, join)
        restore = Restore(manifest, state, choice)
        files = Files(source.storage, source.folder, manifest.files, bool(verify))
        block = manifest.block_bytes
        places: set[int] = set()
        try:
            compare_tied(files, manifest, restore, bool(verify))
            restore.check(session.gather)
            plan = plan_reads(restore.targets, block)
            files.check(sorted(plan))
            session.gather("planned")
            forget_finished(session)
            with torch.no_grad():
                if verify == "first":
                    read_all(files, plan, restore.targets, (), block, True)
                    session.gather("verified")
                read_all(files, plan, restore.targets, restore.memories, block, bool(verify), places)
                session.gather("read")
                restore.apply()
        except BaseException:
            touched += [restore.targets[place].name for place in sorted(places)]
            raise
        finally:
            files.close()
        return Report(
            path=source.folder,
            step=manifest.step,
            matched=tuple(restore.matched),
            missing=tuple(restore.missing),
            extra=tuple(restore.extra),
            skipped=tuple(restore.skipped),
            converted=restore.converted,
            bytes_read=files.bytes_read,
        )


def _step_of(state: Mapping[str, Any], step: int | None) -> int | None:
    if step is not None:
        return step_number("save", step)
    found = state.get("step")
    return None if found is None else step_number("save", found, 'state["step"]')

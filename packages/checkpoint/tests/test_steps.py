"""What users give as steps and metrics, and what happens to steps' directories: found as it was stored, or refused."""

import math
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from vescale_checkpoint import (
    ConflictError,
    CorruptError,
    MismatchError,
    Retention,
    StorageError,
    UnsafeError,
    export_huggingface,
    load,
    save,
    tools,
)
from vescale_checkpoint.io._commit import Root
from vescale_testkit import raises_on_all

NONE = [-1, 10**18, 10**4000, 3.0, "5", True, np.True_, torch.tensor(True), torch.tensor(7.0), torch.ones(2), [5], {}]
MANY = [0, 7, 10**8, 10**18 - 1, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7], dtype=torch.int16)]


def kind(value):
    return f"{type(value).__name__} {str(value)[:20]}"


@pytest.mark.parametrize("step", NONE, ids=kind)
def test_steps_that_are_none(tmp_path, step):
    for call in (
        lambda: save(tmp_path, {"x": 1}, step=step),
        lambda: save(tmp_path, {"x": 1, "step": step}),
        lambda: load(tmp_path, {"x": 0}, step=step),
        lambda: tools.opened(tmp_path, step).__enter__(),
    ):
        with pytest.raises(MismatchError, match="a step is an integer from 0 to"):
            call()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("step", MANY, ids=kind)
@pytest.mark.parametrize("how", ["argument", "state"])
def test_what_is_stored_is_what_is_found(tmp_path, step, how):
    saving = save(tmp_path, {"x": 1, "step": step if how == "state" else 3}, step=step if how == "argument" else None)
    number = int(step)
    assert os.path.basename(saving.path) == f"step-{number:08d}"
    for asked in (None, number, step):
        state = {"x": 0}
        assert load(tmp_path, state, step=asked).step == number and state["x"] == 1
    with tools.opened(tmp_path, step) as source:
        assert source.manifest.step == number


def test_a_step_that_is_no_number_is_said_by_all_ranks(tmp_path):
    assert "step is -1" in raises_on_all(2, MismatchError, lambda: save(tmp_path, {"step": 3}, step=-1))


@pytest.mark.parametrize("fields", [{"last": 1.5}, {"every": True}, {"last": 0}, {"count": "2"}])
def test_retention_counts(fields):
    with pytest.raises(MismatchError, match="each is a number from 1 on"):
        Retention(**fields)


# --- metrics ------------------------------------------------------------------------


def test_metrics_that_json_does_not_hold(tmp_path):
    """NaN is the best of nothing; infinities are compared as they are."""
    losses = {1: math.nan, 2: 0.5, 3: math.inf, 4: 0.25, 5: math.nan, 6: -math.inf, 7: torch.tensor(0.75)}
    for step, loss in losses.items():
        save(tmp_path, {"step": step}, metrics={"loss": loss})
    with tools.opened(tmp_path, 1) as source:
        assert source.manifest.about["metrics"] == {"loss": {"$float": "nan"}}
    save(tmp_path, {"step": 8}, metrics={"loss": math.nan}, retention=Retention(best="loss", count=3))
    assert list(Root(tmp_path, "load").committed()) == [2, 4, 6, 8]


@pytest.mark.parametrize("metrics", [{"a": "high"}, {"a": None}, {3: 0.5}, {"a": torch.ones(2)}, {"a": 10**400}])
def test_metrics_that_are_no_numbers(tmp_path, metrics):
    with pytest.raises(MismatchError, match="which is not a number"):
        save(tmp_path, {"step": 1}, metrics=metrics)
    assert not os.listdir(tmp_path)


# --- directories ----------------------------------------------------------------------


def saved(path, step):
    return save(path, {"x": torch.full((5,), float(step)), "step": step}).path


def test_a_renamed_step_is_no_other_step(tmp_path):
    os.rename(saved(tmp_path, 1), tmp_path / "step-00000009")
    for path, step in ((tmp_path, 9), (tmp_path, None), (tmp_path / "step-00000009", None)):
        with pytest.raises(CorruptError, match="the directory of step 9 holds step 1: it was renamed"):
            load(path, {"x": torch.zeros(5), "step": 0}, step=step)
        with pytest.raises(CorruptError, match="holds step 1"), tools.opened(path, step):
            pass
    text = raises_on_all(2, CorruptError, lambda: load(tmp_path, {"x": torch.zeros(5), "step": 0}))
    assert "rename it to step-00000001" in text
    os.rename(tmp_path / "step-00000009", tmp_path / "best")
    state = {"x": torch.zeros(5), "step": 0}
    assert load(tmp_path / "best", state).step == 1 and state["x"][0] == 1


@pytest.mark.parametrize("name", ["step-1", "step-000000001", "step-0001", "Step-00000002", "step-00000002 ", "step-x"])
def test_names_that_this_package_does_not_give_are_no_steps(tmp_path, name):
    saved(tmp_path, 1)
    shutil.copytree(saved(tmp_path, 2), tmp_path / name)
    shutil.rmtree(tmp_path / "step-00000002")
    state = {"x": torch.zeros(5), "step": 0}
    load(tmp_path, state)
    assert state["step"] == 1
    with pytest.raises(StorageError, match="step 2 is not committed"):
        load(tmp_path, state, step=2)


def test_half_of_a_step(tmp_path):
    """Its manifest, or its data, or nothing of it; and something else in its place."""
    saved(tmp_path, 1)
    step = saved(tmp_path, 2)
    (file,) = [name for name in os.listdir(step) if name.endswith(".safetensors")]
    os.rename(f"{step}/{file}", tmp_path / "kept")
    with pytest.raises(CorruptError, match="is missing"):
        load(tmp_path, {"x": torch.zeros(5), "step": 0})
    os.rename(tmp_path / "kept", f"{step}/{file}")
    os.remove(f"{step}/manifest.json")
    with pytest.raises(CorruptError, match="step 2 is the latest, and its manifest is missing"):
        load(tmp_path, {"x": torch.zeros(5), "step": 0})
    with pytest.raises(ConflictError, match="step 2 is not committed, and something else has its name"):
        saved(tmp_path, 2)
    os.remove(f"{step}/{file}")  # an empty directory is nothing
    state = {"x": torch.zeros(5), "step": 0}
    load(tmp_path, state)
    assert state["step"] == 1
    os.rmdir(step)
    with open(step, "w") as there:
        there.write("mine")
    load(tmp_path, state)
    with pytest.raises(ConflictError, match="something else has its name"):
        saved(tmp_path, 2)


# --- values that the format does not hold ------------------------------------------------


def nested(levels, kind):
    value = 1
    for _ in range(levels):
        value = {"list": [value], "tuple": (value,), "dict": {"k": value}, "pairs": {3: value}}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "pairs"])
def test_values_nested_deep_are_refused_when_they_are_saved(tmp_path, kind):
    for levels, fits in ((60, True), (70, False), (600, False), (100_000, False)):
        state = {"value": nested(levels, kind), "step": 1}
        if fits:
            save(tmp_path, state)
            there = {"value": None, "step": 0}
            load(tmp_path, there)
            assert there["value"] == state["value"]
        else:
            with pytest.raises(UnsafeError, match="nested"):
                save(tmp_path, {"value": nested(levels, kind), "step": 2})
    itself = []
    itself.append(itself)
    with pytest.raises(UnsafeError, match="nested"):
        save(tmp_path, {"value": (itself,), "step": 2})
    with pytest.raises(UnsafeError, match="nested"):
        save(tmp_path, {"value": itself, "step": 2})
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("saved", [[torch.ones(2)] * 3, [1, 2], 5, {}, None, (torch.ones(2), torch.ones(2))], ids=kind)
def test_what_holds_tensors_is_not_replaced_by_a_value(tmp_path, saved):
    save(tmp_path, {"models": saved, "step": 1})
    for mine in ([torch.zeros(2)] * 2, {"a": {"b": [torch.zeros(2)]}}):
        with pytest.raises(MismatchError, match=r"holds tensors or objects, saved as|missing in the checkpoint"):
            load(tmp_path, {"models": mine, "step": 0}, extra="ignore")


def test_integers_of_any_length_or_an_error(tmp_path):
    values = [0, -1, 1 << 63, -(1 << 64), (1 << 8192) - 1]
    save(tmp_path, {"values": values, "step": 1})
    state = {"values": None, "step": 0}
    load(tmp_path, state)
    assert state["values"] == values
    with pytest.raises(UnsafeError, match="an int of 8193 bits"):
        save(tmp_path, {"values": 1 << 8192, "step": 2})
    with pytest.raises(UnsafeError, match="the key 5 of the state is not text"):
        save(tmp_path, {5: 1})


# --- paths ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nosuch://x", "fsspec opens no file system for nosuch://: Protocol not known: nosuch"),
        ("memry://x", "fix: memory://..."),
        ("", "the path is '', which names no directory"),
        ("file://", "the path is 'file://'"),
        ("memory://", "the path is 'memory://'"),
        (None, "the path is a NoneType"),
        (b"run", "the path is a bytes"),
        (7, "the path is a int"),
    ],
)
def test_paths_that_are_none(tmp_path, monkeypatch, path, told):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: save(path, {"x": 1}),
        lambda: load(path, {"x": 0}),
        lambda: tools.opened(path).__enter__(),
        lambda: export_huggingface(path, torch.nn.Linear(1, 1)),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert told in str(caught.value) and "Error:" not in str(caught.value)
    assert not os.listdir(tmp_path)


def test_a_file_system_that_is_not_installed(tmp_path, monkeypatch):
    import fsspec

    def lacks(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", lacks)
    with pytest.raises(StorageError, match="no file system for s3://: Install s3fs"):
        save("s3://bucket/run", {"x": 1})


@pytest.mark.parametrize(
    "name", ["step-00000003", "step-00000003.tmp-0a", "step-00000003.old-0a", "step-1234567890123456"]
)
@pytest.mark.parametrize("at", [(), ("runs",)])
def test_a_run_is_not_called_as_steps_are(tmp_path, monkeypatch, name, at):
    """Neither with the number of the step that is saved, nor with another: a load takes such a path for a step."""
    saved(tmp_path / "run", 5)
    monkeypatch.chdir(tmp_path)
    path = os.path.join(*at, name)
    for call in (
        lambda: save(path, {"x": 1}, step=7),
        lambda: save(tmp_path / path, {"x": 1}, step=3),
        lambda: save(f"memory://{path}/", {"x": 1}),
        lambda: tools.reshard(tools.opened(tmp_path / "run").__enter__(), path, 2),
    ):
        with pytest.raises(StorageError, match=f"{name!r} is a name that the steps of a run have") as caught:
            call()
    assert os.listdir(tmp_path) == ["run"]
    with pytest.raises(StorageError) as caught:
        save(path, {"x": 1}, step=3)
    ((remedy, _),) = caught.value.remedies
    kept = save(remedy.removeprefix("the path "), {"x": 1}, step=3).path  # what it says works
    assert load(kept, {"x": 0}).step == 3


def test_a_best_metric_that_no_step_was_given(tmp_path):
    """It is named with those that were given, and nothing is deleted; where none was given yet, nothing is wrong."""

    def policy(best):
        return Retention(last=1, best=best)

    save(tmp_path, {"x": 1}, step=0, retention=policy("loss"))
    for step, loss in ((1, 0.1), (2, 0.3)):
        save(tmp_path, {"x": 1}, step=step, metrics={"loss": loss, "accuracy": 1}, retention=policy("loss"))
    save(tmp_path, {"x": 1}, step=3, retention=policy("loss"))  # others have it
    there = sorted(os.listdir(tmp_path))
    assert there == ["step-00000001", "step-00000003"]
    for metrics in (None, {"lose": 1.0}):
        refused = partial(save, tmp_path, {"x": 1}, step=4, metrics=metrics, retention=policy("los"))
        text = raises_on_all(2, MismatchError, refused)
        assert "best='los' is a metric that no step was given" in text and "accuracy, " in text
        assert sorted(os.listdir(tmp_path)) == there
    save(tmp_path, {"x": 1}, step=4, metrics={"los": 1.0}, retention=policy("los"))
    assert sorted(os.listdir(tmp_path)) == ["step-00000004"]


def test_a_save_or_reshard_that_fails_leaves_no_directory(tmp_path, monkeypatch):
    """Of those that it made; one that was there stays."""
    step = saved(tmp_path / "run", 5)
    (file,) = [name for name in os.listdir(step) if name.endswith(".safetensors")]
    with open(f"{step}/{file}", "r+b") as data:
        data.seek(-1, os.SEEK_END)
        data.write(b"!")
    (tmp_path / "there").mkdir()

    def fails(self, text):
        raise OSError(28, "No space left on device")

    with tools.opened(tmp_path / "run") as source:
        for out in ("there", "a/b/c", "there/more"):
            with pytest.raises(CorruptError):
                tools.reshard(source, tmp_path / out, 2)
    monkeypatch.setattr("vescale_checkpoint.io._commit.Draft.commit", fails)
    for out in ("there", "a/b/c"):
        with pytest.raises(Exception, match="No space left"):
            save(tmp_path / out, {"x": torch.ones(2)})
    assert sorted(os.listdir(tmp_path)) == ["run", "there"] and not os.listdir(tmp_path / "there")

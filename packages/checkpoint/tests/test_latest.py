"""The newest committed step, the same answer on all ranks."""

import pytest
import torch

from vescale_checkpoint import CorruptError, latest, save
from vescale_testkit import run_ranks


def found(path):
    before = latest(path), latest(path / "none")
    for step in (3, 12):
        save(path, {"x": torch.ones(2), "step": step})
    return before, latest(path)


def test_none_and_then_the_newest_on_all_ranks(tmp_path):
    assert run_ranks(2, found, tmp_path) == [((None, None), 12)] * 2


def test_a_step_that_is_being_written_is_none(tmp_path):
    (tmp_path / "step-00000005.tmp-ab").mkdir()
    (tmp_path / "STOP").touch()
    assert latest(tmp_path) is None


def test_a_newest_step_without_its_manifest_is_an_error(tmp_path):
    for step in (3, 12):
        save(tmp_path, {"x": torch.ones(2), "step": step})
    (tmp_path / "step-00000012" / "manifest.json").unlink()
    with pytest.raises(CorruptError, match="step 12 is the latest, and its manifest is missing"):
        latest(tmp_path)

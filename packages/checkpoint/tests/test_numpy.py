"""numpy's numbers and arrays in a state: what was saved is what is loaded, type for type."""

import numpy as np
import pytest
import torch

from vescale_checkpoint import FormatError, UnsafeError, load, save
from vescale_checkpoint.format._values import decode, encode
from vescale_testkit import run_ranks

VALUES = [
    np.float32(1.5), np.float64("nan"), np.int64(-3), np.uint8(200), np.bool_(True), np.complex64(1 + 2j),
    np.arange(6, dtype=">i4").reshape(2, 3), np.ones((2, 0)), np.array(7.0),
    np.asfortranarray(np.arange(6.0).reshape(3, 2)), np.arange(10)[::3], np.random.RandomState(3).get_state()[1],
]  # fmt: skip


def same(found, value):
    assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
    np.testing.assert_array_equal(found, value)


def test_values_come_back_as_they_were(tmp_path):
    class Sampler:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    drawn = {"weights": VALUES[-1], "seen": [np.int32(4), (np.float16(0.5),)]}

    def run():
        save(tmp_path, {"values": VALUES, "sampler": Sampler(drawn), "step": np.int64(5)}, asynchronous=True).wait()
        sampler = Sampler({"weights": None})
        state = {"values": [np.zeros(3)] * len(VALUES), "sampler": sampler, "step": 0}
        assert load(tmp_path, state).step == 5
        return state["values"], sampler.state, state["step"]

    for values, sampler, step in run_ranks(2, run):
        for found, value in zip(values, VALUES, strict=True):
            same(found, value)
        same(step, np.int64(5))
        same(sampler["weights"], VALUES[-1])
        same(sampler["seen"][0], np.int32(4))
        same(sampler["seen"][1][0], np.float16(0.5))
        sampler["weights"][0] = 1  # writable


@pytest.mark.parametrize(
    "value",
    [np.array(["x"]), np.array([None]), np.datetime64("2020"), np.ma.array([1, 2], mask=[0, 1]), np.zeros(1 << 18)],
    ids=["text", "objects", "dates", "masked", "large"],
)
def test_what_is_no_number_or_too_large_is_refused(tmp_path, value):
    with pytest.raises(UnsafeError, match=r"torch\.as_tensor"):
        save(tmp_path, {"x": value})


def test_ranks_that_differ_are_told(tmp_path):
    from vescale_checkpoint import MismatchError

    def run():
        with pytest.raises(MismatchError, match="'x' is not the same on all ranks"):
            save(tmp_path, {"x": np.full(2, torch.distributed.get_rank())})

    run_ranks(2, run)


@pytest.mark.parametrize(
    "parts",
    [
        7, [], ["<i4", [1]], ["O", [1], "AAAAAA=="], ["<i4,<i4", [1], "AAAAAA=="], [["<i4"], [1], "AAAAAA=="],
        ["<i4", [2], "AAAAAA=="], ["<i4", [-1], "AAAAAA=="], ["<i4", [1 << 70, 0], ""], ["<i4", None, ""],
        ["<i4", [True], "AAAAAA=="], ["<i4", 1, "AAAAAA=="], ["<i4", [1], "?"], ["(9,)<i4", [1], "AAAAAA=="],
    ],
)  # fmt: skip
def test_forms_that_are_none_are_format_errors(parts):
    with pytest.raises(FormatError):
        decode({"$numpy": parts}, str)
    assert decode(encode(np.zeros(1, "<i4"), "x", lambda *_: ""), str).tolist() == [0]

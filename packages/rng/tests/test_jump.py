"""Jumping ahead leaves torch's generator as drawing does, byte by byte."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng._cpu import jump, mt19937


def drawn(words, generator):
    """Past `words`, by drawing."""
    torch.empty(words, dtype=torch.uint8).random_(generator=generator)
    return generator.get_state()


def jumped(words, generator):
    mt19937._jump(words, generator)
    return generator.get_state()


@given(st.integers(0, 2000), st.integers(1, 5000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_near(before, words, waiting):
    start = torch.Generator().manual_seed(before)
    torch.empty(before, dtype=torch.uint8).random_(generator=start)
    if waiting:
        torch.empty(1).normal_(generator=start)  # the second of a pair is kept in the state
    assert jumped(words, start.clone_state()).equal(drawn(words, start.clone_state()))


@pytest.mark.parametrize("words", [1, 623, 624, 625, 2 * 624, 19937, 624 * 33, 3_000_001, (1 << 23) + 1])
def test_far(words):
    start = torch.Generator().manual_seed(7)
    assert jumped(words, start.clone_state()).equal(drawn(words, start.clone_state()))


def test_two_jumps_are_one():
    start = torch.Generator().manual_seed(1)
    apart = start.clone_state()
    for words in (10**11 + 3, 10**12):
        mt19937.discard(words, apart)
    assert jumped(11 * 10**11 + 3, start).equal(apart.get_state())


def test_the_recurrence():
    """p annihilates the words of the tape, from the second on."""
    words = np.arange(624, dtype=np.uint32) * np.uint32(2654435761)
    tape = jump._tape(words, 30000)[1:]
    total = tape[jump.DEGREE :][:5000].copy()
    for exponent in jump._exponents():
        total ^= tape[exponent:][:5000]
    assert len(jump._exponents()) == 134 and not total.any()

"""Docstrings begin with a verb or a noun, not with a clause in its place."""

from collections import Counter

from checks import size


def test_docstrings_begin_with_a_verb_or_a_noun():
    words = sum((one.words for one in size.counted().values()), Counter())
    assert words.total() > 1000
    assert sum(words[word] for word in size.ODD) < 20, f"python tools/checks/size.py counts {size.ODD}"

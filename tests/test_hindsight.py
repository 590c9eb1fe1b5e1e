"""Drafts wait until the text has passed them, each at its own place."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.hindsight import Hindsight


def test_a_draft_is_judged_when_the_text_has_passed_its_end():
    waiting = Hindsight()
    waiting.add(3, "first")
    assert list(waiting.commit([1, 2])) == []
    waiting.add(2, "second")
    assert list(waiting.commit([3])) == [("first", [1, 2, 3])]
    assert list(waiting.commit([4, 5])) == [("second", [3, 4])]


@given(st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 4)), max_size=20))
def test_every_draft_gets_the_text_at_its_place(rounds):
    """Each round adds drafts of some lengths, and then the text goes on by some tokens."""
    waiting, text, expected, got = Hindsight(), 0, {}, {}
    for number, (lengths, tokens) in enumerate(rounds):
        for length in lengths:
            draft = (number, len(expected), length)
            expected[draft] = list(range(text, text + length))
            waiting.add(length, draft)
        got |= waiting.commit(range(text, text + tokens))
        text += tokens
    # A draft waits behind an older one that is longer; the order is that of the drafts.
    assert got == {draft: expected[draft] for draft in list(expected)[: len(got)]}
    assert list(got) == list(expected)[: len(got)]
    held = list(expected)[len(got) :]
    assert not held or expected[held[0]][-1] >= text

"""Proposals: chains, trees, invalid ones, and the walk that accepts a path."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.accept import accept
from dflash_mlx.errors import DFlashError, ProposalError
from dflash_mlx.proposal import Proposal


def test_tokens_without_parents_form_a_chain():
    proposal = Proposal([7, 8, 9])
    assert proposal.parents == (-1, 0, 1)
    assert proposal.is_chain and len(proposal) == 3
    assert proposal == Proposal([7, 8, 9], (-1, 0, 1)) == Proposal([7, 8, 9], [-1, 0, 1])


@pytest.mark.parametrize(
    ("parents", "chain"),
    [((-1,), True), ((-1, 0), True), ((-1, 0, 0), False), ((-1, 0, 1, 1), False)],
)
def test_a_chain_is_a_tree_of_only_children(parents, chain):
    assert Proposal([5] * len(parents), parents).is_chain is chain


@pytest.mark.parametrize(
    "tokens", [(7, 8, 9), range(7, 10), np.arange(7, 10), [np.int64(7), np.uint8(8), 9]], ids=repr
)
def test_any_whole_numbers_are_tokens(tokens):
    assert Proposal(tokens) == Proposal([7, 8, 9])


@pytest.mark.parametrize("container", [list, mx.array])
def test_tokens_outside_the_vocabulary_are_clipped_to_its_last_token(container):
    """The target must not read beyond its embedding."""
    vocab_size = 6
    proposal = Proposal(container([3, 5, 6, 2**31 - 1]))
    assert proposal.array(vocab_size).tolist() == [3, 5, 5, 5]


def test_an_array_of_tokens_is_not_evaluated():
    """A lazy array of a million tokens takes no memory until it is evaluated."""
    size = 1_000_000
    before = mx.get_active_memory()
    proposal = Proposal(mx.arange(size))
    assert len(proposal) == size and proposal.is_chain
    assert mx.get_active_memory() - before < size


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], ()),
        (mx.array([], mx.int32), ()),
        ([1, 2], (-1,)),
        ([1], (-1, 0)),
        ([1, 2], (0, 0)),  # no root
        ([1, 2], (-1, -1)),  # two roots
        ([1, 2], (-1, 1)),  # its own parent
        ([1, 2, 3], (-1, 2, 0)),  # a child before its parent
        ([1, 2], (-1, -2)),
        ([1, -1], ()),
        ([1, 2**31], ()),
        ([1, 2.0], ()),
        ([1, True], ()),
        ([1, "2"], ()),
        ("12", ()),
        (b"12", ()),
        ({1: 2}, ()),
        ({1, 2}, ()),
        (np.array(5), ()),
        ([1, 2], np.array(0)),
        ([1, 2], mx.array(0)),
        (None, ()),
        (7, ()),
        ([[1, 2]], ()),
        (np.array([[1, 2]]), ()),
        (np.array([1.0, 2.0]), ()),
        (mx.array([[1, 2]]), ()),
        (mx.array([1.0, 2.0]), ()),
        (mx.array([True]), ()),
        (mx.array(1), ()),
        ([1, 2], 5),
        ([1, 2], (-1, 0.0)),
        ([1, 2], (-1, None)),
    ],
    ids=str,
)
def test_an_invalid_draft_is_refused(tokens, parents):
    with pytest.raises(ProposalError) as caught:
        Proposal(tokens, parents)
    assert isinstance(caught.value, DFlashError) and "\n" not in str(caught.value)


# The walk that accepts a path of a tree


@st.composite
def trees(draw):
    """A draft tree over few tokens, so that agreement and equal siblings are common."""
    size = draw(st.integers(1, 12))
    tokens = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    choices = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, size)]
    return tokens, parents, choices


def path_to(row: int, parents: list[int]) -> list[int]:
    """The rows from the root to this row, both included."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def is_accepted(path: list[int], tokens: list[int], choices: list[int]) -> bool:
    """Whether each draft of the path is what the target chose at its parent."""
    return all(tokens[child] == choices[parent] for parent, child in pairwise(path))


@given(tree=trees())
def test_accept_finds_the_path_of_brute_force(tree):
    tokens, parents, choices = tree
    kept, new = accept(tokens, parents, choices)
    assert kept[0] == 0
    assert kept == path_to(kept[-1], parents)
    assert is_accepted(kept, tokens, choices)
    assert new == [choices[row] for row in kept]
    # No child of the last row could have been accepted as well.
    children = [row for row in range(len(tokens)) if parents[row] == kept[-1]]
    assert all(tokens[child] != new[-1] for child in children)
    # No other accepted path is longer. (Of two equal siblings, only one is followed.)
    has_equal_siblings = len(set(zip(parents, tokens, strict=True))) < len(tokens)
    if not has_equal_siblings:
        paths = [path_to(row, parents) for row in range(len(tokens))]
        accepted = [path for path in paths if is_accepted(path, tokens, choices)]
        assert len(kept) == max(map(len, accepted))

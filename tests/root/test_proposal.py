"""Proposals: chains, trees, what is neither, and the walk that accepts a path."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.accept import accept
from dflash_mlx.errors import DFlashError, ProposalError
from dflash_mlx.proposal import Proposal


def test_tokens_alone_form_a_chain():
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


@pytest.mark.parametrize("made", [list, mx.array])
def test_tokens_outside_of_the_vocabulary_do_not_reach_the_target(made):
    assert Proposal(made([3, 5, 6, 2**31 - 1])).array(6).tolist() == [3, 5, 5, 5]


def test_an_array_of_tokens_is_not_evaluated():
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
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def agreed(path: list[int], tokens: list[int], choices: list[int]) -> bool:
    return all(tokens[child] == choices[row] for row, child in zip(path, path[1:], strict=False))


@given(tree=trees())
def test_accept_finds_the_path_of_brute_force(tree):
    tokens, parents, choices = tree
    kept, new = accept(tokens, parents, choices)
    assert kept[0] == 0
    assert kept == path_to(kept[-1], parents)
    assert agreed(kept, tokens, choices)
    assert new == [choices[row] for row in kept]
    # Nothing more could have been kept on this path, ...
    children = [row for row in range(len(tokens)) if parents[row] == kept[-1]]
    assert all(tokens[child] != new[-1] for child in children)
    # ... and without equal siblings, which make two subtrees out of one, nothing at all.
    if len({*zip(parents, tokens, strict=True)}) == len(tokens):
        paths = [path_to(row, parents) for row in range(len(tokens))]
        assert len(kept) == max(len(path) for path in paths if agreed(path, tokens, choices))

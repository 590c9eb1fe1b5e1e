"""Proposals: chains, trees, and what is neither."""

import mlx.core as mx
import numpy as np
import pytest

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


def test_an_array_of_tokens_is_not_waited_for():
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
def test_what_is_no_draft_is_refused(tokens, parents):
    with pytest.raises(ProposalError) as caught:
        Proposal(tokens, parents)
    assert isinstance(caught.value, DFlashError) and "\n" not in str(caught.value)

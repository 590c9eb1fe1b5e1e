"""Every kind of drafter drafts what its authors' code drafts, however its context is fed."""

import mlx.core as mx
import pytest
from golden import FOLDERS, Golden, corrected
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.drafter.candidates import DraftScores
from dflash_mlx.drafter.dflash import BlockSession
from dflash_mlx.sampling import Sampler

CONTEXT = 90  # tokens of every text


@pytest.fixture(scope="module", params=FOLDERS)
def golden(request):
    return Golden(request.param)


def largest_error(actual, expected):
    return mx.abs(actual - expected).max().item()


def masked_block(drafter, anchor):
    """The token ids [B] of a block: the anchor, then mask tokens."""
    masks = [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
    return mx.array([anchor, *masks])


def check_hidden_and_logits(golden, case, hidden, target):
    """Compare hidden states and logits; for DSpark also the logits that its heads correct."""
    drafter = golden.drafter
    first = golden.drafter.config.first_row
    assert largest_error(hidden[0], case.hidden) < 1e-4
    logits = drafter.logits(hidden, target)[0]
    assert largest_error(logits, case.logits) < 1e-3
    if hasattr(case, "corrected"):
        rows = hidden[0, first:]
        previous = mx.concatenate([mx.array([case.anchor]), case.tokens[:-1]])
        actual = corrected(drafter, logits=logits[first:], hidden=rows, previous=previous)
        assert largest_error(actual, case.corrected) < 1e-3


@given(data=st.data())
@settings(max_examples=6)
def test_blocks_are_golden_however_their_context_is_split(golden, data):
    """A block sees the same context, however it was fed and whatever was drafted in between.

    Up to three cuts split the features that come before a golden block. Each piece is fed alone or
    together with a random block, which must leave no trace.
    """
    drafter = golden.drafter
    target = golden.target()
    cache = drafter.make_cache()
    fed = 0
    for number in range(golden.rounds):
        case = golden.case(number)
        cuts = data.draw(st.lists(st.integers(fed, case.start), max_size=3), label="cuts")
        for cut in sorted(cuts):  # two equal cuts make an empty piece
            piece = golden.context[:, fed:cut]
            fed = cut
            if data.draw(st.booleans(), label="with a block"):
                rows = data.draw(st.integers(1, drafter.config.block_size), label="rows")
                drafter(mx.random.normal((1, rows, 64)), piece, cache)
            else:
                drafter.extend(piece, cache)
        block = drafter.embed(masked_block(drafter, case.anchor)[None], target)
        hidden = drafter(block, golden.context[:, fed : case.start], cache)
        fed = case.start
        check_hidden_and_logits(golden, case=case, hidden=hidden, target=target)


def test_a_session_proposes_the_golden_tokens(golden):
    drafter = golden.drafter
    session = BlockSession(drafter, golden.target(), Sampler())
    position = 0
    for number in range(golden.rounds):
        case = golden.case(number)
        session.extend(golden.context[:, position : case.start])
        position = case.start
        proposal = session.propose(case.anchor, drafter.block_size)
        assert proposal.tokens.tolist() == [case.anchor, *case.tokens.tolist()]


def test_sampled_drafts_are_the_golden_ones(golden):
    """The published drafters sample with Gumbel noise, as we do: equal noise gives equal tokens."""
    drafter = golden.drafter
    target = golden.target()
    compared_cases = 0
    for number in range(golden.rounds):
        case = golden.case(number)
        if not hasattr(case, "sampled_tokens"):
            continue
        hidden = case.hidden[None]
        first = drafter.config.first_row
        temperature = case.sampled_temperature.item()
        logits = drafter.logits(hidden, target)[0, first:]
        rows = hidden[0, first:]
        anchor = mx.array(case.anchor)
        scores = drafter.to_full_vocab(logits / temperature + case.sampled_noise)
        [tokens] = drafter.choose(
            [DraftScores(scores, weight=1 / temperature, hidden=rows, anchor=anchor)]
        )
        assert tokens.tolist() == case.sampled_tokens.tolist()
        compared_cases += 1
    # The first three folders are older: they have 6 rounds and no sampled cases.
    assert compared_cases == (0 if golden.rounds == 6 else 2)

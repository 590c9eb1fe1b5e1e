"""A drafter's session: what it proposes, that it waits for nothing, and what it remembers."""

import mlx.core as mx
import pytest
from tinymodels import random_drafter, target

from dflash_mlx.errors import IncompatibleDrafterError
from dflash_mlx.sampling import Sampler

PROMPT = [5, 9, 2, 40, 41, 7, 100]


def features(count: int = len(PROMPT)) -> mx.array:
    _, taps = target().features(mx.array([PROMPT]), (0, 2))
    return taps[:, :count]


def expected_drafts(taps: mx.array, anchor: int, rows: int) -> list[int]:
    """A draft straight from the network, with all of the context at once."""
    drafter, model = random_drafter(), target()
    block = model.embed(mx.array([[anchor] + [drafter.config.mask_token_id] * (rows - 1)]))
    hidden = drafter(block, taps, drafter.make_cache())
    return model.head(hidden)[0, 1:].argmax(axis=-1).tolist()


@pytest.mark.parametrize("width", [2, 5, 16, 40])
def test_a_draft_is_the_networks_most_likely_tokens(width):
    session = random_drafter().start(target(), Sampler())
    session.extend(features())
    proposal = session.propose(anchor=3, width=width)
    rows = min(width, 16)  # never more than the block it was trained for
    assert proposal.is_chain and len(proposal) == rows
    assert mx.array(proposal.tokens).tolist() == [3, *expected_drafts(features(), 3, rows)]


def test_rounds_that_draft_nothing_still_take_in_the_features():
    session = random_drafter().start(target(), Sampler())
    for row in range(len(PROMPT)):
        session.extend(features()[:, row : row + 1])
        assert session.propose(PROMPT[row], 1).tokens == [PROMPT[row]]
        assert session.pending_features == row + 1
    drafts = mx.array(session.propose(3, 16).tokens).tolist()
    assert drafts == [3, *expected_drafts(features(), 3, 16)] and session.pending_features == 0


def test_a_prompt_of_one_token_has_no_features():
    session = random_drafter().start(target(), Sampler())
    empty = mx.zeros((1, 0, 128))
    drafts = mx.array(session.propose(3, 4).tokens).tolist()
    assert drafts == [3, *expected_drafts(empty, 3, 4)]


def test_sessions_of_one_drafter_do_not_meet():
    drafter = random_drafter()
    first, second = drafter.start(target(), Sampler()), drafter.start(target(), Sampler())
    first.extend(features(7))
    second.extend(features(2))
    drafts = [mx.array(s.propose(3, 16).tokens).tolist() for s in (first, second, first)]
    assert drafts[0] == [3, *expected_drafts(features(7), 3, 16)] == drafts[2]
    assert drafts[1] == [3, *expected_drafts(features(2), 3, 16)]


def test_nothing_is_evaluated_to_propose():
    session = random_drafter().start(target(), Sampler())
    taps = features()
    mx.eval(taps)
    before = mx.get_active_memory()
    session.extend(taps)
    proposal = session.propose(3, 16)
    assert isinstance(proposal.tokens, mx.array)
    assert mx.get_active_memory() - before < 4096
    mx.eval(proposal.tokens)
    assert mx.get_active_memory() - before > 4096  # the control: the context cache, at least


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"hidden_size": 128}, "hidden_size"),
        ({"vocab_size": 500}, "vocab_size"),
        ({"num_target_layers": 36}, "num_target_layers"),
        ({"num_target_layers": None, "target_layer_ids": [0, 3]}, "reads layer 3"),
    ],
)
def test_a_drafter_of_another_target_is_refused(fields, word):
    with pytest.raises(IncompatibleDrafterError, match=word):
        random_drafter(**fields).start(target(), Sampler())

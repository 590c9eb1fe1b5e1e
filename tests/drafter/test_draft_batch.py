"""One pass of a network drafts for many requests: each gets the drafts it would get alone."""

import random
from contextlib import suppress
from types import SimpleNamespace

import mlx.core as mx
import pytest
import test_dflash2
import test_dspark
from batches import same
from test_dspark import ADAPTER, EMBEDDING, HEAD, MASK, SLIDING

from dflash_mlx.drafter.batched_drafts import BlockDraft, draft_batch
from dflash_mlx.sampling import Sampler
from dflash_mlx.settings import RequestSettings

OWN_EMBEDDING_AND_HEAD = (EMBEDDING, HEAD)
SECOND_ROW_DRAFTS_FIRST = {"sample_from_anchor": False}
REDUCED_VOCABULARY = {"draft_vocab_size": test_dspark.DRAFTED}


def dflash(**fields):
    return test_dflash2.build(test_dflash2.raw_config(dflash2=False, **fields))


def dflash2(**fields):
    return test_dflash2.build(test_dflash2.raw_config(**fields))


def dspark(parts=OWN_EMBEDDING_AND_HEAD, **fields):
    return test_dspark.build(test_dspark.raw_config(**fields), parts)


KINDS = {
    "dflash": dflash,
    "dflash with windows": lambda: dflash(**SLIDING),
    "dflash2": dflash2,
    "dflash2 with windows": lambda: dflash2(**SLIDING),
    "dspark": dspark,
    "gated, windows not causal": lambda: dspark(
        markov_head_type="gated", is_causal=False, **SLIDING
    ),
    "rnn, few tokens, sinks": lambda: dspark(
        markov_head_type="rnn",
        attention_sink_bias=True,
        **REDUCED_VOCABULARY,
        **SECOND_ROW_DRAFTS_FIRST,
    ),
    "a mask embedding": lambda: dspark((*OWN_EMBEDDING_AND_HEAD, MASK)),
    "narrow taps": lambda: dspark(
        (*OWN_EMBEDDING_AND_HEAD, ADAPTER),
        architectures=["DFlashDraftModel"],
        target_hidden_size=20,
        markov_rank=0,
        dflash_config={"causal_head": True},
    ),
}
SETTINGS = [  # one request for each
    {},
    {"temperature": 0.8, "seed": 1},
    {"logit_bias": {5: 2.0}},
    {"temperature": 1.3, "seed": 2},
    {"repetition_penalty": 1.5},
]


class BatchAndSingles:
    """Drafting sessions of one network's requests, each with a twin that drafts alone."""

    def __init__(self, kind: str) -> None:
        mx.random.seed(4)
        self.network = KINDS[kind]()
        self.random = random.Random(0)
        self.head_inputs: list[tuple[int, ...]] = []  # the shape of each call's hidden states
        config = self.network.config
        self.width = len(config.target_layer_ids) * config.target_hidden_size
        self.target = test_dflash2.make_target(test_dflash2.SHAPE)
        self.target.hidden_size = config.target_hidden_size
        original_logits = self.network.logits

        def logits(hidden, target):
            self.head_inputs.append(hidden.shape)
            return original_logits(hidden, target)

        self.network.logits = logits
        self.together = self._start_sessions()
        self.alone = self._start_sessions()

    def _start_sessions(self) -> list:
        return [
            self.network.start(self.target, Sampler(RequestSettings(**settings), [1, 2, 3]))
            for settings in SETTINGS
        ]

    def extend(self) -> None:
        """Give each session and its twin the features of 0 to 11 new tokens."""
        for shared, single in zip(self.together, self.alone, strict=True):
            taps = mx.random.normal((1, self.random.choice((0, 1, 4, 11)), self.width))
            shared.extend(taps)
            single.extend(taps)

    def check_contexts(self) -> None:
        """A session's cache is its twin's."""
        for shared, single in zip(self.together, self.alone, strict=True):
            assert shared.position == single.position
            for actual, expected in zip(shared.cache, single.cache, strict=True):
                assert same(actual.keys, expected.keys)
                assert same(actual.values, expected.values)
                assert actual.offset == expected.offset


def tokens(proposal) -> list[int]:
    return mx.array(proposal.tokens).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_a_batch_are_those_drafted_alone(kind):
    """Also at width 1, which drafts nothing, and past the block. Then [3, 1] is committed.

    What was drafted does not matter: the texts continue with tokens that nobody drafted.
    """
    batch = BatchAndSingles(kind)
    widths = [6, 2, 4, 5, 40]  # 40 is more than a block
    for _ in range(3):
        batch.extend()
        anchors = [batch.random.randrange(60) for _ in SETTINGS]
        batch.head_inputs.clear()
        drafts = draft_batch(list(map(BlockDraft, batch.together, anchors, widths)))
        assert len(batch.head_inputs) == 1, "the head's weights are read once"
        for index, proposal in enumerate(drafts):
            expected = batch.alone[index].propose(anchors[index], widths[index])
            for session in (batch.together[index], batch.alone[index]):
                session.sampler.commit([3, 1])
            assert tokens(proposal) == tokens(expected), f"request {index}"
        batch.check_contexts()
        widths = [batch.random.choice((1, 2, 3, 6)) for _ in widths]
        widths[batch.random.randrange(5)] = 5  # so that at least one request drafts


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_a_batch_are_those_drafted_alone(kind):
    batch = BatchAndSingles(kind)
    rows = [4, 9, 16, 2, 6]
    widths = [6, 2, 4, 5, 40]
    for _ in range(3):
        batch.extend()
        anchors = [batch.random.randrange(60) for _ in SETTINGS]
        batch.head_inputs.clear()
        drafts = draft_batch(list(map(BlockDraft, batch.together, anchors, widths, rows)))
        assert len(batch.head_inputs) == 1, "the head's weights are read once"
        for index, tree in enumerate(drafts):
            expected_tree = batch.alone[index].propose_tree(
                anchors[index], rows[index], widths[index]
            )
            proposal = tree.propose(rows[index])
            expected = expected_tree.propose(rows[index])
            assert proposal.parents == expected.parents
            assert proposal.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
            assert tokens(proposal) == tokens(expected), f"request {index}"
        batch.check_contexts()
        widths = [batch.random.choice((2, 3, 6, 40)) for _ in widths]
        widths[batch.random.randrange(5)] = 5


def test_drafts_keep_their_order_where_requests_have_different_drafters():
    """Two sessions of one network, one of another network, and one of a user's own drafter."""
    batch = BatchAndSingles("dflash2")
    other = BatchAndSingles("dspark")
    batch.extend()
    users_session = SimpleNamespace(propose=lambda anchor, width: ("user's", anchor, width))
    sessions = [users_session, batch.together[0], other.together[0], batch.together[1]]
    anchors = [9, 8, 7, 6]
    drafts = draft_batch([BlockDraft(*each, 4) for each in zip(sessions, anchors, strict=True)])
    assert drafts[0] == ("user's", 9, 4)
    assert [tokens(draft)[0] for draft in drafts[1:]] == [8, 7, 6]
    assert len(batch.head_inputs) == len(other.head_inputs) == 1
    assert tokens(drafts[1]) == tokens(batch.alone[0].propose(8, 4))
    assert tokens(drafts[3]) == tokens(batch.alone[1].propose(6, 4))


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_an_error_of_one_request_leaves_the_drafts_of_others(kind):
    """Whether its logits processor fails or its drafter; without a guard the error is raised."""
    batch = BatchAndSingles(kind)
    batch.extend()

    def fail(*_):
        raise ZeroDivisionError

    settings = RequestSettings(logits_processors=[fail])
    with_failing_processor = batch.network.start(batch.target, Sampler(settings, [1]))
    failing_drafter = SimpleNamespace(propose=fail, propose_tree=fail)
    sessions = [
        batch.together[0],
        with_failing_processor,
        failing_drafter,
        batch.together[2],
    ]
    guard = suppress(ZeroDivisionError)
    for _ in range(2):
        chains = draft_batch(
            [BlockDraft(session, 7, 5, tree_rows=None, guard=guard) for session in sessions]
        )
        assert chains[1] is chains[2] is None
        assert tokens(chains[0]) == tokens(batch.alone[0].propose(7, 5))
        assert tokens(chains[3]) == tokens(batch.alone[2].propose(7, 5))
        trees = draft_batch(
            [BlockDraft(session, 7, 5, tree_rows=6, guard=guard) for session in sessions]
        )
        assert trees[1] is trees[2] is None
        assert trees[0] and trees[3]
        for index in (0, 2):
            batch.alone[index].propose_tree(7, 6, 5)
    with pytest.raises(ZeroDivisionError):
        draft_batch([BlockDraft(session, 7, 5) for session in sessions])

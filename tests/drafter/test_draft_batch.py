"""One pass of a network for many requests: each drafts what it would alone."""

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

OWN = (EMBEDDING, HEAD)
LATE = {"sample_from_anchor": False}
NARROW = {"draft_vocab_size": test_dspark.DRAFTED}


def dflash(**fields):
    return test_dflash2.build(test_dflash2.raw_config(dflash2=False, **fields))


def dflash2(**fields):
    return test_dflash2.build(test_dflash2.raw_config(**fields))


def dspark(parts=OWN, **fields):
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
        markov_head_type="rnn", attention_sink_bias=True, **NARROW, **LATE
    ),
    "a mask's own embedding": lambda: dspark((*OWN, MASK)),
    "narrow taps": lambda: dspark(
        (*OWN, ADAPTER),
        architectures=["DFlashDraftModel"],
        target_hidden_size=20,
        markov_rank=0,
        dflash_config={"causal_head": True},
    ),
}
SETTINGS = [
    *({}, {"temperature": 0.8, "seed": 1}, {"logit_bias": {5: 2.0}}),
    *({"temperature": 1.3, "seed": 2}, {"repetition_penalty": 1.5}),
]


class Drafting:
    """Requests of one network, each with a twin that drafts alone."""

    def __init__(self, kind: str) -> None:
        mx.random.seed(4)
        self.network = KINDS[kind]()
        self.random = random.Random(0)
        self.heads: list[tuple[int, ...]] = []  # the shapes of what the head was called with
        config = self.network.config
        self.width = len(config.target_layer_ids) * config.target_hidden_size
        parts = test_dflash2.make_target(test_dflash2.SHAPE)
        self.target = SimpleNamespace(
            **{**vars(parts), "hidden_size": config.target_hidden_size}, head_of=parts.head
        )
        self.target.head = self._head
        logits = self.network.logits
        self.network.logits = lambda *inputs: self.heads.append(inputs[0].shape) or logits(*inputs)
        self.together, self.alone = (
            [
                self.network.start(self.target, Sampler(RequestSettings(**settings), [1, 2, 3]))
                for settings in SETTINGS
            ]
            for _ in range(2)
        )

    def _head(self, hidden):
        return self.target.head_of(hidden)

    def extend(self) -> None:
        """Features of a few tokens for each, of none for some."""
        for shared, single in zip(self.together, self.alone, strict=True):
            taps = mx.random.normal((1, self.random.choice((0, 1, 4, 11)), self.width))
            shared.extend(taps)
            single.extend(taps)

    def check_contexts(self) -> None:
        for shared, single in zip(self.together, self.alone, strict=True):
            assert shared.position == single.position
            for ours, theirs in zip(shared.cache, single.cache, strict=True):
                assert all(map(same, (ours.keys, ours.values), (theirs.keys, theirs.values)))
                assert ours.offset == theirs.offset


def tokens(proposal) -> list[int]:
    return mx.array(proposal.tokens).tolist()


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_alone(kind, trees):
    """Of any widths, one row among them, and with the text going on as it did not expect."""
    drafting = Drafting(kind)
    rows = [4, 9, 16, 2, 6] if trees else [None] * 5
    widths = [6, 2, 4, 5, 40]
    for _ in range(3):
        drafting.extend()
        anchors = [drafting.random.randrange(60) for _ in SETTINGS]
        drafting.heads.clear()
        drafts = draft_batch(list(map(BlockDraft, drafting.together, anchors, widths, rows)))
        assert len(drafting.heads) == 1, "the head is read once"
        for index, proposal in enumerate(drafts):
            alone = drafting.alone[index]
            if trees:
                other = alone.propose_tree(anchors[index], rows[index], widths[index]).propose(
                    rows[index]
                )
                proposal = proposal.propose(rows[index])
                assert proposal.parents == other.parents
                assert proposal.log_probs == pytest.approx(other.log_probs, abs=1e-5)
            else:
                other = alone.propose(anchors[index], widths[index])
                for session in (drafting.together[index], alone):
                    session.sampler.commit([3, 1])
            assert tokens(proposal) == tokens(other), f"request {index}"
        drafting.check_contexts()
        widths = [drafting.random.choice((2, 3, 6, 40) if trees else (1, 2, 3, 6)) for _ in widths]
        widths[drafting.random.randrange(5)] = 5


def test_who_has_no_network_of_ours_proposes_alone():
    """A drafter of somebody's own, a network's only session: each in its place."""
    drafting = Drafting("dflash2")
    other = Drafting("dspark")
    drafting.extend()
    foreign = SimpleNamespace(propose=lambda anchor, width: ("own", anchor, width))
    first, second = drafting.together[:2]
    sessions = [foreign, first, other.together[0], second]
    drafts = draft_batch(list(map(BlockDraft, sessions, [9, 8, 7, 6], [4] * 4)))
    assert drafts[0] == ("own", 9, 4)
    assert [tokens(drafts[index])[0] for index in (1, 2, 3)] == [8, 7, 6]
    assert len(drafting.heads) == len(other.heads) == 1
    expected = [drafting.alone[0].propose(8, 4), drafting.alone[1].propose(6, 4)]
    assert [tokens(drafts[index]) for index in (1, 3)] == list(map(tokens, expected))


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_an_error_of_one_is_its_own(kind):
    """Of its processor, or of a drafter of its own; the others draft what they would alone."""
    drafting = Drafting(kind)
    drafting.extend()

    def fails(*_):
        raise ZeroDivisionError

    careless = RequestSettings(logits_processors=[fails])
    bad = drafting.network.start(drafting.target, Sampler(careless, [1]))
    failing = SimpleNamespace(propose=fails, propose_tree=fails)
    sessions = [drafting.together[0], bad, failing, drafting.together[2]]
    guard = suppress(ZeroDivisionError)
    for round_ in range(2):
        drafts = draft_batch([BlockDraft(session, 7, 5, None, guard) for session in sessions])
        assert drafts[1] is drafts[2] is None
        for index, twin in ((0, 0), (3, 2)):
            assert tokens(drafts[index]) == tokens(drafting.alone[twin].propose(7, 5))
        trees = draft_batch([BlockDraft(session, 7, 5, 6, guard) for session in sessions])
        assert trees[1] is trees[2] is None and trees[0] and trees[3], round_
        for twin in (0, 2):
            drafting.alone[twin].propose_tree(7, 6, 5)
    with pytest.raises(ZeroDivisionError):
        draft_batch([BlockDraft(session, 7, 5) for session in sessions])

"""Best-first trees: as good as the best of all trees, and cheap to be told from their picks."""

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinymodels import drafter_config, random_drafter, target

from dflash_mlx.distributions import gumbel
from dflash_mlx.drafter.candidates import read_candidates, top_tokens
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dflash2 import DFlash2
from dflash_mlx.drafter.draft_tree import DraftTree, best_chain, best_first
from dflash_mlx.sampling import DRAFT_SCALE, Sampler
from dflash_mlx.settings import RequestSettings

PROMPT = [5, 9, 2, 40, 41, 7, 100]
ANCHOR = 3
Path = tuple[int, ...]  # the candidates from the first slot on


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def table(slots: int, befores: int, count: int, spread: float, seed: int) -> np.ndarray:
    """Log-probabilities [slots, befores, count] of random candidates."""
    random = np.random.default_rng(seed)
    return log_softmax(spread * random.normal(size=(slots, befores, count)))


def probability(log_probs: np.ndarray, path: Path) -> float:
    """Of a path, by the definition."""
    total = 0.0
    before = 0
    for slot, pick in enumerate(path):
        total += log_probs[slot, before if log_probs.shape[1] > 1 else 0, pick]
        before = pick
    return math.exp(total)


def trees(slots: int, count: int, nodes: int) -> Iterator[frozenset[Path]]:
    """Every tree of so many nodes, the root left out: a set of paths with all their beginnings."""
    seen = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for tree in seen:
            for parent in ((), *tree):
                if len(parent) < slots:
                    grown |= {tree | {(*parent, pick)} for pick in range(count)} - {tree}
        seen = grown
    yield from seen


def paths(tree) -> list[Path]:
    """The path of every row but the root."""
    all_paths: list[Path] = [()]
    for parent, pick in zip(tree.parents[1:], tree.picks[1:], strict=True):
        all_paths.append((*all_paths[parent], pick))
    return all_paths[1:]


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    count=st.integers(1, 3),
    conditional=st.booleans(),
    nodes=st.integers(1, 5),
    spread=st.floats(0.0, 3.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_tree_of_the_size_is_expected_to_be_longer(
    slots, count, conditional, nodes, spread, seed
):
    log_probs = table(slots, count if conditional else 1, count, spread, seed)
    tree = best_first(log_probs, nodes + 1)
    ours = paths(tree)
    assert len(set(ours)) == len(ours)
    expected = [probability(log_probs, path) for path in ours]
    assert np.allclose(np.exp(tree.log_probs[1:]), expected, rtol=1e-9)
    # The first n rows are the best tree of n nodes, for every n.
    for size in range(1, len(ours) + 1):
        best = max(
            sum(probability(log_probs, path) for path in other)
            for other in trees(slots, count, size)
        )
        assert sum(expected[:size]) == pytest.approx(best, rel=1e-9)
    assert len(ours) == nodes or not any(True for _ in trees(slots, count, len(ours) + 1))


def test_the_best_chain_takes_the_favourite_after_each_favourite():
    log_probs = table(3, 2, 2, 2.0, seed=5)
    chain = best_chain(log_probs)
    (path,) = [paths(chain)[-1]]
    assert chain.parents == [-1, 0, 1, 2]
    assert path[0] == log_probs[0, 0].argmax()
    for slot in (1, 2):
        assert path[slot] == log_probs[slot, path[slot - 1]].argmax()
    assert math.exp(chain.log_probs[-1]) == pytest.approx(probability(log_probs, path))


def test_what_is_all_but_impossible_is_left_out():
    log_probs = np.array([[[0.0, -50.0]], [[0.0, -50.0]]])
    assert paths(best_first(log_probs, 16)) == [(0,), (0, 0)]


def draft_tree(count: int = 4, slots: int = 3, rows: int = 12) -> DraftTree:
    """A tree of tokens 10, 11, ... in the first slot, 20, 21, ... in the second."""
    tokens = np.array([[10 * (slot + 1) + pick for pick in range(count)] for slot in range(slots)])
    return DraftTree(ANCHOR, tokens, table(slots, 1, count, 1.0, seed=2), rows)


def test_a_proposal_names_the_tokens_on_every_path():
    tree = draft_tree()
    for rows in (1, 2, 7, 12):
        proposal = tree.propose(rows)
        assert len(proposal) == rows and proposal.tokens[0] == ANCHOR
        for row in range(1, rows):
            path = proposal.paths()[row]
            picks = tuple(proposal.tokens[place] - 10 * proposal.depths[place] for place in path)
            assert picks == paths(tree._tree)[row - 1]
    chain = tree.propose_chain(3)
    assert chain.is_chain and chain.tokens[1:] == [
        10 * (slot + 1) + pick for slot, pick in enumerate(tree._chain.picks[1:3])
    ]


def session(temperature: float, dflash2: bool, seed: int = 0):
    """A drafter's session over a few tokens, and its sampler."""
    fields = {"block_size": 6}
    if dflash2:
        fields |= {"architectures": ["DFlash2DraftModel"], "selector_top_k": 5}
        fields |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8}
    drafter = random_drafter(**fields)
    if dflash2:
        codebook = drafter.candidate_selector.successor_codebook
        drafter.candidate_selector.successor_codebook = mx.random.normal(codebook.shape)
    sampler = Sampler(RequestSettings(temperature, seed=seed), PROMPT)
    started = drafter.start(target(), sampler)
    _, taps = target().features(mx.array([PROMPT]), (0, 2))
    started.extend(taps)
    return drafter, started, sampler


def block_log_q(drafter, temperature: float) -> tuple[mx.array, np.ndarray]:
    """The drafter's hidden states [L, D] and log-probabilities [L, V], from its modules."""
    _, taps = target().features(mx.array([PROMPT]), (0, 2))
    block = mx.array([[ANCHOR] + [drafter.config.mask_token_id] * 5])
    hidden = drafter(drafter.embed(block, target()), taps, drafter.make_cache())[:, 1:]
    logits = np.array(drafter.logits(hidden, target())[0], np.float64)
    return hidden[0], log_softmax(logits / (temperature or 1.0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tree_of_a_network(temperature):
    """Its expected length equals that of a tree over the whole vocabulary."""
    drafter, started, _ = session(temperature, dflash2=False)
    tree = started.propose_tree(ANCHOR, 24, 6)
    _, log_q = block_log_q(drafter, temperature)
    if temperature:  # every token is a candidate
        noise = np.array(
            gumbel([(0, len(PROMPT) + index) for index in range(5)], log_q.shape[1]), np.float64
        )
        log_q = log_softmax(log_q + noise / DRAFT_SCALE)
    whole = best_first(log_q[:, None], 24)
    # The few candidates share what little probability the rest of the vocabulary has.
    proposal = tree.propose(24)
    tokens = [ANCHOR, *whole.picks[1:]]
    assert list(proposal.parents) == whole.parents and proposal.tokens == tokens
    assert np.all(np.array(tree.log_probs) >= np.array(whole.log_probs) - 1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tree_of_a_selector_is_conditioned_on_the_path(temperature):
    drafter, started, _ = session(temperature, dflash2=True)
    tree = started.propose_tree(ANCHOR, 20, 6)
    hidden, log_q = block_log_q(drafter, temperature)
    selector = drafter.candidate_selector
    slots = started.scores(drafter.logits(hidden[None], target())[0], hidden, ANCHOR)
    [(tokens, log_probs)] = read_candidates([drafter.candidates(slots, 20)])
    assert log_probs.shape == (5, 5, 5)
    for slot in range(5):
        befores = [ANCHOR] if slot == 0 else tokens[slot - 1].tolist()
        for before, token in enumerate(befores):
            follow = mx.array(tokens[slot])
            pairs = np.array(selector.scores(hidden[slot], mx.array([token]), follow)[0])
            scores = log_q[slot, tokens[slot]] + pairs / (temperature or 1.0)
            if temperature == 0:
                assert np.allclose(log_probs[slot, before], log_softmax(scores), atol=1e-4)
    assert isinstance(drafter, DFlash2) and len(tree.propose(20)) == 20


def test_what_top_k_excludes_is_not_drafted():
    drafter = random_drafter()
    sampler = Sampler(RequestSettings(0.8, top_k=1, seed=0), PROMPT)
    started = drafter.start(target(), sampler)
    started.extend(target().features(mx.array([PROMPT]), (0, 2))[1])
    assert started.propose_tree(ANCHOR, 64, 16).propose(64).is_chain


def test_a_slot_whose_tokens_are_all_excluded_ends_the_tree():
    """As where a schema allows none of the tokens that an assistant's best clusters have."""
    nothing = mx.full((1, 9), -mx.inf)
    scores = mx.concatenate([mx.arange(9.0)[None], nothing])
    [(tokens, log_probs)] = read_candidates([top_tokens(scores, 4)])
    assert np.isfinite(log_probs).all()
    tree = DraftTree(ANCHOR, tokens=tokens, log_probs=log_probs, rows=9)
    assert max(tree.propose(9).depths) == 1
    assert np.isfinite(tree.propose_chain(9).log_probs).all()


def test_a_tree_is_no_deeper_than_asked():
    _, started, _ = session(0.0, dflash2=False)
    for width in (2, 4, 6, 40):
        proposal = started.propose_tree(ANCHOR, 64, width).propose(64)
        assert max(proposal.depths) <= min(width, 6) - 1
    assert DraftConfig.from_dict(drafter_config()).block_size == 16

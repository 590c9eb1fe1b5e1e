"""Draft trees: best-first trees are the best of all trees, and networks propose the right ones."""

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinymodels import random_drafter, target

from dflash_mlx.distributions import gumbel
from dflash_mlx.drafter.candidates import read_candidates, top_tokens
from dflash_mlx.drafter.dflash2 import DFlash2
from dflash_mlx.drafter.draft_tree import DraftTree, best_chain, best_first
from dflash_mlx.sampling import DRAFT_SCALE, Sampler
from dflash_mlx.settings import RequestSettings

PROMPT = [5, 9, 2, 40, 41, 7, 100]
ANCHOR = 3
Path = tuple[int, ...]  # the number of the candidate picked in each slot, from the first on


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def random_log_probs(
    slots: int, predecessors: int, count: int, *, spread: float, seed: int
) -> np.ndarray:
    """Log-probabilities [slots, predecessors, count] of random candidates."""
    random = np.random.default_rng(seed)
    return log_softmax(spread * random.normal(size=(slots, predecessors, count)))


def probability(log_probs: np.ndarray, path: Path) -> float:
    """The probability of a path: the product of its candidates' conditional probabilities."""
    conditional = log_probs.shape[1] > 1
    total = 0.0
    predecessor = 0
    for slot, pick in enumerate(path):
        total += log_probs[slot, predecessor, pick]
        if conditional:
            predecessor = pick
    return math.exp(total)


def all_trees(slots: int, count: int, nodes: int) -> Iterator[frozenset[Path]]:
    """Every tree of `nodes` nodes below the root, as the set of the paths that end in a node."""
    trees = {frozenset()}
    for _ in range(nodes):
        larger_trees = set()
        for tree in trees:
            for parent in ((), *tree):
                if len(parent) == slots:
                    continue
                for pick in range(count):
                    child = (*parent, pick)
                    if child not in tree:
                        larger_trees.add(tree | {child})
        trees = larger_trees
    yield from trees


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
def test_no_tree_of_the_same_size_has_a_larger_expected_length(
    slots, count, conditional, nodes, spread, seed
):
    """Expected length: the sum of the probabilities of all nodes' paths. All trees are tried."""
    predecessors = count if conditional else 1
    log_probs = random_log_probs(slots, predecessors, count, spread=spread, seed=seed)
    tree = best_first(log_probs, nodes + 1)
    tree_paths = paths(tree)
    assert len(set(tree_paths)) == len(tree_paths)
    probabilities = [probability(log_probs, path) for path in tree_paths]
    assert np.allclose(np.exp(tree.log_probs[1:]), probabilities, rtol=1e-9)
    # The first n rows are the best tree of n nodes, for every n.
    for size in range(1, len(tree_paths) + 1):
        best = max(
            sum(probability(log_probs, path) for path in other)
            for other in all_trees(slots, count, size)
        )
        assert sum(probabilities[:size]) == pytest.approx(best, rel=1e-9)
    if len(tree_paths) < nodes:
        assert not list(all_trees(slots, count, len(tree_paths) + 1)), "a larger tree exists"


def test_the_best_chain_takes_the_top_candidate_after_each_top_candidate():
    log_probs = random_log_probs(3, 2, 2, spread=2.0, seed=5)
    chain = best_chain(log_probs)
    path = paths(chain)[-1]
    assert chain.parents == [-1, 0, 1, 2]
    assert path[0] == log_probs[0, 0].argmax()
    for slot in (1, 2):
        assert path[slot] == log_probs[slot, path[slot - 1]].argmax()
    assert math.exp(chain.log_probs[-1]) == pytest.approx(probability(log_probs, path))


def test_a_candidate_of_almost_no_probability_is_left_out():
    log_probs = np.array([[[0.0, -50.0]], [[0.0, -50.0]]])
    assert paths(best_first(log_probs, 16)) == [(0,), (0, 0)]


def draft_tree(count: int = 4, slots: int = 3, rows: int = 12) -> DraftTree:
    """A tree whose candidates are tokens 10, 11, ... in the first slot, 20, 21, ... in the next."""
    first_tokens = 10 * np.arange(1, slots + 1)
    tokens = first_tokens[:, None] + np.arange(count)
    log_probs = random_log_probs(slots, 1, count, spread=1.0, seed=2)
    return DraftTree(ANCHOR, tokens, log_probs, rows)


def test_a_proposal_has_the_tokens_of_the_picks_on_every_path():
    """A token is 10 times its depth plus its pick; see `draft_tree`."""
    tree = draft_tree()
    for rows in (1, 2, 7, 12):
        proposal = tree.propose(rows)
        assert len(proposal) == rows and proposal.tokens[0] == ANCHOR
        for row in range(1, rows):
            path = proposal.paths()[row]
            picks = tuple(proposal.tokens[node] - 10 * proposal.depths[node] for node in path)
            assert picks == paths(tree._tree)[row - 1]
    chain = tree.propose_chain(3)
    first_pick, second_pick = tree._chain.picks[1:3]
    assert chain.is_chain
    assert chain.tokens[1:] == [10 + first_pick, 20 + second_pick]


def started_session(temperature: float, dflash2: bool, seed: int = 0):
    """A drafter, and its session that has read the features of PROMPT."""
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
    return drafter, started


def block_log_probs(drafter, temperature: float) -> tuple[mx.array, np.ndarray]:
    """The drafter's hidden states [L, D] and log-probabilities [L, V], by calling its modules."""
    _, taps = target().features(mx.array([PROMPT]), (0, 2))
    block = mx.array([[ANCHOR] + [drafter.config.mask_token_id] * 5])
    hidden = drafter(drafter.embed(block, target()), taps, drafter.make_cache())[:, 1:]
    logits = np.array(drafter.logits(hidden, target())[0], np.float64)
    return hidden[0], log_softmax(logits / (temperature or 1.0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_networks_tree_is_the_best_one_over_the_whole_vocabulary(temperature):
    """Though it is built from the top candidates only. Above 0, with the target's Gumbel noise."""
    drafter, started = started_session(temperature, dflash2=False)
    tree = started.propose_tree(ANCHOR, 24, 6)
    _, log_probs = block_log_probs(drafter, temperature)
    if temperature:
        # The sampler's seed, and the number of tokens before the sampled one.
        noise_keys = [(0, len(PROMPT) + index) for index in range(5)]
        noise = np.array(gumbel(noise_keys, log_probs.shape[1]), np.float64)
        log_probs = log_softmax(log_probs + noise / DRAFT_SCALE)
    best = best_first(log_probs[:, None], 24)
    proposal = tree.propose(24)
    assert list(proposal.parents) == best.parents
    assert proposal.tokens == [ANCHOR, *best.picks[1:]]
    # The top candidates share the little probability that all other tokens have.
    assert np.all(np.array(tree.log_probs) >= np.array(best.log_probs) - 1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_tree_of_a_selector_is_conditioned_on_the_path(temperature):
    """Above temperature 0 only sizes are compared, because the scores contain the noise."""
    drafter, started = started_session(temperature, dflash2=True)
    tree = started.propose_tree(ANCHOR, 20, 6)
    hidden, block_log_p = block_log_probs(drafter, temperature)
    selector = drafter.candidate_selector
    slots = started.scores(drafter.logits(hidden[None], target())[0], hidden, ANCHOR)
    [(tokens, log_probs)] = read_candidates([drafter.candidates(slots, 20)])
    assert log_probs.shape == (5, 5, 5)  # slots, predecessors and candidates
    for slot in range(5):
        predecessors = [ANCHOR] if slot == 0 else tokens[slot - 1].tolist()
        for index, predecessor in enumerate(predecessors):
            candidates = mx.array(tokens[slot])
            pair_scores = selector.scores(hidden[slot], mx.array([predecessor]), candidates)
            scores = block_log_p[slot, tokens[slot]] + np.array(pair_scores[0])
            if temperature == 0:
                assert np.allclose(log_probs[slot, index], log_softmax(scores), atol=1e-4)
    assert isinstance(drafter, DFlash2) and len(tree.propose(20)) == 20


def test_tokens_that_top_k_excludes_are_not_drafted():
    """With top_k=1 the tree is a chain."""
    drafter = random_drafter()
    sampler = Sampler(RequestSettings(0.8, top_k=1, seed=0), PROMPT)
    started = drafter.start(target(), sampler)
    started.extend(target().features(mx.array([PROMPT]), (0, 2))[1])
    assert started.propose_tree(ANCHOR, 64, 16).propose(64).is_chain


def test_a_slot_whose_tokens_are_all_excluded_ends_the_tree():
    """A JSON schema may allow none of the few tokens that an assistant scores."""
    excluded = mx.full((1, 9), -mx.inf)
    scores = mx.concatenate([mx.arange(9.0)[None], excluded])
    [(tokens, log_probs)] = read_candidates([top_tokens(scores, 4)])
    assert np.isfinite(log_probs).all()
    tree = DraftTree(ANCHOR, tokens=tokens, log_probs=log_probs, rows=9)
    assert max(tree.propose(9).depths) == 1
    assert np.isfinite(tree.propose_chain(9).log_probs).all()


def test_a_tree_is_at_most_as_deep_as_requested():
    """Nor deeper than the drafter's block of 6 rows."""
    _, started = started_session(0.0, dflash2=False)
    for width in (2, 4, 6, 40):
        proposal = started.propose_tree(ANCHOR, 64, width).propose(64)
        assert max(proposal.depths) <= min(width, 6) - 1

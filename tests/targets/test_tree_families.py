"""Every target family reads draft trees: a tree is its separate paths, text is plain text."""

import random

import mlx.core as mx
import pytest
from families import (
    FAMILIES,
    PROMPTS,
    TOKENS,
    random_model,
    random_prompt,
    target_of,
    truth,
)
from trees import TreeOracle, random_tree, separate_paths

import dflash_mlx as dm
from dflash_mlx import targets
from dflash_mlx.targets import tree

pytestmark = pytest.mark.by_family

LIMIT = 5e-5
FAR = 0.01  # a tree that is read wrongly is further off; the logits are a few units large

every_family = pytest.mark.parametrize("family", FAMILIES)


def largest_error(target: dm.Target, seed: int, rounds: int = 4) -> float:
    """Of the logits of random trees, with paths and chains committed in between."""
    rng = random.Random(seed)
    text = random_prompt(PROMPTS[seed], 9)
    session = target.start()
    list(session.prefill(text))
    errors = []
    for _ in range(rounds):
        tree = random_tree(rng, rng.choice((3, 9, 16)))
        expected = separate_paths(target, text, tree)
        logits, _ = session.verify(tree)
        errors.append(mx.abs(logits - expected).max().item())
        path = [0, *rng.choice(tree.paths())]
        session.commit(path)
        chain = random_prompt(rng.choice((1, 5)), rng.randrange(99))
        session.verify(dm.Proposal(chain))
        session.commit([0])
        text += [*(tree.tokens[row] for row in path), chain[0]]
        assert session.position == len(text)
    return max(errors)


@pytest.mark.parametrize("seed", PROMPTS)
@every_family
def test_a_tree_is_its_separate_paths(family, seed):
    """Hybrids included; one prompt starts beyond the window, the other wraps it on the way."""
    assert largest_error(truth(family, seed)[0], seed) <= LIMIT


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_ratios": [0, 1, 1, 1]},
        {
            "candidate_source_layer_id": 1,
            "candidate_topk_blocks": 2,
            "candidate_block_size": 4,
            "index_source_layer_ids": [1, 3],
            "index_topk": 6,
        },
    ],
    ids=["a group is a row", "candidates"],
)
def test_deepseek_v41_compressed_in_other_ways(changes):
    target = target_of(random_model("deepseek_v41", **changes), "deepseek_v41")
    assert largest_error(target, 0) <= LIMIT


class WrongPositions(tree.Tree):
    """The control: rows stand at half their depth."""

    def __init__(self, proposal):
        super().__init__(proposal)
        self.depths = self.depths // 2


class CausalMask(tree.Tree):
    """The control: a row sees all rows before it, whatever branch they are on."""

    def mask(self, held, window):
        return mx.tri(len(self), held + len(self), held, mx.bool_)

    def windows(self, size, held):
        return held + mx.arange(len(self))[:, None] - mx.arange(size - 1, -1, -1)


class WrongParents(tree.Tree):
    """The control: every row goes on from the root."""

    def __init__(self, proposal):
        super().__init__(dm.Proposal(proposal.tokens, (-1, *[0] * (len(proposal) - 1))))


@pytest.mark.parametrize("wrong", [WrongPositions, CausalMask, WrongParents])
@every_family
def test_a_tree_read_wrongly_is_noticed(family, wrong, monkeypatch):
    monkeypatch.setattr(targets.session, "Tree", wrong)
    assert largest_error(truth(family, 0)[0], 0, rounds=1) > FAR


@pytest.mark.parametrize("p", [0.4, 0.9])
@every_family
def test_drafted_text_is_plain_text(family, p):
    target, prompt, answer = truth(family, 1)
    oracle = TreeOracle(prompt, answer, 256, p=p)
    result = dm.generate(target, oracle, prompt, max_tokens=TOKENS, block_size=16)
    assert result.tokens == answer
    assert result.stats.rounds < TOKENS * (0.9 if p < 0.5 else 0.5), "paths were accepted"

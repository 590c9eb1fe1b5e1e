"""Every target family reads draft trees: a tree is its separate paths."""

import random

import mlx.core as mx
import pytest
from families import FAMILIES, PROMPTS, random_model, random_prompt, target_of, truth
from oracle import random_tree, separate_paths

import dflash_mlx as dm

pytestmark = pytest.mark.by_family

LIMIT = 5e-5


def largest_error(target: dm.Target, seed: int) -> float:
    """Of the logits of random trees, with paths and chains committed in between."""
    rng = random.Random(seed)
    text = random_prompt(PROMPTS[seed], 9)
    session = target.start()
    list(session.prefill(text))
    errors = []
    for _ in range(4):
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
@pytest.mark.parametrize("family", FAMILIES)
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

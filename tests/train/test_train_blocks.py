"""Blocks of a training batch: their mask, and the losses of the selector, from definitions."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.drafter.dflash2 import DFlash2
from dflash_mlx.train.drafter import new_drafter
from dflash_mlx.train.forward import draft_hidden
from dflash_mlx.train.losses import selector_loss, slot_weights

BLOCK = 4
LENGTH = 20
ANCHORS = (0, 5, 6, 16)


def make_drafter(**changes: object) -> DFlash:
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 32,
        "block_size": BLOCK,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
    }
    drafter = new_drafter(DraftConfig.from_dict({**config, **changes}), seed=0)
    if isinstance(drafter, DFlash2):  # its new convolutions and selector have no effect
        mx.random.seed(3)
        parts = ("_conv.", "codebook")
        for name, weight in tree_flatten(drafter.parameters()):
            if any(part in name for part in parts):
                drafter.load_weights([(name, mx.random.normal(weight.shape))], strict=False)
    return drafter


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "conv_kernel_size": 3,
    "conv_group_size": 4,
    "selector_rank": 8,
    "selector_top_k": 5,
}
CASES = {
    "full": {},
    "sliding, causal": SLIDING,
    "sliding, both ways": {**SLIDING, "is_causal": False},
    "window shorter than the block": {**SLIDING, "sliding_window": 2, "is_causal": False},
    "causal everywhere": {"is_causal": True},
    "one head of keys, biases": {"num_key_value_heads": 1, "attention_bias": True},
    "DFlash2": DFLASH2,
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def drafter(request) -> DFlash:
    return make_drafter(**request.param)


def random_inputs(rows: int = 2) -> tuple[mx.array, mx.array, mx.array]:
    """Block embeddings [N*A, B, D], taps [N, S, 2*D], anchors [N, A]."""
    mx.random.seed(1)
    anchors = mx.array([ANCHORS] * rows)
    embeddings = mx.random.normal((rows * len(ANCHORS), BLOCK, 16))
    return embeddings, mx.random.normal((rows, LENGTH, 32)), anchors


def test_blocks_of_a_batch_have_the_hidden_states_of_each_block_alone(drafter):
    embeddings, taps, anchors = random_inputs()
    together = draft_hidden(drafter, embeddings=embeddings, taps=taps, anchors=anchors)
    for row in range(2):
        for i, anchor in enumerate(ANCHORS):
            block = row * len(ANCHORS) + i
            cache = drafter.make_cache()
            context = taps[row : row + 1, :anchor]
            alone = drafter(embeddings[block : block + 1], context, cache)
            assert mx.allclose(together[block], alone[0], rtol=0, atol=1e-5), (row, anchor)


def test_the_selectors_loss_and_choices_follow_its_definition():
    """A slot's loss is the cross-entropy over its candidates, and 0 if the label is not one."""
    drafter = make_drafter(**DFLASH2)
    hidden = mx.random.normal((2, 3, 16))
    logits = mx.random.normal((2, 3, 32))
    before = mx.array([[4, 5, 6], [7, 8, 9]])
    labels = mx.argmax(logits, axis=-1)
    labels[1, 2] = mx.argmin(logits[1, 2])  # not among the candidates
    entropy, chosen = selector_loss(
        drafter.candidate_selector, hidden=hidden, logits=logits, before=before, labels=labels
    )
    selector = drafter.candidate_selector
    for row, slot in np.ndindex(2, 3):
        top_five = np.argsort(-np.array(logits[row, slot]))[:5]
        predecessor = selector.predecessor_codebook[before[row, slot]]
        query = predecessor * selector.hidden_projection(hidden[row, slot])
        pair_scores = np.array(selector.successor_codebook[mx.array(top_five)] @ query)
        scores = np.array(logits[row, slot])[top_five] + pair_scores
        assert chosen[row, slot].item() == top_five[scores.argmax()]
        label = labels[row, slot].item()
        expected = 0.0
        if label in top_five:
            right = scores[np.flatnonzero(top_five == label)[0]]
            expected = np.log(np.exp(scores - scores.max()).sum()) + scores.max() - right
        assert abs(entropy[row, slot].item() - expected) < 1e-4
    assert entropy[1, 2].item() == 0


def test_slot_weights_stop_at_the_first_disagreement():
    tokens = mx.array([5, 6, 7, 8, 9])
    choices = mx.array([5, 0, 7, 8, 9])
    inside = mx.array([True, True, True, True, False])
    decay = np.exp(-np.arange(5) / 4.0)
    agreeing = slot_weights(tokens, tokens, inside, gamma=4.0)
    assert np.allclose(agreeing, decay * [1, 1, 1, 1, 0], atol=1e-6)
    # The first slot that differs still counts: its label is the target's choice there.
    assert np.allclose(
        slot_weights(choices, tokens=tokens, inside=inside, gamma=4.0),
        decay * [1, 1, 0, 0, 0],
        atol=1e-6,
    )

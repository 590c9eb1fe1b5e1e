"""The drafter's network against golden outputs and against a slow reference of its own."""

import dataclasses
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx.utils import tree_flatten, tree_map
from tinymodels import drafter_config

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.network import DFlash

GOLDEN = Path(__file__).parent / "data" / "golden"


class Feeder:
    """Feeds one text's features to a drafter in pieces, as a generation does."""

    def __init__(self, drafter: DFlash, context: mx.array) -> None:
        self.drafter, self.context, self.fed = drafter, context, 0
        self.cache = drafter.make_cache()

    def take(self, upto: int) -> mx.array:
        """The features from where the last piece ended, [1, S, K*D]."""
        piece, self.fed = self.context[None, self.fed : upto], upto
        return piece

    def extend(self, upto: int) -> None:
        self.drafter.extend(self.take(upto), self.cache)

    def block(self, embeddings: mx.array, upto: int) -> mx.array:
        return self.drafter(embeddings, self.take(upto), self.cache)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
VARIANTS = {
    "plain": {},
    "attention biases": {"attention_bias": True},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "one layer, one tap": {"num_hidden_layers": 1, "target_layer_ids": [1]},
    "wide heads": {"head_dim": 48},
    "another eps": {"rms_norm_eps": 1e-2},
    "causal full layers": {"is_causal": True},
    "window 5, causal by itself": SLIDING | {"sliding_window": 5},
    "window 5, not causal": SLIDING | {"sliding_window": 5, "is_causal": False},
    "window 5, causal everywhere": SLIDING | {"sliding_window": 5, "is_causal": True},
    "window 1": SLIDING | {"sliding_window": 1},
    "window 1, not causal": SLIDING | {"sliding_window": 1, "is_causal": False},
    "window as long as a block": SLIDING | {"sliding_window": 16},
    "window longer than the text": SLIDING | {"sliding_window": 100},
    "rope base": {"rope_theta": 100.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "yarn rope": {"rope_scaling": YARN},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_against_the_slow_reference(fields):
    config = DraftConfig.from_dict(drafter_config(**fields))
    mx.random.seed(1)
    drafter = DFlash(config)
    # Norms that do something, and weights large enough that attention is not an average.
    drafter.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.1, drafter.parameters()))
    features = len(config.target_layer_ids) * config.hidden_size
    context = mx.random.normal((45, features))
    weights = {name: np.array(value) for name, value in tree_flatten(drafter.parameters())}
    feeder = Feeder(drafter, context)
    # Steps longer than the window, of one row, of none; blocks of every length.
    for number, (upto, rows) in enumerate([(0, 4), (1, 16), (23, 16), (24, 1), (24, 9), (45, 16)]):
        if number % 3 == 2:
            feeder.extend((feeder.fed + upto) // 2)
        block = mx.random.normal((1, rows, config.hidden_size))
        hidden = feeder.block(block, upto)
        expected = reference.forward(
            dataclasses.asdict(config), weights, np.array(context[:upto]), np.array(block[0])
        )
        np.testing.assert_allclose(np.array(hidden[0]), expected, atol=2e-4)


def test_parameter_names_are_the_checkpoints():
    names = {name for name, _ in tree_flatten(DFlash(golden_config()).parameters())}
    assert names == set(mx.load(str(GOLDEN / "dflash_full" / "model.safetensors")))


def golden_config() -> DraftConfig:
    return DraftConfig.from_file(GOLDEN / "dflash_full" / "config.json")


@pytest.mark.parametrize("offsets", [[3, 11], [0, 0]])
def test_offsets_per_batch_row(offsets):
    """The trainer's batches: each row of the batch starts at a position of its own."""
    attention = DFlash(golden_config()).layers[0].self_attn
    x = mx.random.normal((2, 5, 64))
    queries = attention.queries(x, mx.array(offsets))
    keys, values = attention.keys_values(x, mx.array(offsets))
    for row, offset in enumerate(offsets):
        alone = x[row : row + 1]
        assert mx.allclose(queries[row : row + 1], attention.queries(alone, offset), atol=1e-5)
        for ours, one in zip((keys, values), attention.keys_values(alone, offset), strict=True):
            assert mx.allclose(ours[row : row + 1], one, atol=1e-5)

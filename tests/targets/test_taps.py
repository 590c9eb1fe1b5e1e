"""Taps are the outputs of the chosen layers, and a failed forward leaves none in memory."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from tinymodels import SUPPORTED, target

from dflash_mlx.errors import SettingsError
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets.taps import Taps

TOKENS = mx.array([[5, 9, 2, 40, 41, 7]])


def layer_outputs(model: nn.Module, tokens: mx.array) -> list[mx.array]:
    """Every layer's output, computed here without taps."""
    x = model.model.embed_tokens(tokens)
    outputs = []
    for layer in model.model.layers:
        x = layer(x, "causal", None)
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("layers", [(0,), (2,), (0, 2), (2, 0, 1), (1, 1)])
def test_taps_are_the_layers_outputs_in_the_requested_order(family, bits, layers):
    model = target(family, bits)
    logits, taps = model.features(TOKENS, layers)
    outputs = layer_outputs(model.model, TOKENS)
    assert mx.array_equal(taps, mx.concatenate([outputs[i] for i in layers], axis=-1))
    assert mx.array_equal(logits, model.model(TOKENS))


def test_a_forward_that_fails_keeps_no_outputs_and_the_next_one_works():
    model = target()
    session = model.start((0, 2))

    norm_class = type(model.parts.norm)

    class FailingNorm(norm_class):
        def __call__(self, x):
            raise RuntimeError("the device was lost")

    model.parts.norm.__class__ = FailingNorm
    with pytest.raises(RuntimeError, match="lost"):
        session.verify(Proposal([5, 9]))
    model.parts.norm.__class__ = norm_class
    assert model._interception._running.forward is None
    _, taps = model.features(TOKENS, (0, 2))
    assert taps.shape == (1, 6, 2 * model.hidden_size)


def test_layer_minus_one_is_the_embeddings_that_the_first_layer_reads():
    """Also together with other layers, in the requested order."""
    model = target()
    logits, taps = model.features(TOKENS, [0, -1, 2])
    outputs = layer_outputs(model.model, TOKENS)
    expected = mx.concatenate([outputs[0], model.embed(TOKENS), outputs[2]], axis=-1)
    assert mx.array_equal(taps, expected)
    assert mx.array_equal(logits, model.model(TOKENS))
    with pytest.raises(SettingsError, match="Layer -2"):
        model.start([-2])


class StreamsLayer(nn.Module):
    """Returns two streams, x and 10 x, and the weights 0.5 and 2 of their mix."""

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return mx.stack([x, 10 * x], axis=2), mx.array([0.5, 2.0]) * mx.ones((1, 3, 1))


def test_the_tap_of_a_layer_with_several_streams_is_their_weighted_sum():
    """A layer of DeepSeek-V4.1 returns streams [N, S, hc, D] and their weights [N, S, hc]."""
    layer = StreamsLayer()
    x = mx.ones((1, 3, 4))
    runs = {id(layer): [(x, layer(x))]}
    weighted_sum = 0.5 * 1 + 2.0 * 10
    assert mx.array_equal(Taps([layer], [0]).of(runs, 3), weighted_sum * mx.ones((1, 3, 4)))


class TupleLayer(nn.Module):
    def __call__(self, x: mx.array) -> tuple[mx.array, str]:
        return x + 1, "something else"


def test_the_tap_of_a_layer_that_returns_a_tuple_is_its_first_item():
    """Gemma 4's layers return the hidden states first, then other values."""
    layer = TupleLayer()
    x = mx.zeros((1, 3, 4))
    runs = {id(layer): [(x, layer(x))]}
    assert mx.array_equal(Taps([layer], [0]).of(runs, 3), mx.ones((1, 3, 4)))

"""Taps: right, on one instance, gone afterwards, and without a trace in names or other models."""

from threading import Lock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tinymodels import SUPPORTED, model_config, random_model, target

from dflash_mlx.target.taps import Taps

TOKENS = mx.array([[5, 9, 2, 40, 41, 7]])


def layer_outputs(model: nn.Module, tokens: mx.array) -> list[mx.array]:
    """Every layer's output, layer by layer by hand."""
    x = model.model.embed_tokens(tokens)
    outputs = []
    for layer in model.model.layers:
        x = layer(x, "causal", None)
        outputs.append(x)
    return outputs


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in tree_flatten(model.parameters())]


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("layers", [(0,), (2,), (0, 2), (2, 0, 1)])
def test_they_are_the_layers_outputs_in_the_order_asked(family, bits, layers):
    model = target(family, bits)
    logits, taps = model.features(TOKENS, layers)
    outputs = layer_outputs(model.model, TOKENS)
    assert mx.array_equal(taps, mx.concatenate([outputs[i] for i in layers], axis=-1))
    assert mx.array_equal(logits, model.model(TOKENS))


def test_no_taps_have_no_columns():
    _, taps = target().features(TOKENS, ())
    assert taps.shape == (1, 6, 0)


def test_they_survive_quantization_of_the_tapped_model():
    model = random_model(model_config("qwen3"))
    taps = Taps(model.model.layers, [1], Lock())
    with taps.recording():
        before = model(TOKENS)
    nn.quantize(model, group_size=64, bits=8)
    with taps.recording():
        after = model(TOKENS)
    recorded = taps.take(6)
    assert mx.array_equal(recorded, layer_outputs(model, TOKENS)[1])
    assert not mx.array_equal(before, after)


def test_the_model_is_touched_during_a_forward_only():
    model, other = random_model(model_config("qwen3")), random_model(model_config("qwen3"))
    taps = Taps(model.model.layers, [1], Lock())
    cls, before = type(model.model.layers[1]), names(model)
    assert {type(layer) for layer in model.model.layers} == {cls}
    with taps.recording():
        assert type(model.model.layers[1]) is not cls
        assert names(model) == before
        assert {type(layer) for layer in other.model.layers} == {cls}
        other(TOKENS)
    assert {type(layer) for layer in model.model.layers} == {cls}
    assert names(model) == before
    assert cls.__call__ is type(other.model.layers[0]).__call__


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_the_model_is_restored_after_any_error(error):
    model = random_model(model_config("llama"))
    classes = [type(layer) for layer in model.model.layers]
    with pytest.raises(error), Taps(model.model.layers, [0, 2], Lock()).recording():
        raise error
    assert [type(layer) for layer in model.model.layers] == classes


def test_two_sets_of_taps_do_not_meet():
    model = random_model(model_config("qwen3"))
    first, second = (Taps(model.model.layers, layers, Lock()) for layers in ([0, 1], [1]))
    outputs = layer_outputs(model, TOKENS)
    with first.recording():
        model(TOKENS)
    with second.recording():
        model(TOKENS[:, :2])
    assert mx.array_equal(first.take(6), mx.concatenate(outputs[:2], axis=-1))
    assert second.take(2).shape == (1, 2, 64)


class TupleLayer(nn.Module):
    def __call__(self, x: mx.array) -> tuple[mx.array, str]:
        return x + 1, "something else"


def test_layers_that_return_tuples():
    """Gemma 4's do; the hidden states come first."""
    layers = [TupleLayer()]
    taps = Taps(layers, [0], Lock())
    with taps.recording():
        result = layers[0](mx.zeros((1, 3, 4)))
    assert result[1] == "something else"
    assert mx.array_equal(taps.take(3), mx.ones((1, 3, 4)))

"""Taps: right, on one instance, gone afterwards, and without a trace in names or other models."""

from threading import Lock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tinymodels import SUPPORTED, model_config, random_model, target

from dflash_mlx.errors import SettingsError
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets.overrides import Overrides
from dflash_mlx.targets.taps import TapRecorder

TOKENS = mx.array([[5, 9, 2, 40, 41, 7]])


def tapped(layers, indices) -> tuple[TapRecorder, Overrides]:
    """Taps of these layers, and what installs them."""
    overrides = Overrides(Lock())
    return TapRecorder(layers, indices, overrides), overrides


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
@pytest.mark.parametrize("layers", [(0,), (2,), (0, 2), (2, 0, 1), (1, 1)])
def test_they_are_the_layers_outputs_in_the_order_asked(family, bits, layers):
    model = target(family, bits)
    logits, taps = model.features(TOKENS, layers)
    outputs = layer_outputs(model.model, TOKENS)
    assert mx.array_equal(taps, mx.concatenate([outputs[i] for i in layers], axis=-1))
    assert mx.array_equal(logits, model.model(TOKENS))


def test_a_forward_that_fails_leaves_no_outputs():
    model = target()
    session = model.start((0, 2))

    class Broken(type(model.parts.norm)):
        def __call__(self, x):
            raise RuntimeError("the device was lost")

    model.parts.norm.__class__ = Broken
    with pytest.raises(RuntimeError, match="lost"):
        session.verify(Proposal([5, 9]))
    model.parts.norm.__class__ = nn.RMSNorm
    _, recorder = model._tapped[0, 2]
    assert not recorder._runs


def test_the_model_is_touched_during_a_forward_only():
    model, other = random_model(model_config("qwen3")), random_model(model_config("qwen3"))
    _, overrides = tapped(model.model.layers, [1])
    cls, before = type(model.model.layers[1]), names(model)
    assert {type(layer) for layer in model.model.layers} == {cls}
    with overrides.installed():
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
    _, overrides = tapped(model.model.layers, [0, 2])
    with pytest.raises(error), overrides.installed():
        raise error
    assert [type(layer) for layer in model.model.layers] == classes


def test_two_requests_with_different_taps_do_not_meet():
    model = target()
    first, second = model.start([0]), model.start([2, 1])
    list(first.prefill(TOKENS[0].tolist())), list(second.prefill(TOKENS[0].tolist()))
    _, a = first.verify(Proposal([7, 8]))
    _, b = second.verify(Proposal([7, 8]))
    outputs = layer_outputs(model.model, mx.array([[*TOKENS[0].tolist(), 7, 8]]))
    assert mx.allclose(a, outputs[0][:, -2:], atol=1e-5)
    assert mx.allclose(b, mx.concatenate([outputs[2], outputs[1]], -1)[:, -2:], atol=1e-5)


def test_minus_one_is_what_the_first_layer_reads():
    """Beside the first layer's own output, and in the order that was asked for."""
    model = target()
    logits, taps = model.features(TOKENS, [0, -1, 2])
    outputs = layer_outputs(model.model, TOKENS)
    expected = mx.concatenate([outputs[0], model.embed(TOKENS), outputs[2]], axis=-1)
    assert mx.array_equal(taps, expected)
    assert mx.array_equal(logits, model.model(TOKENS))
    with pytest.raises(SettingsError, match="Layer -2"):
        model.start([-2])


def test_an_abandoned_request_leaves_nothing_behind():
    hybrid = target("qwen3_next", num_hidden_layers=4)  # recurrences are taped, layers tapped
    before = [type(module) for module in hybrid.model.modules()]
    hybrid.start([0, 2]).verify(Proposal([4, 5]))
    assert [type(module) for module in hybrid.model.modules()] == before


class StreamsLayer(nn.Module):
    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return mx.stack([x, 10 * x], axis=2), mx.array([0.5, 2.0]) * mx.ones((1, 3, 1))


def test_layers_with_several_streams_give_what_the_next_one_reads():
    """DeepSeek-V4.1's: streams [N, S, hc, D] and the mix of them [N, S, hc]."""
    layers = [StreamsLayer()]
    taps, overrides = tapped(layers, [0])
    with overrides.installed():
        layers[0](mx.ones((1, 3, 4)))
    assert mx.array_equal(taps.take(3), 20.5 * mx.ones((1, 3, 4)))


class TupleLayer(nn.Module):
    def __call__(self, x: mx.array) -> tuple[mx.array, str]:
        return x + 1, "something else"


def test_layers_that_return_tuples():
    """Gemma 4's do; the hidden states come first."""
    layers = [TupleLayer()]
    taps, overrides = tapped(layers, [0])
    with overrides.installed():
        result = layers[0](mx.zeros((1, 3, 4)))
    assert result[1] == "something else"
    assert mx.array_equal(taps.take(3), mx.ones((1, 3, 4)))

"""The layers in the place of stock ones: which rows they take, and what they make of them."""

from collections import Counter
from functools import partial

import families
import mlx.core as mx
import mlx.nn as nn
import pytest
from kernel_check import kernel_factory, on_gpu_or_emulator, relative_error, same_bits
from kernel_models import Launches, half_precision, quick_factory
from mlx.utils import tree_flatten
from mlx_lm.models import switch_layers
from mlx_lm.models.gpt_oss import SwigluOAI
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from dflash_mlx.kernels.choose import NONE, tensor_key
from dflash_mlx.kernels.fused import UNITS, KernelSwitchGLU, shared_inputs
from dflash_mlx.kernels.modules import (
    EXACT_ROWS,
    SWAPS,
    KernelConv1d,
    Kernels,
    can_swap,
    chosen_together,
    restored,
    swap_layers,
    will_be_exact,
)
from dflash_mlx.kernels.shapes import matrices

pytestmark = on_gpu_or_emulator

TOP_K = 2
CONFIG = {"num_experts_per_tok": TOP_K}


class Alone(nn.Module):
    """A model of one layer, which may be quantized."""

    def __init__(self, name: str, layer: nn.Module, quantized: bool) -> None:
        super().__init__()
        setattr(self, name, layer)
        if quantized:
            nn.quantize(self, group_size=32, bits=4)


# The name of a layer in a model, and the layer.
LAYERS = {
    "linear": ("proj", lambda: nn.Linear(64, 24, bias=False)),
    "linear with biases": ("proj", lambda: nn.Linear(64, 24)),
    "embedding": ("embed_tokens", lambda: nn.Embedding(24, 64)),
    "experts": ("proj", lambda: SwitchLinear(64, 24, 5, bias=False)),
    "experts with biases": ("proj", lambda: SwitchLinear(64, 24, 5)),
    "gated experts": ("mlp", lambda: SwitchGLU(64, 32, 5)),
    "gated experts otherwise": ("mlp", lambda: SwitchGLU(64, 32, 5, activation=mx.maximum)),
    "gated experts with biases": ("mlp", lambda: SwitchGLU(64, 32, 5, SwigluOAI(), bias=True)),
}


def call(layer: nn.Module, rows: int) -> mx.array:
    """What a layer makes of so many random tokens."""
    x = mx.random.normal((1, rows, 64), key=mx.random.key(rows))
    if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding):
        return layer.as_linear(x)
    if isinstance(layer, nn.Linear | nn.QuantizedLinear):
        return layer(x)
    scores = mx.random.normal((1, rows, 5), key=mx.random.key(1))
    experts = mx.argsort(scores, axis=-1)[..., :TOP_K].astype(mx.uint32)
    return layer(x if isinstance(layer, SwitchGLU) else x[..., None, None, :], experts)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_up_to_64_tokens_are_ours_and_more_are_not(kind, quantized):
    """Tokens, not the pairs of a token and an expert; the result is the stock one's."""
    name, make = LAYERS[kind]
    mx.random.seed(0)
    model = Alone(name, make(), quantized)
    launches = Launches()
    layer = getattr(model, name)
    if kind.endswith("biases"):
        for part in layer.modules():
            if "bias" in part:
                part.bias = mx.random.normal(part.bias.shape)
    expected = {rows: call(layer, rows) for rows in (1, 33, EXACT_ROWS, EXACT_ROWS + 1)}
    swap_layers(model, config=CONFIG, kernels=Kernels(launches), rows={}, exact=True)
    for rows, y in expected.items():
        launches.counts.clear()
        assert relative_error(call(layer, rows), y) < 1e-5
        # Gate and up share a launch, but for biases and other activations.
        parts = 3 if "gated" in kind else 1
        if kind == "gated experts":
            parts = 2
        if rows > EXACT_ROWS:
            parts = 0
        assert sum(launches.counts.values()) == parts, rows


def test_our_experts_are_not_sorted_by_mlx_too(monkeypatch):
    """As MLX does from 64 pairs of a token and an expert on."""
    model = Alone("mlp", SwitchGLU(64, 32, 5, SwigluOAI(), bias=True), True)
    swap_layers(model, config=CONFIG, kernels=Kernels(kernel_factory()), rows={}, exact=True)
    monkeypatch.setattr(switch_layers, "_gather_sort", None)
    assert call(model.mlp, 48).shape == (1, 48, TOP_K, 64)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_no_tokens_are_left_to_mlx(kind):
    """As a stock layer takes them; our kernels refuse so few elements."""
    name, make = LAYERS[kind]
    model = Alone(name, make(), False)
    kernels = Kernels(kernel_factory())
    layer = getattr(model, name)
    swap_layers(model, config=CONFIG, kernels=kernels, rows={}, exact=True)
    assert call(layer, 0).size == 0


def test_what_has_a_kernel():
    """By bits, group, mode and dtypes; a subclass may compute something else."""

    class Other(nn.Linear):
        pass

    def quantized(group=64, bits=4, mode="affine"):
        return nn.QuantizedLinear(128, 32, False, group, bits, mode)

    ours = [quantized(), quantized(32, 8), nn.Linear(64, 32), nn.Embedding(8, 8)]
    mixed = quantized()
    whole = nn.Linear(64, 32)
    mixed.biases = mixed.biases.astype(mx.float16)
    whole.weight = mx.ones((8, 8), mx.int32)
    others = [quantized(bits=6), quantized(32, 4, "mxfp4"), mixed, whole, Other(64, 32), nn.SiLU()]
    assert [*map(can_swap, ours + others)] == [True] * len(ours) + [False] * len(others)


def test_exact_is_the_default_where_it_was_measured_to_be_free():
    """At every row, of every matrix, and not on tensor units, which exact decoding keeps off."""
    model = half_precision("qwen3")
    config = families.CONFIGS["qwen3"]
    every = frozenset(range(1, 17))
    free = {matrix.key: every for _, _, matrix in matrices(model, config)}
    exact = partial(will_be_exact, model, config)
    [first, *_] = free
    assert exact(free) and exact(free | {tensor_key(first): NONE})
    for missing in (NONE, every - {1}, every - {16}):
        assert not exact(free | {first: missing})
    assert not exact(free | {tensor_key(first): every}) and not exact({})
    model.lm_head = nn.QuantizedLinear(64, 256, False, 64, 6)  # no kernel
    rest = [matrix.key for _, _, matrix in matrices(model, config)]
    assert not exact(dict.fromkeys(rest, every))


def test_only_convolutions_of_single_channels_are_ours():
    """And in exact decoding alone; a stride, padding or two channels at once are another sum."""
    ours = [nn.Conv1d(8, 8, 4, groups=8), nn.Conv1d(24, 24, 3, groups=24, bias=False)]
    others = [
        nn.Conv1d(8, 8, 4, groups=8, **{name: 2}) for name in ("stride", "padding", "dilation")
    ]
    others += [nn.Conv1d(8, 8, 4), nn.Conv1d(8, 8, 4, groups=4), nn.Conv1d(8, 16, 4, groups=8)]
    for exact in (False, True):
        model = nn.Sequential(*ours, *others)
        swap_layers(model, config={}, kernels=Kernels(kernel_factory()), rows={}, exact=exact)
        swapped = [layer for layer in model.layers if type(layer) is KernelConv1d]
        assert swapped == (ours if exact else [])
    model = half_precision("qwen3_5")
    config = families.CONFIGS["qwen3_5"]
    swap_layers(model, config=config, kernels=Kernels(kernel_factory()), rows={}, exact=True)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv1d)]
    assert convolutions and {type(layer) for layer in convolutions} == {KernelConv1d}


@pytest.mark.parametrize(("q_rows", "kv_rows", "launches"), [(4, 4, [3]), (4, 5, [2]), (4, 0, [])])
def test_only_layers_for_the_same_rows_share_a_launch(q_rows, kv_rows, launches):
    model = half_precision("qwen3")
    config = families.CONFIGS["qwen3"]
    shape = {matrix.columns: matrix.key for _, _, matrix in matrices(model, config)}
    rows = {shape[256]: frozenset(range(q_rows)), shape[128]: frozenset(range(kv_rows))}
    groups = list(shared_inputs(model))
    swap_layers(model, config=config, kernels=Kernels(kernel_factory()), rows=rows)
    for layers in groups:
        given = [layer for layer in layers if getattr(layer, "_fused", None)]
        fused = Counter(layer._fused.func for layer in given)
        assert list(fused.values()) == launches


def test_nothing_of_a_wiring_is_left_for_the_next():
    """The stopwatch wires with all groups and then without one: that one has to be MLX's."""
    model = half_precision("qwen3")
    config = families.CONFIGS["qwen3"]
    kernels = Kernels(kernel_factory())
    every = frozenset(range(1, 17))
    rows = {matrix.key: every for _, _, matrix in matrices(model, config)}
    unit = model.layers[0].mlp
    gated = {matrix.key for _, module, matrix in matrices(model, config) if module is unit.up_proj}
    for left in (set(), gated):
        with restored(model):
            swap_layers(
                model,
                config=config,
                kernels=kernels,
                rows={key: row for key, row in rows.items() if key not in left},
            )
            assert (type(unit) in UNITS.values()) == (not left)


def test_what_shares_a_launch_is_chosen_together():
    model = families.random_model("qwen3", head_dim=64, num_key_value_heads=1)
    groups = chosen_together(model, families.CONFIGS["qwen3"])
    shapes = [{tuple(map(int, key.split()[0].split("x"))) for key in group} for group in groups]
    queries_and_keys = {(256, 64), (64, 64)}
    gated = {(128, 64), (64, 128)}
    out = {(64, 256)}
    assert all(group in shapes for group in (queries_and_keys, gated, out)) and len(shapes) == 3
    # The head, of 256 tokens, has the form of the queries.
    layers = sum(len(members) for group in groups for members in group.values())
    assert layers == len(list(matrices(model, {})))


def test_a_swapped_layer_keeps_its_weights_and_their_names():
    model = half_precision("qwen3_moe")
    config = families.CONFIGS["qwen3_moe"]
    before = dict(tree_flatten(model.parameters()))
    layers = dict(model.named_modules())
    kernel_plan = swap_layers(
        model, config=config, kernels=Kernels(quick_factory()), rows={}, exact=True
    )
    after = dict(tree_flatten(model.parameters()))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    swapped = {path: module for path, module in model.named_modules() if path in kernel_plan.layers}
    assert all(layers[path] is module for path, module in swapped.items())
    assert {type(module) for module in swapped.values()} <= set(SWAPS.values())
    assert KernelSwitchGLU in map(type, model.modules())
    # And no class was touched: a new layer is a stock one.
    assert type(nn.Linear(8, 8)) is nn.Linear and type(half_precision("qwen3").lm_head) in SWAPS


def test_a_gated_unit_is_fused_only_as_a_whole():
    """Not with a part that is left to MLX."""
    config = families.CONFIGS["qwen3"]
    model = half_precision("qwen3")
    kernels = Kernels(quick_factory())
    four = frozenset({4})
    shape = {matrix.columns: matrix.key for _, _, matrix in matrices(model, config)}
    swap_layers(model, config=config, kernels=kernels, rows={shape[128]: four})
    assert type(model.layers[0].mlp.gate_proj) in SWAPS.values()
    assert type(model.layers[0].mlp) not in UNITS.values()


@pytest.mark.parametrize(
    ("groups", "biases", "shared"),
    [
        ((32, 32), (False, False), True),
        ((32, 64), (False, False), False),
        ((32, 32), (True, False), False),
        ((32, 32), (False, True), False),
    ],
)
def test_gate_and_up_of_other_kinds_share_no_launch(groups, biases, shared):
    model = half_precision("qwen3")
    unit = model.layers[0].mlp
    unit.gate_proj, unit.up_proj = (
        nn.QuantizedLinear(64, 128, bias, group, 4)
        for bias, group in zip(biases, groups, strict=True)
    )
    swap_layers(
        model,
        config=families.CONFIGS["qwen3"],
        kernels=Kernels(quick_factory()),
        rows={},
        exact=True,
    )
    assert (type(unit) in UNITS.values()) == shared


def test_a_convolution_in_one_order_is_the_stock_one():
    x = mx.random.normal((1, 12, 8), key=mx.random.key(0))
    layer = nn.Conv1d(8, 8, 4, groups=8)
    layer.bias = mx.random.normal((8,), key=mx.random.key(1))
    stock = layer(x)
    layer.__class__ = KernelConv1d
    layer._rows = range(1, 65)
    assert mx.allclose(layer(x), stock, atol=1e-6)
    assert same_bits(layer(x)[:, 4:5], layer(x[:, 4:8]))

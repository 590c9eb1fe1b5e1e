"""Layers on our kernels: which stock layers they replace, for which rows, and their results."""

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


class OneLayerModel(nn.Module):
    """A model of one layer, which may be quantized."""

    def __init__(self, name: str, layer: nn.Module, quantized: bool) -> None:
        super().__init__()
        setattr(self, name, layer)
        if quantized:
            nn.quantize(self, group_size=32, bits=4)


# Kinds of layers: the attribute of a model that holds one, and a function that makes one.
LAYERS = {
    "linear": ("proj", lambda: nn.Linear(64, 24, bias=False)),
    "linear with biases": ("proj", lambda: nn.Linear(64, 24)),
    "embedding": ("embed_tokens", lambda: nn.Embedding(24, 64)),
    "experts": ("proj", lambda: SwitchLinear(64, 24, 5, bias=False)),
    "experts with biases": ("proj", lambda: SwitchLinear(64, 24, 5)),
    "gated experts": ("mlp", lambda: SwitchGLU(64, 32, 5)),
    "gated experts with another activation": (
        "mlp",
        lambda: SwitchGLU(64, 32, 5, activation=mx.maximum),
    ),
    "gated experts with biases": ("mlp", lambda: SwitchGLU(64, 32, 5, SwigluOAI(), bias=True)),
}


def call(layer: nn.Module, rows: int) -> mx.array:
    """A layer's result for `rows` random tokens, and random experts where it has some."""
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
def test_a_layer_uses_our_kernels_for_up_to_64_tokens(kind, quantized):
    """Tokens count, not pairs of a token and an expert. Results are the stock layer's."""
    name, make = LAYERS[kind]
    mx.random.seed(0)
    model = OneLayerModel(name, make(), quantized)
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
        if rows > EXACT_ROWS:
            expected_launches = 0
        elif kind == "gated experts":  # gate and up share one
            expected_launches = 2
        elif "gated" in kind:  # with biases or another activation they do not
            expected_launches = 3
        else:
            expected_launches = 1
        assert sum(launches.counts.values()) == expected_launches, rows


def test_rows_for_our_experts_are_not_also_sorted_by_mlx(monkeypatch):
    """MLX sorts 64 and more pairs of a token and an expert. Our kernel sorts them itself."""
    model = OneLayerModel("mlp", SwitchGLU(64, 32, 5, SwigluOAI(), bias=True), True)
    swap_layers(model, config=CONFIG, kernels=Kernels(kernel_factory()), rows={}, exact=True)
    monkeypatch.setattr(switch_layers, "_gather_sort", None)
    assert call(model.mlp, 48).shape == (1, 48, TOP_K, 64)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_a_call_with_zero_tokens_is_left_to_mlx(kind):
    """Stock layers accept it; our kernels do not."""
    name, make = LAYERS[kind]
    model = OneLayerModel(name, make(), False)
    kernels = Kernels(kernel_factory())
    layer = getattr(model, name)
    swap_layers(model, config=CONFIG, kernels=kernels, rows={}, exact=True)
    assert call(layer, 0).size == 0


def test_which_layers_have_a_kernel():
    """It depends on bits, group size, mode and dtypes. A subclass may compute something else."""

    class LinearSubclass(nn.Linear):
        pass

    def quantized(group=64, bits=4, mode="affine"):
        return nn.QuantizedLinear(128, 32, False, group, bits, mode)

    mixed_dtypes = quantized()
    mixed_dtypes.biases = mixed_dtypes.biases.astype(mx.float16)
    integer_weights = nn.Linear(64, 32)
    integer_weights.weight = mx.ones((8, 8), mx.int32)
    with_kernel = [quantized(), quantized(32, 8), nn.Linear(64, 32), nn.Embedding(8, 8)]
    without_kernel = [
        quantized(bits=6),
        quantized(32, 4, "mxfp4"),
        mixed_dtypes,
        integer_weights,
        LinearSubclass(64, 32),
        nn.SiLU(),
    ]
    assert all(can_swap(layer) for layer in with_kernel)
    assert not any(can_swap(layer) for layer in without_kernel)


def test_exact_is_the_default_where_it_was_measured_to_cost_nothing():
    """That is: our kernel won at every row count of every matrix, and tensor units did not.

    Exact decoding does not use tensor units.
    """
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


def test_only_depthwise_convolutions_are_replaced_and_only_for_exact_decoding():
    """Without stride, padding or dilation."""
    depthwise = [nn.Conv1d(8, 8, 4, groups=8), nn.Conv1d(24, 24, 3, groups=24, bias=False)]
    others = [
        nn.Conv1d(8, 8, 4, groups=8, stride=2),
        nn.Conv1d(8, 8, 4, groups=8, padding=2),
        nn.Conv1d(8, 8, 4, groups=8, dilation=2),
        nn.Conv1d(8, 8, 4),
        nn.Conv1d(8, 8, 4, groups=4),
        nn.Conv1d(8, 16, 4, groups=8),
    ]
    for exact in (False, True):
        model = nn.Sequential(*depthwise, *others)
        swap_layers(model, config={}, kernels=Kernels(kernel_factory()), rows={}, exact=exact)
        swapped = [layer for layer in model.layers if type(layer) is KernelConv1d]
        assert swapped == (depthwise if exact else [])
    model = half_precision("qwen3_5")
    config = families.CONFIGS["qwen3_5"]
    swap_layers(model, config=config, kernels=Kernels(kernel_factory()), rows={}, exact=True)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv1d)]
    assert convolutions and {type(layer) for layer in convolutions} == {KernelConv1d}


@pytest.mark.parametrize(("q_rows", "kv_rows", "launches"), [(4, 4, [3]), (4, 5, [2]), (4, 0, [])])
def test_only_layers_chosen_for_the_same_rows_share_a_launch(q_rows, kv_rows, launches):
    """Queries, keys and values do if their row counts are equal, else keys and values only."""
    model = half_precision("qwen3")
    config = families.CONFIGS["qwen3"]
    keys_by_columns = {matrix.columns: matrix.key for _, _, matrix in matrices(model, config)}
    rows = {  # queries have 256 columns; keys and values have 128
        keys_by_columns[256]: frozenset(range(q_rows)),
        keys_by_columns[128]: frozenset(range(kv_rows)),
    }
    groups = list(shared_inputs(model))
    swap_layers(model, config=config, kernels=Kernels(kernel_factory()), rows=rows)
    for layers in groups:
        sharing_layers = [layer for layer in layers if getattr(layer, "_fused", None)]
        layers_per_launch = Counter(layer._fused.func for layer in sharing_layers)
        assert list(layers_per_launch.values()) == launches


def test_restoring_a_model_leaves_no_swapped_layer():
    """Timing swaps all groups of layers, then all but one: that one has to be MLX's again."""
    model = half_precision("qwen3")
    config = families.CONFIGS["qwen3"]
    kernels = Kernels(kernel_factory())
    every = frozenset(range(1, 17))
    rows = {matrix.key: every for _, _, matrix in matrices(model, config)}
    unit = model.layers[0].mlp
    gated = {matrix.key for _, module, matrix in matrices(model, config) if module is unit.up_proj}
    for left_out in (set(), gated):
        with restored(model):
            swap_layers(
                model,
                config=config,
                kernels=kernels,
                rows={key: counts for key, counts in rows.items() if key not in left_out},
            )
            assert (type(unit) in UNITS.values()) == (not left_out)


def test_layers_that_share_a_launch_are_chosen_together():
    """Groups: queries, keys and values; gate, up and down; and the attention's output."""
    model = families.random_model("qwen3", head_dim=64, num_key_value_heads=1)
    groups = chosen_together(model, families.CONFIGS["qwen3"])
    # A key begins with the matrix's shape, such as `256x64`.
    shapes = [{key.split()[0] for key in group} for group in groups]
    queries_and_keys = {"256x64", "64x64"}
    gated = {"128x64", "64x128"}
    out = {"64x256"}
    assert all(group in shapes for group in (queries_and_keys, gated, out)) and len(shapes) == 3
    # The head has 256 tokens and so the shape of the queries.
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
    # No class was changed: a new layer is a stock one.
    assert type(nn.Linear(8, 8)) is nn.Linear and type(half_precision("qwen3").lm_head) in SWAPS


def test_a_gated_unit_is_fused_only_if_all_of_its_layers_have_kernels():
    """Here `down_proj` is left to MLX."""
    config = families.CONFIGS["qwen3"]
    model = half_precision("qwen3")
    kernels = Kernels(quick_factory())
    keys_by_columns = {matrix.columns: matrix.key for _, _, matrix in matrices(model, config)}
    rows = {keys_by_columns[128]: frozenset({4})}  # gate and up have 128 columns, down has 64
    swap_layers(model, config=config, kernels=kernels, rows=rows)
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
def test_gate_and_up_share_a_launch_only_with_equal_groups_and_without_biases(
    groups, biases, shared
):
    model = half_precision("qwen3")
    unit = model.layers[0].mlp
    unit.gate_proj = nn.QuantizedLinear(64, 128, biases[0], groups[0], 4)
    unit.up_proj = nn.QuantizedLinear(64, 128, biases[1], groups[1], 4)
    swap_layers(
        model,
        config=families.CONFIGS["qwen3"],
        kernels=Kernels(quick_factory()),
        rows={},
        exact=True,
    )
    assert (type(unit) in UNITS.values()) == shared


def test_our_convolution_gives_the_stock_results_and_a_row_its_bits_in_any_call():
    x = mx.random.normal((1, 12, 8), key=mx.random.key(0))
    layer = nn.Conv1d(8, 8, 4, groups=8)
    layer.bias = mx.random.normal((8,), key=mx.random.key(1))
    stock = layer(x)
    layer.__class__ = KernelConv1d
    layer._rows = range(1, 65)
    assert mx.allclose(layer(x), stock, atol=1e-6)
    # The convolution is 4 rows wide: its output 4 depends on rows 4 to 7.
    assert same_bits(layer(x)[:, 4:5], layer(x[:, 4:8]))

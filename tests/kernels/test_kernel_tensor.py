"""Products on an M5's tensor units: their results, their checks, and where they are not used.

On a Mac with tensor units: `pytest -m metal tests/kernels/test_kernel_tensor.py`.
"""

import platform
import warnings
from dataclasses import replace

import families
import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    check_products,
    check_rows,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
)
from kernel_models import Launches, Recorder, half_precision
from oracle import Oracle

import dflash_mlx as dm
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.choose import has_tensor_units
from dflash_mlx.kernels.modules import Kernels, swap_layers
from dflash_mlx.kernels.shapes import matrices
from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.weights import aligned
from dflash_mlx.loading import kernel_plan
from dflash_mlx.loading.kernel_plan import begin_checks, candidates, use_kernels

UNITS = mx.metal.is_available() and has_tensor_units(mx.device_info(), platform.mac_ver()[0])
pytestmark = [
    on_gpu_or_emulator,
    pytest.mark.skipif(mx.metal.is_available() and not UNITS, reason="no tensor units here"),
]
SPLIT = (32, 1024)  # a shape whose K is split
ROWS = frozenset(range(1, 17))


def tensor_weights(shape, group=64):
    """4-bit weights for tensor units."""
    return replace(random_weights(shape, dtype=mx.bfloat16, bits=4, group=group), tensor_units=True)


@pytest.fixture(scope="module")
def matmul() -> VerifyMatmul:
    return VerifyMatmul(kernel_factory())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_product_is_rounded_once(matmul, group, gated):
    """With 16 rows (one tile), 3, 17 (two tiles), and 9 with a K that is split."""
    mx.random.seed(group)
    for rows, shape in ((16, (64, 256)), (3, (32, 512)), (17, (32, 256)), (9, SPLIT)):
        weights = [tensor_weights(shape, group) for _ in range(1 + gated)]
        x = mx.random.normal((rows, shape[1])).astype(mx.bfloat16)
        check_products(matmul, x, *weights, gated=gated)


def test_a_row_has_the_same_bits_in_every_call(matmul):
    mx.random.seed(2)
    w = tensor_weights((32, 512))
    x = mx.random.normal((16, 512)).astype(mx.bfloat16)
    check_rows(lambda rows: matmul(x[rows], w), 16, (2, 8, 9, 16))


def test_matrices_that_share_a_launch_are_rounded_once(matmul):
    mx.random.seed(3)
    for columns, depth in (((64, 32, 32), 256), ((96, 32), 1024)):
        weights = [tensor_weights((n, depth)) for n in columns]
        check_products(matmul, mx.random.normal((5, depth)).astype(mx.bfloat16), *weights)


def test_products_that_tensor_units_cannot_compute_use_the_other_kernel():
    """Rows in another dtype, and matrices that share a launch with one not on tensor units."""
    launches = Launches()
    matmul = VerifyMatmul(launches)
    w = tensor_weights((32, 256))
    x = mx.ones((2, 256), mx.bfloat16)
    matmul(x.astype(mx.float32), w)
    matmul(x, w, replace(w, tensor_units=False))
    assert not any("tensor" in name for name in launches.counts)
    matmul(x, w)
    assert launches.counts["verify_matmul_tensor"] == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "bits"),
    [
        ((40, 256), mx.bfloat16, 4),
        ((32, 384), mx.bfloat16, 4),
        ((32, 256), mx.float16, 4),
        ((32, 256), mx.bfloat16, 8),
        ((2, 32, 256), mx.bfloat16, 4),
    ],
)
def test_weights_that_tensor_units_cannot_multiply_are_refused(shape, dtype, bits):
    with pytest.raises(KernelError, match="Tensor units do not take"):
        replace(random_weights(shape, dtype, bits), tensor_units=True)


@pytest.mark.parametrize(
    ("architecture", "macos", "has"),
    [
        ("applegpu_g17s", "26.4", True),
        ("applegpu_g17g", "27.0.1", True),
        ("applegpu_g18d", "26.5.2", True),
        ("applegpu_g18d", "26.10", True),
        ("applegpu_g18d", "100.0", True),
        ("applegpu_g17s", "26.3.1", False),
        ("applegpu_g16s", "27.0", False),
        ("applegpu_g17p", "27.0", False),
        ("applegpu_g18p", "27.0", True),
        ("applegpu_g17s", "", False),
        ("x86_64", "26.4", False),
    ],
)
def test_which_chips_and_macos_versions_have_tensor_units(architecture, macos, has):
    assert has_tensor_units({"architecture": architecture}, macos) == has
    assert not has_tensor_units({}, macos)


CHANGES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)


def target():
    """A model whose matrices fit tensor units."""
    config = families.CONFIGS["qwen3"] | CHANGES
    return dm.Target(
        half_precision("qwen3", **CHANGES),
        tokenizer=families.CharacterTokenizer(),
        config=config,
        name="qwen3",
    )


def test_a_kernel_that_fails_on_tensor_units_runs_without_them():
    """With a warning for each failed check, and results close to those of MLX."""

    def wrong(name, call, results):
        return [1.1 * y if "tensor" in name else y for y in results]

    tensor = target()
    kernels = Kernels(Launches(change=wrong), tensor_units=True)
    rows = {key: ROWS for key in candidates(tensor, True) if not key.startswith("attention")}
    expected = tensor.start().verify(dm.Proposal([7, 9]))[0]
    begin_checks(kernels)
    tensor.kernel_plan = swap_layers(tensor.model, config=tensor.config, kernels=kernels, rows=rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = tensor.start().verify(dm.Proposal([7, 9]))[0]
    assert mx.allclose(logits, expected, rtol=0.1, atol=0.1)
    assert all("on tensor units" in key for key in kernels.checks.failed)
    assert len(caught) == len(kernels.checks.failed) > 0


def test_exact_decoding_does_not_use_tensor_units(monkeypatch):
    """Even if they were the fastest. Then it is not the default, and decoding uses them."""
    launches = Launches()
    prompt = [3, 1, 4, 1, 5]
    won = candidates(target(), True)
    monkeypatch.setattr(kernel_plan, "read_choices", lambda forms: won)
    exact = use_kernels(target(), Kernels(launches, tensor_units=True), True)
    plain = dm.generate(exact, None, prompt, max_tokens=5).tokens
    oracle = Oracle(prompt, answer=plain, vocab_size=exact.vocab_size, p=0.5)
    assert dm.generate(exact, oracle, prompt, max_tokens=5).tokens == plain
    assert exact.kernel_plan.exact and launches.counts["verify_matmul_affine"]
    assert not any("tensor" in name for name in launches.counts)
    fast = use_kernels(target(), Kernels(launches, tensor_units=True), None)
    fast.start().verify(dm.Proposal([7, 9]))
    assert not fast.kernel_plan.exact and any("tensor" in name for name in launches.counts)


def test_layers_on_tensor_units_do_not_share_a_launch_with_others():
    """Of a recurrence's input projections, tensor units cannot take the gates of 48 columns."""
    changes = CHANGES | dict(
        num_hidden_layers=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    model = half_precision("qwen3_5", **changes)
    config = families.CONFIGS["qwen3_5"] | changes
    hybrid = dm.Target(model, tokenizer=families.CharacterTokenizer(), config=config, name="")
    kernels = Kernels(Recorder(), tensor_units=True)
    rows = candidates(hybrid, True)
    swap_layers(model, config=config, kernels=kernels, rows=rows)
    mixer = model.layers[0].linear_attn
    large = [mixer.in_proj_qkv, mixer.in_proj_z]
    gates = [mixer.in_proj_b, mixer.in_proj_a]
    for layers, on_tensor_units in ((large, True), (gates, False)):
        assert {layer._product.weights[0].tensor_units for layer in layers} == {on_tensor_units}
        assert len({layer._fused.func for layer in layers}) == 1
    assert large[0]._fused.func is not gates[0]._fused.func


def test_words_are_copied_unless_their_address_is_a_multiple_of_128_bytes():
    """Tensor units need that. Whole buffers of Metal are aligned; a view of one may not be."""
    words = mx.arange(4096, dtype=mx.uint32)
    views = [words[4 * index : 4 * index + 2048] for index in range(8)]  # 16 bytes apart
    mx.eval(views)
    addresses = [np.asarray(view).__array_interface__["data"][0] for view in views]
    for view, address in zip(views, addresses, strict=True):
        aligned_words = aligned(view)
        assert (aligned_words is view) == (address % 128 == 0)
        assert mx.array_equal(aligned_words, view).item()


def test_a_layer_in_another_dtype_does_not_use_tensor_units():
    """Choices are stored by shape, and a drafter's layer may have the shape in another dtype."""
    model = target()
    model.model.set_dtype(mx.float16)
    swap_layers(
        model.model,
        config=model.config,
        kernels=Kernels(Recorder(), tensor_units=True),
        rows=candidates(model, True),
    )
    layers = [layer for _, layer, _ in matrices(model.model, model.config)]
    assert not any(layer._product.weights[0].tensor_units for layer in layers)

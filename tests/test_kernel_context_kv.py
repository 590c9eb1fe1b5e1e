"""The drafter's keys and values on the emulated device, against the drafter's own layers."""

from functools import partial

import mlx.core as mx
import pytest
import tinymodels
from kernel_check import (
    TOLERANCES,
    Counted,
    kernel_factory,
    on_gpu_or_emulator,
    random_weights,
    relative_error,
    same_bits,
)
from metal_host import EmulatedKernel, needs_compiler, needs_strict_compiler

from dflash_mlx.drafter.rope import YarnRope
from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.context_kv import ContextKV, context_kv_reference

pytestmark = on_gpu_or_emulator

# dtype, rows, hidden size, (layers, heads, head size), bits of the weights
CASES = [
    (mx.float32, 1, 72, (2, 1, 64), None),
    (mx.float32, 16, 256, (1, 3, 80), 4),
    (mx.float16, 7, 320, (3, 2, 128), None),
    (mx.float16, 21, 128, (2, 1, 256), 8),
    (mx.bfloat16, 9, 192, (2, 2, 96), 8),
    (mx.bfloat16, 16, 200, (1, 2, 128), None),
]
IDS = [f"{str(case[0])[9:]}-{case[1]}rows-{case[3]}-{case[4]}bits" for case in CASES]


@pytest.fixture(scope="module")
def kernel() -> ContextKV:
    return ContextKV(kernel_factory())


def arguments(dtype, rows, hidden, shape, bits, position=5) -> tuple[tuple, dict]:
    """Random arguments of the kernel, by place and by name."""
    mx.random.seed(rows)
    layers, heads, head_dim = shape
    features = mx.random.normal((rows, hidden)).astype(dtype)
    weights = [random_weights((layers, heads * head_dim, hidden), dtype, bits) for _ in range(2)]
    norms = mx.random.normal((layers, head_dim)).astype(dtype)
    frequencies = 1e6 ** (-mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim)
    return (features, *weights, norms, frequencies), {"position": position, "eps": 1e-6}


@pytest.mark.parametrize(("dtype", "rows", "hidden", "shape", "bits"), CASES, ids=IDS)
def test_kernel_matches_the_reference(dtype, rows, hidden, shape, bits, kernel):
    for position in (0, 4321):
        args, named = arguments(dtype, rows, hidden, shape, bits, position)
        result = kernel(*args, **named, growth=1.3)
        exact = context_kv_reference(args[0].astype(mx.float32), *args[1:], **named, growth=1.3)
        for ours, truth in zip(result, exact, strict=True):
            assert ours.dtype == dtype
            assert relative_error(ours, truth) < TOLERANCES[dtype]


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "yarn"])
def test_the_kernel_makes_what_the_layers_of_a_drafter_make(scaling, kernel):
    drafter = tinymodels.random_drafter(head_dim=64, num_hidden_layers=3, rope_scaling=scaling)
    features = mx.random.normal((5, 64))
    layers = [layer.self_attn for layer in drafter.layers]
    for layer in layers:
        layer.k_norm.weight = mx.random.normal((64,))
    rope = layers[0].rope
    if isinstance(rope, YarnRope):
        frequencies, growth = 1 / rope._freqs, rope.magnitude
    else:
        frequencies, growth = 10000.0 ** (-mx.arange(0, 64, 2, dtype=mx.float32) / 64), 1.0
    keys, values = kernel(
        features,
        mx.stack([layer.k_proj.weight for layer in layers]),
        mx.stack([layer.v_proj.weight for layer in layers]),
        mx.stack([layer.k_norm.weight for layer in layers]),
        frequencies,
        position=37,
        eps=layers[0].k_norm.eps,
        growth=growth,
    )
    for i, layer in enumerate(layers):
        theirs = layer.keys_values(features[None], 37)
        assert relative_error(keys[i], theirs[0][0]) < TOLERANCES[mx.float32]
        assert relative_error(values[i], theirs[1][0]) < TOLERANCES[mx.float32]


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=[IDS[1], IDS[3]])
def test_a_row_has_the_same_bits_whatever_shares_the_call(case, kernel):
    (features, *rest), named = arguments(*case)
    together, count = kernel(features, *rest, **named), len(features)
    for start, end in [*((0, end) for end in range(1, count)), *((i, i + 1) for i in range(count))]:
        some = kernel(features[start:end], *rest, **named | {"position": 5 + start})
        for ours, all_rows in zip(some, together, strict=True):
            assert same_bits(ours, all_rows[:, :, start:end])


@needs_compiler
@pytest.mark.parametrize("rows", [3, 16])
def test_weights_are_read_once(rows):
    """Counted, for up to 16 rows."""
    args, named = arguments(mx.float16, rows, 320, (3, 2, 128), None)
    counted = Counted()
    ContextKV(counted)(*args, **named)
    traffic = counted.counters("context_kv_plain").buffers
    assert traffic["w"].read == args[1].nbytes
    assert traffic["v"].read == args[2].nbytes


@needs_compiler
@needs_strict_compiler
@pytest.mark.parametrize("bits", [None, 8])
def test_address_spaces(bits):
    """Of the smallest inputs too, which MLX hands over in constant memory."""
    args, named = arguments(mx.bfloat16, 1, 64, (1, 1, 2), bits)
    ContextKV(partial(EmulatedKernel, strict=True))(*args, **named)


def test_what_does_not_fit_is_refused(kernel):
    (features, keys, values, norms, frequencies), named = arguments(*CASES[0])
    for args, words in [
        ((features[0], keys, values, norms, frequencies), "Features .* and norms of 2 layers"),
        ((features, keys, values, norms[:1], frequencies), "norms of 2 layers"),
        ((features, keys, values, norms[:, :48], frequencies), "Heads of 48 do not fill 64"),
        ((features, keys, values, norms, frequencies[:8]), "32 frequencies in float32"),
        ((features, keys, values[:1], norms, frequencies), "differ"),
        ((features, keys, values, norms.astype(mx.int32), frequencies), "floating point"),
    ]:
        for call in (kernel, context_kv_reference):
            with pytest.raises(KernelError, match=words):
                call(*args, **named)

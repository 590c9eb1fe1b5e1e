"""What the kernels' wrappers take, to the last of it, and what they refuse by name.

Nothing is compiled: the factory records calls, so that only the rules themselves are looked at.
"""

from typing import Any

import mlx.core as mx
import pytest
from kernel_calls import Recorder
from kernel_check import random_weights

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.block_attention import (
    HEAD_DIMS,
    BlockAttention,
    TreeMask,
    block_attention_reference,
)
from dflash_mlx.kernels.delta_replay import (
    DeltaReplay,
    DeltaVerify,
    delta_replay_reference,
    delta_verify_reference,
)
from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe, verify_matmul_moe_reference
from dflash_mlx.kernels.verify_qkv import VerifyQkv
from dflash_mlx.kernels.weights import AffineWeights

HALF = mx.float16


def attention_arguments(**changed: Any) -> tuple[list[Any], dict[str, Any]]:
    """Of 4 heads over 2 of keys, 3 rows over 9, heads of 64; `changed` replaces what it names."""
    shape = {"batch": 1, "heads": 4, "nodes": 3, "dim": 64} | changed
    stored = {"stored_batch": 1, "key_heads": 2, "length": 9, "stored_dim": shape["dim"]} | changed
    dtype, stored_dtype = changed.get("dtype", HALF), changed.get("stored_dtype", HALF)
    queries = mx.zeros([shape[name] for name in ("batch", "heads", "nodes", "dim")], dtype)
    keys = mx.zeros([stored[n] for n in ("stored_batch", "key_heads", "length", "stored_dim")])
    pair = [keys.astype(stored_dtype)] * 2
    if "quantized" in changed:
        pair = [
            AffineWeights(*mx.quantize(x, group, bits), bits, group)
            for x, (bits, group) in zip(pair, changed["quantized"], strict=True)
        ]
    named = {name: changed[name] for name in ("sinks", "tree", "window") if name in changed}
    return [changed.get("queries", queries), *pair], {"scale": 1.0} | named


def tree(positions: int, rows: int, columns: int | None = None) -> TreeMask:
    return TreeMask(mx.arange(positions), mx.eye(rows, columns or rows) > 0)


ATTENTION_TAKES = {
    **{f"heads of {dim}": {"dim": dim} for dim in HEAD_DIMS},
    "64 rows": {"nodes": 64, "length": 64},
    "one row and one key": {"nodes": 1, "length": 1},
    "as many rows as keys": {"nodes": 9},
    "one head of keys": {"key_heads": 1},
    "a head of keys each": {"key_heads": 4},
    "float32": {"dtype": mx.float32, "stored_dtype": mx.float32},
    "bfloat16": {"dtype": mx.bfloat16, "stored_dtype": mx.bfloat16},
    "sinks": {"sinks": mx.zeros(4, HALF)},
    "a tree": {"tree": tree(3, 3)},
    "quantized alike": {"quantized": [(8, 32), (8, 32)]},
}
ATTENTION_REFUSES = {
    "65 rows": ({"nodes": 65, "length": 70}, "1 to 64"),
    "no rows": ({"nodes": 0}, "1 to 64"),
    "two requests": ({"batch": 2}, "1 to 64"),
    "three dimensions": ({"queries": mx.zeros((4, 3, 64), HALF)}, "1 to 64"),
    "heads of 72": ({"dim": 72}, "not of 72"),
    "heads of 512": ({"dim": 512}, "not of 512"),
    "integers": ({"dtype": mx.int32, "stored_dtype": mx.int32}, "in int32"),
    "two requests' keys": ({"stored_batch": 2}, "do not fit keys"),
    "heads that do not divide": ({"key_heads": 3}, "do not fit keys"),
    "keys of another size": ({"stored_dim": 128}, "do not fit keys"),
    "fewer keys than rows": ({"length": 2}, "do not fit keys"),
    "keys of another dtype": ({"stored_dtype": mx.float32}, "same dtype, not float32"),
    "other bits": ({"quantized": [(8, 32), (4, 32)]}, "differ|quantized alike"),
    "other groups": ({"quantized": [(8, 32), (8, 64)]}, "quantized alike"),
    "scales of another dtype": (
        {"quantized": [(8, 32)] * 2, "stored_dtype": mx.float32},
        "same dtype, not float32",
    ),
    "too few sinks": ({"sinks": mx.zeros(2)}, "4 heads need as many sinks"),
    "sinks of every row": ({"sinks": mx.zeros((4, 3))}, "4 heads need as many sinks"),
    "positions of another tree": ({"tree": tree(4, 3)}, "A tree of 3 nodes"),
    "ancestors of another tree": ({"tree": tree(3, 3, 4)}, "A tree of 3 nodes"),
}


@pytest.mark.parametrize("changed", ATTENTION_TAKES.values(), ids=ATTENTION_TAKES.keys())
def test_attention_takes(changed):
    args, named = attention_arguments(**changed)
    for attention in (BlockAttention(Recorder()), block_attention_reference):
        y = attention(*args, **named)
        assert y.shape == args[0].shape and y.dtype == args[0].dtype


@pytest.mark.parametrize(
    ("changed", "words"), ATTENTION_REFUSES.values(), ids=ATTENTION_REFUSES.keys()
)
def test_attention_refuses(changed, words):
    args, named = attention_arguments(**changed)
    for attention in (BlockAttention(Recorder()), block_attention_reference):
        with pytest.raises(KernelError, match=words):
            attention(*args, **named)


def tape(**changed: Any) -> list[Any]:
    """Queries, keys, values, decay, beta and state of 3 rows; `changed` replaces what it names."""
    size = {"rows": 3, "key_heads": 2, "heads": 4, "dk": 32, "dv": 8} | changed
    rows, heads, dv = size["rows"], size["heads"], size["dv"]
    keys = mx.zeros((1, rows, size["key_heads"], size["dk"]), changed.get("dtype", HALF))
    arrays = {
        "queries": keys,
        "keys": keys,
        "values": mx.zeros((1, rows, heads, dv), changed.get("dtype", HALF)),
        "decay": mx.zeros((1, rows, heads)),
        "beta": mx.zeros((1, rows, heads), HALF),
        "state": mx.zeros((1, heads, dv, size["dk"])),
    }
    return [changed.get(name, array) for name, array in arrays.items()]


DELTA_TAKES = {
    "64 rows": {"rows": 64},
    "one row": {"rows": 1},
    "rows of 256": {"dk": 256},
    "rows of one": {"dk": 1, "dv": 1},
    "eight heads each": {"key_heads": 1, "heads": 8},
    "as many heads": {"key_heads": 4},
    "float32": {"dtype": mx.float32},
    "beta in float32": {"beta": mx.zeros((1, 3, 4))},
}
DELTA_REFUSES = {
    "65 rows": ({"rows": 65}, "no kernel"),
    "no rows": ({"rows": 0}, "no kernel"),
    "rows of 257": ({"dk": 257}, "no kernel"),
    "heads that do not divide": ({"key_heads": 3}, "no kernel"),
    "two requests": (
        {"keys": mx.zeros((2, 3, 2, 32), HALF), "values": mx.zeros((2, 3, 4, 8), HALF)},
        "no kernel",
    ),
    "keys of three dimensions": ({"keys": mx.zeros((1, 3, 64), HALF)}, "do not fit"),
    "values of three dimensions": ({"values": mx.zeros((1, 3, 32), HALF)}, "do not fit"),
    "values of other rows": ({"values": mx.zeros((1, 2, 4, 8), HALF)}, "do not fit"),
    "integers": ({"dtype": mx.int32}, "float16, bfloat16 or float32"),
    "values of another dtype": ({"values": mx.zeros((1, 3, 4, 8))}, "both the same"),
    "beta in integers": ({"beta": mx.zeros((1, 3, 4), mx.int32)}, "float16, bfloat16"),
    "decay of other rows": ({"decay": mx.zeros((1, 2, 4))}, "decay"),
    "beta of other heads": ({"beta": mx.zeros((1, 3, 2), HALF)}, "beta"),
    "decay in half precision": ({"decay": mx.zeros((1, 3, 4), HALF)}, "the decay in float32"),
    "the state of other heads": ({"state": mx.zeros((1, 2, 8, 32))}, "the state is"),
    "a state turned": ({"state": mx.zeros((1, 4, 32, 8))}, "the state is"),
    "a state in half precision": ({"state": mx.zeros((1, 4, 8, 32), HALF)}, "the state is"),
}


@pytest.mark.parametrize("changed", DELTA_TAKES.values(), ids=DELTA_TAKES.keys())
def test_the_delta_rule_takes(changed):
    arrays = tape(**changed)
    rows = arrays[1].shape[1]
    for verify in (DeltaVerify(Recorder()), delta_verify_reference):
        for parents in (None, [max(-1, (row - 1) // 2) for row in range(rows)]):
            y, following = verify(*arrays, parents)
            assert y.shape == arrays[2].shape and y.dtype == arrays[2].dtype
            assert (following is None) == (parents is not None)
            assert following is None or following.shape == arrays[5].shape
    for replay in (DeltaReplay(Recorder()), delta_replay_reference):
        assert replay(*arrays[1:], mx.array([0]), 1).shape == arrays[5].shape


@pytest.mark.parametrize(("changed", "words"), DELTA_REFUSES.values(), ids=DELTA_REFUSES.keys())
def test_the_delta_rule_refuses(changed, words):
    arrays = tape(**changed)
    for verify in (DeltaVerify(Recorder()), delta_verify_reference):
        with pytest.raises(KernelError, match=words):
            verify(*arrays)
    for replay in (DeltaReplay(Recorder()), delta_replay_reference):
        with pytest.raises(KernelError, match=words):
            replay(*arrays[1:], mx.array([0]), 1)


def test_queries_and_trees_belong_to_the_keys():
    arrays = tape()
    for queries in (arrays[0][:, :2], arrays[0].astype(mx.float32)):
        for verify in (DeltaVerify(Recorder()), delta_verify_reference):
            with pytest.raises(KernelError, match="queries .* and keys .* differ"):
                verify(queries, *arrays[1:])
    for parents in ([-1, 0], [-1, 0, 0, 1]):
        with pytest.raises(KernelError, match=f"{len(parents)} parents for 3 rows"):
            DeltaVerify(Recorder())(*arrays, parents)


def test_products_refuse():
    w = random_weights((16, 128), mx.float32, 4)
    matmul, beside = VerifyMatmul(Recorder()), VerifyQkv(Recorder())
    x = mx.zeros((2, 128))
    for args, words in {
        "other columns": ((mx.zeros((2, 64)), w), "x has 64 columns, the weights have 128"),
        "integers": ((x.astype(mx.int32), w), "not int32"),
        "weights in integers": ((x, mx.zeros((16, 128), mx.int32)), "not int32"),
        "another kind": ((x, w, mx.zeros((16, 128))), "Gate and up differ"),
        "other bits": ((x, w, random_weights((16, 128), mx.float32, 8)), "Gate and up differ"),
        "other groups": (
            (x, w, random_weights((16, 128), mx.float32, 4, 32)),
            "Gate and up differ",
        ),
        "more columns": ((x, w, random_weights((17, 128), mx.float32, 4)), "Gate and up differ"),
        "small x": ((mx.zeros((1, 7)), mx.zeros((16, 7))), "fewer than 8 elements"),
        "small weights": ((mx.zeros((2, 7)), mx.zeros((1, 7))), "fewer than 8 elements"),
        "experts": ((x, mx.zeros((3, 16, 128))), r"are \[N, K\]"),
    }.values():
        with pytest.raises(KernelError, match=words):
            matmul(*args)
    assert matmul(mx.zeros((1, 8)), mx.zeros((1, 8))).shape == (1, 1)
    for weights, words in (
        ([w], "2 to 4"),
        ([w] * 5, "2 to 4"),
        ([w, mx.zeros((16, 128))], "kinds"),
    ):
        with pytest.raises(KernelError, match=words):
            beside(x, weights)
    assert [y.shape for y in beside(x, [w] * 4)] == [(2, 16)] * 4


def test_experts_refuse():
    w, x = random_weights((4, 16, 128), mx.float32, 4), mx.zeros((2, 128))
    routes = mx.zeros((2, 3), mx.uint32)
    moe = VerifyMatmulMoe(Recorder())
    for args, words in (
        ((x, mx.zeros((16, 128)), routes), r"are \[E, N, K\]"),
        ((mx.zeros((3, 128)), w, routes), "do not belong to experts"),
        ((mx.zeros((2, 2, 128)), w, routes), "do not belong to experts"),
        ((mx.zeros((2, 64)), w, routes), "x has 64 columns"),
        ((x, w, routes, random_weights((4, 16, 128), mx.float32, 8)), "Gate and up differ"),
    ):
        with pytest.raises(KernelError, match=words):
            moe(*args)
    for rows in (x, mx.zeros((2, 3, 128))):
        assert moe(rows, w, routes).shape == (2, 3, 16)
    with pytest.raises(KernelError, match="do not belong to experts"):
        verify_matmul_moe_reference(mx.zeros((3, 128)), w, routes)


@pytest.mark.parametrize("field", ["words", "scales", "biases"])
def test_affine_weights_are_whole(field):
    w = vars(random_weights((2, 16, 128), mx.float32, 4))
    for wrong in (w[field][:1], w[field][..., :-1], w[field].astype(mx.int32)):
        with pytest.raises(KernelError):
            AffineWeights(**w | {field: wrong})
    assert AffineWeights(**w).shape == (2, 16, 128)
    for name, value in (("bits", 2), ("bits", 5), ("bits", 16), ("group_size", 16)):
        with pytest.raises(KernelError, match="4 or 8 bits and groups of 32, 64 or 128"):
            AffineWeights(**w | {name: value})

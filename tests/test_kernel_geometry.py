"""How kernels are launched: as much together as belongs together, and nothing twice.

Right results do not show it: a launch of too many threadgroups, or of other shares, computes the
same and takes longer. Nothing is compiled here.
"""

import mlx.core as mx
import pytest
from kernel_calls import Recorder
from kernel_check import random_weights

from dflash_mlx.kernels.block_attention import CHUNK, MOST_NODES, BlockAttention, TreeMask
from dflash_mlx.kernels.delta_replay import DeltaReplay, DeltaVerify
from dflash_mlx.kernels.verify_matmul import ENOUGH_TILES, ENOUGH_TILES_LARGE, VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.kernels.verify_qkv import VerifyQkv


@pytest.mark.parametrize("rows,tiles", [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3), (64, 4)])
@pytest.mark.parametrize("columns,across", [(1, 1), (32, 1), (33, 2), (8192, 256)])
def test_a_product_has_a_threadgroup_for_each_tile(rows, tiles, columns, across):
    recorder = Recorder()
    x, w = mx.zeros((rows, 256)), mx.zeros((columns, 256))
    matmul = VerifyMatmul(recorder)
    matmul(x, w)
    matmul(x, w, w)  # a tile has 16 columns of each
    (_, plain, threads, shapes), (_, gated, _, _) = recorder.launches
    assert plain == (128 * across, 1, tiles) and threads == (128, 1, 1)
    assert gated == (128 * -(-columns // 16), 1, tiles) and shapes == [(rows, columns)]


def test_a_product_of_few_columns_is_split_and_merged():
    """Until there are 256 tiles, or 512, but into nothing shorter than 512 values of K."""
    for columns, depth, enough, splits in (
        (1024, 4096, ENOUGH_TILES, 8),
        (1024, 4096, ENOUGH_TILES_LARGE, 8),
        (2048, 8192, ENOUGH_TILES, 4),
        (2048, 8192, ENOUGH_TILES_LARGE, 8),
        (4096, 1024, ENOUGH_TILES, 2),
        (4096, 1023, ENOUGH_TILES, 1),
        (8192, 8192, ENOUGH_TILES, 1),
        (8192, 8192, ENOUGH_TILES_LARGE, 2),
        (4097, 8192, ENOUGH_TILES, 1),
    ):
        recorder = Recorder()
        VerifyMatmul(recorder, enough)(mx.zeros((5, depth)), mx.zeros((columns, depth)))
        (_, grid, _, shapes), *merge = recorder.launches
        assert grid[1] == splits, (columns, depth, enough)
        assert shapes == [(splits, 1, 5, columns) if splits > 1 else (5, columns)]
        if splits > 1:
            [(name, grid, threads, shapes)] = merge
            assert (name, grid, threads) == ("merge_splits", (5 * columns, 1, 1), (256, 1, 1))
            assert shapes == [(5, columns)]
    assert (ENOUGH_TILES, ENOUGH_TILES_LARGE) == (256, 512)


def test_a_gated_unit_of_few_columns_is_split_by_its_own_tiles():
    """Of 16 columns of each factor: half as many columns as of a product make as many tiles."""
    cases = ((2048, 4096, 2), (2049, 4096, 1), (1360, 4096, 3), (40, 1024, 2))
    for columns, depth, splits in cases:
        recorder = Recorder()
        w = mx.zeros((columns, depth))
        VerifyMatmul(recorder)(mx.zeros((5, depth)), w, w)
        (_, grid, _, shapes), *merge = recorder.launches
        assert grid[1] == splits and len(merge) == (splits > 1), columns
        assert shapes == [(splits, 2, 5, columns) if splits > 1 else (5, columns)]


@pytest.mark.parametrize("columns", [1024, 2048])
def test_splits_do_not_depend_on_the_number_of_rows(columns):
    """Nor does the order of a row's sums: K is split as finely for one row as for a hundred."""
    w, recorder = mx.zeros((columns, 8192)), Recorder()
    matmul, beside = VerifyMatmul(recorder), VerifyQkv(recorder)
    for rows in (1, 16, 17, 33, 64, 100):
        x = mx.zeros((rows, 8192))
        matmul(x, w), matmul(x, w, w), beside(x, [w, w[:40]])
    for name in (
        "verify_matmul_plain",
        "verify_matmul_plain_gate_up",
        "verify_qkv_2_plain_split",
    ):
        splits = {grid[1] for called, grid, _, _ in recorder.launches if called == name}
        assert len(splits) == 1 and min(splits) > 1, name


def test_products_side_by_side_share_a_launch():
    recorder = Recorder()
    x = mx.zeros((17, 1024))
    VerifyQkv(recorder)(x, [mx.zeros((n, 1024)) for n in (2048, 33, 32)])
    VerifyQkv(recorder)(x[:, :512], [mx.zeros((n, 512)) for n in (4096, 4096)])
    (_, split, threads, sums), (_, merge, merging, shapes), (_, whole, _, results) = (
        recorder.launches
    )
    assert split == (128 * (64 + 2 + 1), 2, 2) and threads == (128, 1, 1)
    assert sums == [(2, 17, 2048 + 33 + 32)]
    assert merge == (2048 + 33 + 32, 17, 1) and merging == (256, 1, 1)
    assert shapes == [(17, 2048), (17, 33), (17, 32)]
    assert whole == (128 * 256, 1, 2) and results == [(17, 4096)] * 2


def test_experts_have_a_threadgroup_for_each_pair_and_tile():
    recorder = Recorder()
    w, experts = random_weights((4, 65, 128), mx.float32, 4), mx.zeros((5, 3), mx.uint32)
    moe = VerifyMatmulMoe(recorder)
    moe(mx.zeros((5, 128)), w, experts)
    moe(mx.zeros((5, 3, 128)), w, experts, w)
    (_, plain, threads, shapes), (_, gated, _, _) = recorder.launches
    assert plain == (128 * 3, 15, 1) and gated == (128 * 5, 15, 1)
    assert threads == (128, 1, 1) and shapes == [(15, 65)]


def test_no_sums_are_so_few_that_they_lie_elsewhere():
    """MLX declares an input of fewer than eight elements `constant`, which is no `device`."""
    given = []

    def recorded(**definition):
        kernel = Recorder()(**definition)
        return lambda **call: given.extend(call["inputs"]) or kernel(**call)

    x, w = mx.zeros((1, 1024)), mx.zeros((1, 1024))
    VerifyMatmul(recorded)(x, w), VerifyMatmul(recorded)(x, w, w)
    VerifyQkv(recorded)(x, [w, w])
    assert len(given) == (2 + 1) + (3 + 1) + (3 + 1) and min(array.size for array in given) >= 8


def test_an_order_that_is_known_is_not_computed_again():
    given = []

    def recorded(**definition):
        kernel = Recorder()(**definition)
        return lambda **call: given.append(call["inputs"][1]) or kernel(**call)

    experts, order = mx.zeros((5, 3), mx.uint32), mx.arange(15).astype(mx.uint32)
    VerifyMatmulMoe(recorded)(mx.zeros((5, 128)), mx.zeros((4, 8, 128)), experts, order=order)
    assert given[0] is order


# dtype, head size, query rows of a head of keys -> SIMD-groups, and tiles of their rows
SHARES = [
    (mx.float16, 64, 1, 1, 1),
    (mx.float16, 64, 8, 1, 1),
    (mx.float16, 64, 9, 2, 1),
    (mx.float16, 64, 31, 4, 1),  # eight rows each: a SIMD-group more for few of them
    (mx.float16, 64, 32, 2, 1),  # sixteen each
    (mx.float16, 64, 128, 8, 1),
    (mx.float16, 128, 129, 8, 2),
    (mx.float32, 64, 64, 4, 1),
    (mx.float32, 80, 64, 8, 1),  # 320 bytes a row: eight rows are what registers hold
    (mx.float32, 128, 128, 16, 1),
    (mx.float32, 128, 136, 16, 2),
    (mx.float16, 192, 64, 8, 1),
    (mx.float16, 256, 72, 8, 2),
]


@pytest.mark.parametrize("dtype,head_dim,rows,simdgroups,tiles", SHARES)
def test_attention_takes_the_rows_of_a_head_of_keys_together(
    dtype, head_dim, rows, simdgroups, tiles
):
    recorder = Recorder()
    nodes = next(n for n in range(MOST_NODES, 0, -1) if rows % n == 0)
    queries = mx.zeros((1, 2 * rows // nodes, nodes, head_dim), dtype)
    keys = mx.zeros((1, 2, CHUNK + 200, head_dim), dtype)
    BlockAttention(recorder)(queries, keys, keys, scale=1.0, first=CHUNK - 100)
    (_, grid, threads, shapes), (_, merge, merging, _) = recorder.launches
    assert grid == (2 * 32 * simdgroups, 3 * tiles, 1) and threads == (32 * simdgroups, 1, 1)
    assert shapes == [(3, 2 * rows, head_dim), (3, 2 * rows, 2)]
    assert merge == (head_dim, 2 * rows, 1) and merging == (head_dim, 1, 1)


def test_a_cache_is_never_copied():
    """MLX would copy keys and values that are a slice of more room, all of them at every call."""
    kept = {}

    def recorded(name, ensure_row_contiguous=True, **_):
        kept[name] = not ensure_row_contiguous

    BlockAttention(recorded)
    reads_a_cache = {"block_attention", "block_attention_quantized"}
    assert {name for name, as_it_lies in kept.items() if as_it_lies} == reads_a_cache


def test_no_window_is_one_that_fits_an_int():
    """A position, less the window and what a tile and a draft span, is still one of 32 bits."""
    recorder, given = Recorder(), []

    def recorded(input_names, **definition):
        kernel = recorder(input_names=input_names, **definition)
        return lambda **call: (
            given.append(dict(zip(input_names, call["inputs"], strict=True))) or kernel(**call)
        )

    x = mx.zeros((1, 1, 3, 64))
    BlockAttention(recorded)(x, x, x, scale=1.0)
    assert 2**30 <= given[0]["window"].item() < 2**31 - CHUNK - MOST_NODES


@pytest.mark.parametrize(
    "first,length,nodes,chunks,whole",
    [(0, 512, 4, 1, 0), (0, 516, 4, 2, 1), (0, 515, 4, 2, 0), (500, 1100, 60, 4, 3)],
)
def test_a_tree_has_a_threadgroup_for_each_node_where_it_is(first, length, nodes, chunks, whole):
    recorder = Recorder()
    queries = mx.zeros((1, 1, nodes, 64), mx.float16)
    keys = mx.zeros((1, 1, length, 64), mx.float16)
    tree = TreeMask(mx.zeros(nodes), mx.eye(nodes))
    BlockAttention(recorder)(queries, keys, keys, scale=1.0, first=first, tree=tree)
    [(_, grid, _, shapes), _] = recorder.launches
    assert grid[1] == whole + (chunks - whole) * nodes and shapes[0][0] == chunks


@pytest.mark.parametrize("dim,simdgroups", [(1, 1), (4, 1), (5, 2), (16, 4), (17, 5), (128, 32)])
def test_the_delta_rule_takes_four_state_rows_a_simdgroup(dim, simdgroups):
    recorder = Recorder()
    keys, state = mx.zeros((1, 3, 1, 32)), mx.zeros((1, 2, dim, 32))
    tape = (keys, mx.zeros((1, 3, 2, dim)), mx.zeros((1, 3, 2)), mx.zeros((1, 3, 2)), state)
    DeltaVerify(recorder)(keys, *tape)
    DeltaVerify(recorder)(keys, *tape, [-1, 0, 0])
    DeltaReplay(recorder)(*tape, mx.array([0]), 1)
    together = min(4, simdgroups)
    assert [launch[1] for launch in recorder.launches] == [(32, simdgroups, 2)] * 3
    assert [launch[2][1] for launch in recorder.launches] == [together, 1, together]

"""The table of kernels: where ours run, where stock does, and when exact decoding is free."""

from dataclasses import replace

import pytest

from dflash_mlx.kernels import choose
from dflash_mlx.kernels.choose import (
    Timing,
    attention_from,
    choices,
    exact_by_default,
    first_row,
    has_kernel,
    read_timings,
    stock_seconds,
    store_timings,
    tile_seconds,
)
from dflash_mlx.kernels.shapes import Matrix, attention_key
from dflash_mlx.machine.chips import chip_named, chips

FOUR = Matrix(12288, 4096, 12288 * 4096 * 9 // 16, "affine", 4, 64)
EIGHT = Matrix(12288, 4096, 12288 * 4096 * 17 // 16, "affine", 8, 64)
HALF = Matrix(12288, 4096, 12288 * 4096 * 2, "float", 16)
SINGLE = Matrix(12288, 4096, 12288 * 4096 * 4, "float", 32)
# Of 8 experts 2 a token, and of 128 experts 8.
FEW = replace(FOUR, experts=8, top_k=2)
MANY = replace(FOUR, experts=128, top_k=8)


@pytest.mark.parametrize(
    ("chip", "matrix", "row"),
    [
        ("M1", FOUR, 6),
        ("M2 Max", EIGHT, 6),
        ("M3 Max", FOUR, 13),
        ("M4", replace(FOUR, columns=4096), 15),
        ("M4", replace(FOUR, columns=1024, depth=1024), 13),
        ("M1 Ultra", replace(FOUR, columns=4096), 18),  # never reached by 16 rows
        ("M4 Max", HALF, 2),
        ("M4 Max", SINGLE, None),
        ("M1 Max", MANY, None),  # 1.6 rows an expert at 16: half a tile costs more
        ("M4 Max", MANY, 15),
        ("M5 Max", FOUR, None),
        ("M5", HALF, None),
        ("M4", replace(FOUR, kind="mxfp4", group_size=32), None),
        ("M4", replace(FOUR, bits=6), None),
        ("M4", replace(FOUR, group_size=16), None),
    ],
)
def test_the_rows_from_which_ours_run(chip, matrix, row):
    assert first_row(chip_named(chip), matrix, {}) == row


def test_experts_wait_for_enough_rows_each():
    """Half a tile in 4 bits takes 1.475 times as long as reading the weights, in 8 bits less."""
    chip = chip_named("M4 Max")
    row = first_row(chip, FEW, {})
    assert row is not None
    assert row * 2 / FEW.active(row) > 1.475 > (row - 1) * 2 / FEW.active(row - 1)
    in_eight_bits = first_row(chip, replace(EIGHT, experts=8, top_k=2), {})
    assert in_eight_bits is not None and in_eight_bits < row


def test_a_measurement_overrules_the_table():
    m5 = chip_named("M5 Max")
    assert first_row(m5, FOUR, {FOUR.key: 9}) == 9
    assert first_row(chip_named("M1"), FOUR, {FOUR.key: None}) is None
    assert first_row(None, FOUR, {FOUR.key: 9}) == 9  # a chip that is newer than the table
    assert first_row(None, FOUR, {}) is None
    # What has no kernel was not measured, whatever a file says.
    nothing = replace(FOUR, kind="mxfp4")
    assert first_row(m5, nothing, {nothing.key: 2}) is None and not has_kernel(nothing)


@pytest.mark.parametrize(
    ("group", "row"),
    [(1, 9), (2, 9), (4, 9), (5, 7), (8, 5), (16, 3), (64, 1)],
)
def test_attention_runs_where_stock_does_not_split_the_keys(group, row):
    shape = (2 * group, 2, 128)
    assert attention_from(chip_named("M4"), *shape, {}) == row
    assert attention_from(chip_named("M5"), *shape, {}) is None
    assert attention_from(None, *shape, {}) is None
    assert attention_from(chip_named("M5"), *shape, {attention_key(*shape): 2}) == 2


def test_exact_is_the_default_where_it_was_measured_to_be_free():
    free = {HALF.key: 1, EIGHT.key: 1}
    assert exact_by_default([HALF, EIGHT], free)
    assert not exact_by_default([HALF, FOUR], free), "4 bits were not measured"
    assert not exact_by_default([HALF, FOUR], free | {FOUR.key: 6}), "one row is slower"
    assert not exact_by_default([HALF, FOUR], free | {FOUR.key: None})
    assert not exact_by_default([HALF], {})
    assert not exact_by_default([HALF, MANY], free), "experts were not measured"
    # Without a kernel for every matrix there is nothing exact to offer.
    assert not exact_by_default([replace(HALF, bits=64)], {replace(HALF, bits=64).key: 1})


def test_the_experts_that_more_rows_read():
    """Of three tokens, each sent to one of two experts, one expert always has two or three."""
    two = replace(FOUR, experts=2, top_k=1)
    assert two.crowded(3, limit=1) == 1
    assert two.crowded(3, limit=3) == 0
    assert two.crowded(3, limit=0) == pytest.approx(two.active(3))
    assert [FOUR.crowded(rows, limit=8) for rows in (1, 8, 9, 16)] == [0, 0, 1, 1]


@pytest.mark.parametrize("matrix", [FOUR, EIGHT, HALF, FEW, MANY])
def test_costs_do_not_fall_with_rows_and_the_table_follows_them(matrix):
    for chip in chips():
        ours = [tile_seconds(chip, matrix, rows) for rows in range(1, 17)]
        stock = [stock_seconds(chip, matrix, rows) for rows in range(1, 17)]
        assert ours == sorted(ours) and stock == sorted(stock)
        row = first_row(chip, matrix, {})
        if row is not None and row <= 16:
            # Ours is never chosen where the estimate says that it is clearly slower.
            assert all(ours[at] <= 1.05 * stock[at] for at in range(row - 1, 16))


@pytest.mark.parametrize(
    ("ours", "row"),
    [
        ((3.0, 3.0, 3.0, 3.0), 4),  # of stock's 1, 2, 4, 8
        ((0.9, 1.0, 2.0, 3.0), 1),
        ((0.5, 3.0, 3.0, 3.0), 4),  # winning at one row and losing at two is no place to begin
        ((3.0, 3.0, 3.0, 7.9), None),  # one part in 80 may be chance
        ((9.0, 9.0, 9.0, 9.0), None),
    ],
)
def test_ours_run_from_the_row_where_they_stay_ahead(ours, row):
    stock = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    assert Timing(stock, dict(zip(stock, ours, strict=True))).first_row == row


def test_timings_are_kept_for_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)
    assert read_timings() == {}
    better, worse = Timing({1: 2.0, 16: 4.0}, {1: 2.0, 16: 3.0}), Timing({16: 1.0}, {16: 2.0})
    store_timings({FOUR.key: better})
    path = store_timings({HALF.key: worse})  # of another model
    assert read_timings() == {FOUR.key: better, HALF.key: worse}
    assert choices(read_timings()) == {FOUR.key: 16, HALF.key: None}
    path.write_text("{")
    assert read_timings() == {}
    monkeypatch.setattr(choose, "version", lambda package: "another")
    assert store_timings({FOUR.key: worse}) != path

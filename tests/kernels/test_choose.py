"""What was timed and checked, where it is kept, when exact decoding is free; estimated costs."""

from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx.kernels import choose
from dflash_mlx.kernels.choose import (
    NONE,
    attention_rows,
    chosen,
    key_at,
    read_choices,
    read_proofs,
    store_choices,
    store_proofs,
)
from dflash_mlx.kernels.costs import guess, stock_seconds, stock_tiles_from, tile_seconds
from dflash_mlx.kernels.shapes import Matrix
from dflash_mlx.machine.chips import chip_named, chips

FOUR = Matrix(12288, 4096, 12288 * 4096 * 9 // 16, "affine", 4, 64)
EIGHT = Matrix(12288, 4096, 12288 * 4096 * 17 // 16, "affine", 8, 64)
HALF = Matrix(12288, 4096, 12288 * 4096 * 2, "float", 16)
# Of 8 experts 2 a token, and of 128 experts 8.
FEW = replace(FOUR, experts=8, top_k=2)
MANY = replace(FOUR, experts=128, top_k=8)


@pytest.mark.parametrize(
    ("chip", "matrix", "row"),
    [
        ("M1", FOUR, 4),
        ("M4 Max", FOUR, 4),
        ("M4 Max", EIGHT, 4),
        ("M4 Max", HALF, 4),
        ("M1 Max", MANY, None),  # 1.6 rows an expert at 16: half a tile costs more
        ("M4 Max", MANY, 15),
        ("M5 Max", FOUR, None),
        ("M5", HALF, None),
    ],
)
def test_the_guess_follows_the_costs(chip, matrix, row):
    rows = guess(chip_named(chip), [matrix])
    assert rows == (frozenset() if row is None else frozenset(range(row, 17)))
    assert guess(None, [matrix]) == frozenset()  # a chip that nobody knows


def test_attention_is_chosen_by_depth():
    near, far = frozenset({4}), frozenset({8})
    rows = {key_at("attention", 1024): near, key_at("attention", 4096): far}
    found = [attention_rows(rows, "attention", depth) for depth in (1, 1024, 1025, 10**6)]
    assert found == [near, near, far, far] and not attention_rows(rows, "another", 1)


def test_rows_between_those_that_were_timed_follow_the_next():
    assert chosen([4, 8, 16]) == {4, 7, 8, 13, 14, 15, 16}
    assert chosen([1, 2, 3, 4, 6, 8, 12, 16]) == set(range(1, 17))
    assert chosen([6]) == {5, 6} and chosen([12, 16], 20) == set(range(9, 21))


def test_the_experts_that_more_rows_read():
    """Of three tokens, each sent to one of two experts, one expert always has two or three."""
    two = replace(FOUR, experts=2, top_k=1)
    assert two.crowded(3, limit=1) == 1
    assert two.crowded(3, limit=3) == 0
    assert two.crowded(3, limit=0) == pytest.approx(two.active(3))
    assert [FOUR.crowded(rows, limit=8) for rows in (1, 8, 9, 16)] == [0, 0, 1, 1]


@pytest.mark.parametrize("matrix", [FOUR, EIGHT, HALF, FEW, MANY])
def test_costs_do_not_fall_with_rows(matrix):
    for chip in chips():
        ours = [tile_seconds(chip, matrix, rows) for rows in range(1, 17)]
        stock = [stock_seconds(chip, matrix, rows) for rows in range(1, 17)]
        assert ours == sorted(ours) and stock == sorted(stock)
        if matrix in (FOUR, EIGHT):  # its tiles take the same for all of their rows
            tiles = stock_tiles_from(chip, matrix)
            before, first, last = (stock_seconds(chip, matrix, n) for n in (tiles - 1, tiles, 32))
            assert before < first == last == pytest.approx(_of_32_rows(chip, matrix))
        if matrix is HALF:  # tiles of 64 rows only where N > K
            square = replace(HALF, columns=4096, size=HALF.size // 3)
            assert stock_seconds(chip, square, 2) == pytest.approx(_of_32_rows(chip, square))


def _of_32_rows(chip, matrix):
    multiplied = chip.multiplying(32, matrix.columns * matrix.depth, chip.stock_share)
    return max(chip.reading(matrix.size), multiplied)


@pytest.mark.parametrize(
    ("chip", "rows"),
    [
        ("M2", (14, 10, 6)),
        ("M3 Max", (13, 15, 13)),
        ("M1 Ultra", (32, 18, 12)),
        ("M5", (33, 25, 13)),
    ],
)
def test_the_rows_from_which_stock_has_tiles(chip, rows):
    for columns, first in zip((2048, 4096, 12288), rows, strict=True):
        matrix = replace(FOUR, columns=columns, depth=1024)
        assert stock_tiles_from(chip_named(chip), matrix) == first


def test_choices_and_proofs_are_kept_for_machine_mlx_and_model(monkeypatch, tmp_path):
    """Of several models beside each other. A file that says it is of another is not believed."""
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)
    model, rows = [FOUR.key, FOUR.key, HALF.key], {FOUR.key: frozenset({4, 5}), HALF.key: NONE}
    assert read_choices(model) is None and read_proofs() == set()
    store_choices(model, rows)
    store_choices([HALF.key], {})
    store_proofs(["a"])
    store_proofs(["b"])
    assert read_proofs() == {"a", "b"} and read_choices([HALF.key]) == {}
    assert read_choices(model) == rows and read_choices([*reversed(model)]) == rows
    [file] = (tmp_path / "kernels").iterdir()
    stored = file.read_text()
    chip = {"device_name": "Apple M9", "memory_size": 2**34}
    for change in (
        lambda patch: patch.setattr(choose, "version", lambda package: "another"),
        lambda patch: patch.setattr(mx, "device_info", lambda: chip),
        lambda patch: patch.setattr(choose.platform, "mac_ver", lambda: ("99.1", (), "")),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert read_choices(model) is None and read_proofs() == set()
            store_choices(model, {})
            [other] = set((tmp_path / "kernels").iterdir()) - {file}
            other.write_text(stored)
            assert read_choices(model) is None and read_proofs() == set()
            other.unlink()
    assert read_choices([FOUR.key, HALF.key]) is None, "a model of other layers"
    for damaged in ("{", "[]", '{"of": 3}', "\x00"):
        file.write_text(damaged)
        assert read_choices(model) is None and read_proofs() == set()

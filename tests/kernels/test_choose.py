"""Choices of kernels: the rows they apply to, and how they are stored on disk."""

from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.kernels import choose
from dflash_mlx.kernels.choose import (
    NONE,
    attention_rows,
    chosen,
    key_at,
    read_choices,
    read_passed_checks,
    store_choices,
    store_passed_checks,
)
from dflash_mlx.kernels.shapes import Matrix

# 9 / 16 bytes for a weight: 4 bits, and a scale and a bias of 16 bits for a group of 64.
FOUR_BIT = Matrix(
    12288, depth=4096, size=12288 * 4096 * 9 // 16, kind="affine", bits=4, group_size=64
)
FLOAT16 = Matrix(12288, depth=4096, size=12288 * 4096 * 2, kind="float", bits=16)


def test_attention_uses_the_choice_timed_at_the_next_larger_depth():
    near = frozenset({4})
    far = frozenset({8})
    rows = {key_at("attention", 1024): near, key_at("attention", 4096): far}
    by_depth = [attention_rows(rows, "attention", depth) for depth in (1, 1024, 1025, 10**6)]
    assert by_depth == [near, near, far, far]
    assert not attention_rows(rows, "another", 1)


def test_row_counts_between_timed_ones_use_the_choice_of_the_next_larger():
    """Timed are 1, 2, 3, 4, 6, 8, 12 and 16 rows; given are the row counts that won."""
    assert chosen([4, 8, 16]) == {4, 7, 8, 13, 14, 15, 16}
    assert chosen([1, 2, 3, 4, 6, 8, 12, 16]) == set(range(1, 17))
    assert chosen([6]) == {5, 6} and chosen([12, 16], 20) == set(range(9, 21))


# The keys of a model's matrices, and its choices.
MODEL = [FOUR_BIT.key, FOUR_BIT.key, FLOAT16.key]
ROWS_OF_MODEL = {FOUR_BIT.key: frozenset({4, 5}), FLOAT16.key: NONE}


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """The folder in which choices and passed checks are stored, here a temporary one."""
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)
    return tmp_path / "kernels"


def nothing_is_stored() -> bool:
    return read_choices(MODEL) is None and read_passed_checks() == set()


def test_one_file_holds_the_choices_of_several_models_and_all_passed_checks(folder):
    """The order of a model's layers does not matter, but their number does."""
    assert nothing_is_stored()
    store_choices(MODEL, ROWS_OF_MODEL)
    store_choices([FLOAT16.key], {})
    store_passed_checks(["a"])
    store_passed_checks(["b"])
    assert len([*folder.iterdir()]) == 1
    assert read_passed_checks() == {"a", "b"} and read_choices([FLOAT16.key]) == {}
    assert read_choices(MODEL) == read_choices([*reversed(MODEL)]) == ROWS_OF_MODEL
    assert read_choices([FOUR_BIT.key, FLOAT16.key]) is None


CHIP = {"device_name": "Apple M9", "memory_size": 2**34}
CHANGES = {
    "another version": lambda patch: patch.setattr(choose, "version", lambda package: "another"),
    "another chip": lambda patch: patch.setattr(mx, "device_info", lambda: CHIP),
    "another macOS": lambda patch: patch.setattr(
        choose.platform, "mac_ver", lambda: ("99.1", (), "")
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_another_version_chip_or_macos_stored_is_ignored(folder, change, monkeypatch):
    """Also if its file has the name that this machine's file has."""
    store_choices(MODEL, ROWS_OF_MODEL)
    store_passed_checks(["a"])
    [file] = folder.iterdir()
    change(monkeypatch)
    assert nothing_is_stored()
    store_choices(MODEL, {})
    [file_after_change] = set(folder.iterdir()) - {file}
    file_after_change.write_text(file.read_text())
    assert nothing_is_stored()


@pytest.mark.parametrize("content", ["{", "[]", '{"of": 3}', "\x00"])
def test_a_damaged_file_is_ignored(folder, content):
    store_choices(MODEL, ROWS_OF_MODEL)
    store_passed_checks(["a"])
    [file] = folder.iterdir()
    file.write_text(content)
    assert nothing_is_stored()

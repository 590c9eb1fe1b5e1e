"""Choices of kernels: the rows they apply to, and how they are stored on disk."""

import mlx.core as mx

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


def test_choices_and_passed_checks_are_stored_for_a_machine_mlx_and_model(monkeypatch, tmp_path):
    """A file holds several models. One of another version, chip or macOS is ignored."""
    monkeypatch.setattr(choose, "cache_folder", lambda part: tmp_path / part)
    model = [FOUR_BIT.key, FOUR_BIT.key, FLOAT16.key]
    rows = {FOUR_BIT.key: frozenset({4, 5}), FLOAT16.key: NONE}
    assert read_choices(model) is None and read_passed_checks() == set()
    store_choices(model, rows)
    store_choices([FLOAT16.key], {})
    store_passed_checks(["a"])
    store_passed_checks(["b"])
    assert read_passed_checks() == {"a", "b"} and read_choices([FLOAT16.key]) == {}
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
            assert read_choices(model) is None and read_passed_checks() == set()
            store_choices(model, {})
            [other] = set((tmp_path / "kernels").iterdir()) - {file}
            other.write_text(stored)
            assert read_choices(model) is None and read_passed_checks() == set()
            other.unlink()
    assert read_choices([FOUR_BIT.key, FLOAT16.key]) is None, "a model of other layers"
    for damaged in ("{", "[]", '{"of": 3}', "\x00"):
        file.write_text(damaged)
        assert read_choices(model) is None and read_passed_checks() == set()

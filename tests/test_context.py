"""What a draft layer remembers: context rows, all or the last few, and never a block's."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.drafter.context import ContextCache

BLOCK_ROW = -1.0  # no context row has this value
steps = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 16)), min_size=1, max_size=8)
windows = st.none() | st.integers(1, 40)


def rows(start: int, new: int, block: int) -> mx.array:
    """Context rows that hold their own positions, and a block's rows behind them, [1, 2, L, 4]."""
    values = mx.array([*range(start, start + new), *[BLOCK_ROW] * block], dtype=mx.float32)
    return mx.broadcast_to(values[:, None], (1, 2, new + block, 4))


def size(cache: ContextCache) -> int:
    """Context rows held now."""
    if cache.window is None:
        return cache.offset
    return cache.state[0].shape[2] if cache.state else 0


@given(steps=steps, window=windows)
def test_it_gives_the_rows_in_view_and_the_block_behind_them(steps, window):
    cache, position = ContextCache(window), 0
    for new, block in steps:
        held = size(cache)
        given = rows(position, new, block)
        keys, values = cache.update(given, -given, block=block)
        position += new
        got = keys[0, 0, :, 0].tolist()
        assert got == [*range(position - new - held, position), *[BLOCK_ROW] * block]
        assert mx.array_equal(values, -keys)
        assert cache.offset == position
        # The first row of the next block, at `position`, sees `window - 1` rows before it.
        assert size(cache) == (position if window is None else min(position, window - 1))


@pytest.mark.parametrize("window", [None, 8])
def test_what_it_gave_stays_as_it_was(window):
    """A block's keys may be read only after the next context rows came (nothing waits)."""
    cache = ContextCache(window)
    first, _ = cache.update(rows(0, 5, 3), rows(0, 5, 3), block=3)
    cache.update(rows(5, 9, 2), rows(5, 9, 2), block=2)
    assert first[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, *[BLOCK_ROW] * 3]


def test_a_window_bounds_the_memory():
    cache = ContextCache(32)
    mx.eval(cache.update(rows(0, 64, 16), rows(0, 64, 16), block=16))
    before = mx.get_active_memory()
    for step in range(1, 50):
        piece = rows(64 * step, 64, 16)
        mx.eval(cache.update(piece, piece, block=16))
        del piece
    assert cache.offset == 50 * 64
    assert size(cache) == 31
    assert mx.get_active_memory() - before < 64 * 1024

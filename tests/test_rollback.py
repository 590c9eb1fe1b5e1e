"""Rejected rows leave the caches: exactly, or the cache is refused."""

import mlx.core as mx
import pytest
from mlx_lm.models import cache as caches

from dflash_mlx.errors import UnsupportedCacheError
from dflash_mlx.target.rollback import rollback_for


def rows(start: int, count: int) -> mx.array:
    return mx.broadcast_to(mx.arange(start, start + count)[:, None], (1, 2, count, 4)).astype(
        mx.float32
    )


@pytest.mark.parametrize("rejected", [1, 5, 15])
@pytest.mark.parametrize("before", [0, 3, 250, 256])  # a KVCache grows in steps of 256
def test_a_plain_cache_forgets_the_last_rows(before, rejected):
    cache = caches.KVCache()
    if before:
        cache.update_and_fetch(rows(0, before), rows(0, before))
    cache.update_and_fetch(rows(1000, 16), rows(1000, 16))
    rollback_for(cache)(cache, rejected)
    kept = [*range(before), *range(1000, 1016 - rejected)]
    assert cache.offset == len(kept)
    for held in cache.keys_and_values():
        assert held[0, 0, :, 0].tolist() == kept
    keys, _ = cache.update_and_fetch(rows(7, 2), rows(7, 2))
    assert keys[0, 1, :, 3].tolist() == [*kept, 7, 8]


class OddCache(caches.KVCache):
    """A subclass may store its rows in another way."""


@pytest.mark.parametrize(
    "cache",
    [
        OddCache(),
        caches.RotatingKVCache(max_size=8),
        caches.QuantizedKVCache(),
        caches.ArraysCache(2),
        caches.CacheList(caches.KVCache()),
        caches.ChunkedKVCache(8),
        None,
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_other_caches_are_refused_by_name(cache):
    with pytest.raises(UnsupportedCacheError, match=type(cache).__name__):
        rollback_for(cache)

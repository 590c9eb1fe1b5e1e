"""Each kind of cache drops rejected rows, at a cost that does not grow with the context."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import family_target, plain_tokens, random_model, random_prompt, target_of
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)
from oracle import Oracle

import dflash_mlx as dm
from dflash_mlx.subclassing import overridden
from dflash_mlx.targets.caches import RecurrentCache, own_cache


def rows(start, count):
    """Keys of `count` tokens from position `start`; each row holds its position."""
    return mx.broadcast_to(mx.arange(start, start + count)[None, None, :, None], (1, 1, count, 32))


def fill(cache, steps):
    """Append steps of (rows, kept) and roll back what is not kept; returns the position."""
    position = 0
    for count, kept in steps:
        keys = rows(position, count).astype(mx.float32)
        cache.update_and_fetch(keys, keys)
        if kept < count:
            cache.commit(range(kept), count)
        position += kept
    return position


@pytest.mark.parametrize(
    "steps",
    [
        [(3, 1)],
        [(5, 5), (4, 2)],  # reaches the window's size, but no row has left it
        [(6, 4), (6, 1), (1, 1), (1, 1), (5, 3)],  # wraps; the steps of one row write a ring
        [(20, 20), (6, 1), (6, 6), (1, 1), (6, 2)],  # starts beyond the window
        [(8, 8), (8, 1), (8, 1), (8, 7), (1, 1), (1, 1)],
    ],
)
def test_a_rotating_cache_shows_the_next_row_its_whole_window(steps):
    cache = own_cache(RotatingKVCache(max_size=8))
    start = fill(cache, steps)
    assert cache.offset == start
    keys, _ = cache.update_and_fetch(rows(start, 1) * 1.0, rows(start, 1) * 1.0)
    seen = sorted(keys[0, 0, :, 0].tolist())
    assert seen == list(range(max(0, start + 1 - 8), start + 1))


class UnknownCache(KVCache):
    """A cache of a fork of mlx-lm, which might store rows in a way that we do not know."""


@pytest.mark.parametrize(
    "cache", [UnknownCache(), CacheList(KVCache(), UnknownCache()), ArraysCache(2)]
)
def test_an_unknown_cache_has_no_rollback(cache):
    """A session with such a cache goes back to a checkpoint and reads the kept rows again."""
    wrapped = own_cache(cache, nn.Module())
    assert isinstance(wrapped, type(cache)) and not wrapped.rolls_back and not wrapped.reads_trees


@pytest.mark.parametrize("cache", [ChunkedKVCache(8), CacheList(KVCache(), RotatingKVCache(8))])
def test_a_commit_drops_rejected_rows_from_every_part_of_a_cache(cache):
    wrapped = own_cache(cache)
    parts = wrapped.caches if isinstance(wrapped, CacheList) else (wrapped,)
    for part in parts:
        part.update_and_fetch(rows(0, 6), rows(0, 6))
    wrapped.commit(range(2), 6)
    assert [part.offset for part in parts] == [2] * len(parts)


def test_a_target_with_an_unknown_cache_still_drafts():
    model = random_model("qwen3")
    prompt = random_prompt(20, 3)
    answer = plain_tokens(model, prompt, 30)
    model.make_cache = lambda: [KVCache(), UnknownCache(), KVCache(), KVCache()]
    target = target_of(model, "qwen3")
    oracle = Oracle(prompt, answer, 256, p=0.5)
    assert dm.generate(target, oracle, prompt, max_tokens=30, block_size=8).tokens == answer
    assert not target.supports_trees


def arrays_of(tree) -> dict[int, mx.array]:
    """Every array in a nested structure, by `id`, so that no array counts twice."""
    leaves = [leaf for _, leaf in tree_flatten(tree)]
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, mx.array)}


def commit_bytes(family: str, context: int) -> tuple[int, int]:
    """Bytes of the recorded arrays that a commit of 7 of 16 rows reads, and of those it makes."""
    session = family_target(family).start()
    for _ in session.prefill(random_prompt(context, 0)):
        pass
    session.verify(dm.Proposal(random_prompt(16, 1)))
    recurrent = [cache for cache in session.cache if isinstance(cache, RecurrentCache)]
    read = arrays_of([(cache.recorded, cache._inputs, cache._before) for cache in recurrent])
    before = arrays_of([cache.state for cache in session.cache])
    session.commit(range(7))
    after = arrays_of([cache.state for cache in session.cache])
    made = [array for name, array in after.items() if name not in before]
    return sum(a.nbytes for a in read.values()), sum(a.nbytes for a in made)


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_5", "qwen3_next", "gpt_oss", "deepseek_v3", "glm_moe_dsa"]
)
def test_the_bytes_of_a_commit_do_not_grow_with_the_context(family):
    bytes_read, bytes_made = commit_bytes(family, 100)
    assert commit_bytes(family, 600) == (bytes_read, bytes_made)
    if family in ("qwen3", "deepseek_v3", "glm_moe_dsa"):
        assert (bytes_read, bytes_made) == (0, 0), "the offset moves, nothing else"


def test_a_commit_runs_no_projection_and_copies_no_state():
    """It repeats the recurrence from inputs that the verification recorded.

    Those of 16 rows take less than a quarter of the memory of 16 states.
    """
    target = family_target("qwen3_5")
    session = target.start()
    list(session.prefill(random_prompt(40, 0)))
    states = [cache[1] for cache in session.cache[:3]]
    logits, _ = session.verify(dm.Proposal(random_prompt(16, 1)))
    mx.eval(logits)
    for cache, state in zip(session.cache[:3], states, strict=True):
        assert cache._before is state, "the state before the verification was copied"
        held = sum(array.nbytes for array in (cache._inputs, *cache.recorded))
        assert held < 16 * state.nbytes / 4
    called = []

    def watched(call_original):
        def call(*args):
            called.append(1)
            return call_original(*args)

        return call

    with_weights = [
        (module, watched)
        for module in target.model.modules()
        if isinstance(module, nn.Linear | nn.Conv1d)
    ]
    with overridden(with_weights):
        session.commit(range(5))
        mx.eval([cache.state for cache in session.cache])
    assert not called

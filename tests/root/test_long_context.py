"""Long contexts: windows stay bounded, no step copies a cache, features do not accumulate."""

import gc

import mlx.core as mx
import pytest
import tinymodels
from families import random_prompt
from request_set import SteppedEngine
from test_dflash2 import build, distance, expected_hidden, make_target, raw_config

import dflash_mlx as dm
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.layers import append_rows
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.targets.caches import FullCache, WindowCache

WINDOW = 64
CHUNK = 512
CONTEXTS = (200, 1000)  # tokens; the caches have room for more
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}


def test_steps_without_a_draft_lose_no_features():
    """A drafter that is hardly ever asked for drafts still gets every token's features.

    They come one row at a time, and are more rows than a session keeps before it reads them.
    """
    config = raw_config()
    drafter = build(config)
    target = make_target(config)
    taps = mx.random.normal((1, 700, 64))
    fed_at_once = drafter.start(target)
    fed_by_rows = drafter.start(target)
    fed_at_once.extend(taps)
    for row in range(700):
        fed_by_rows.extend(taps[:, row : row + 1])
        if row == 5:
            fed_by_rows.propose(3, 1)
        if row == 300:
            fed_by_rows.propose(3, 4)
    assert len(fed_by_rows._pending) < 400
    expected = fed_at_once.propose(3, 6).tokens
    assert mx.array_equal(fed_by_rows.propose(3, 6).tokens, expected)


@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_the_drafter_reads_a_long_prompt_after_the_first_token(kind):
    """The first token need not wait for the drafter, and no later draft reads the whole prompt."""
    target = tinymodels.target()
    drafter = tinymodels.random_drafter() if kind == "features" else DraftModel(target)
    kept = dm.Conversation(target, drafter)
    prompt = [token % 150 for token in random_prompt(600, 3)]
    events = dm.stream_generate(target, drafter, prompt, block_size=1, conversation=kept)
    next(events)
    assert kept.caches.draft_session.pending_features == len(prompt)
    next(events)
    # The drafter has read the prompt: only features of the newest tokens may still wait.
    assert kept.caches.draft_session.pending_features <= 2
    events.close()


@pytest.mark.parametrize("causal", [True, False])
def test_after_5000_tokens_a_block_equals_full_recomputation(causal):
    drafter = build(raw_config(**SLIDING, is_causal=causal))
    context = mx.random.normal((1, 5000 + 40, 64))
    cache = drafter.make_cache()
    for start in range(0, 5000, CHUNK):
        stop = min(start + CHUNK, 5000)
        drafter.extend(context[:, start:stop], cache)
        assert cache[0].keys.shape[2] < WINDOW and cache[1].offset == stop
    position = 5000
    for step, rows in zip((0, 1, 5, 34), (6, 3, 6, 6), strict=True):
        taps = context[:, position : position + step]
        position = position + step
        block = mx.random.normal((1, rows, 32))
        hidden = drafter(block, taps, cache)
        expected = expected_hidden(drafter, context[:, :position], block)
        assert distance(hidden[0], expected) < 1e-4
        assert cache[0].keys.shape[2] <= WINDOW + step + rows and cache[0].offset == position


def test_prefilling_32k_tokens_never_holds_their_features_together():
    """Peak memory is that of a few chunks: a sliding drafter needs no more at any length."""
    rows = 32768
    features = 8 * 64
    chunk = 2048
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 1024}
    wide = {"hidden_size": 64, "num_target_layers": 12}
    config = raw_config(**layers, **wide, nested={"target_layer_ids": list(range(8))})
    drafter = build(config)
    session = drafter.start(make_target(config), None)
    mx.eval(drafter.parameters())
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(rows // chunk):
        taps = mx.random.normal((1, chunk, features))
        mx.eval(taps)  # as the target's prefill does
        session.extend(taps)
    mx.eval(session.propose(1, 6).tokens)
    peak = mx.get_peak_memory() - before
    chunk_bytes = chunk * features * 4
    print(f"peak {peak:,} bytes; a chunk's features {chunk_bytes:,}, all {rows * features * 4:,}")
    assert peak < 4 * chunk_bytes


@pytest.mark.parametrize("window", [None, 8])
def test_the_keys_of_a_block_do_not_change_when_rows_follow(window):
    """The keys are lazy arrays, and may be computed only after later rows were appended."""
    rows = mx.broadcast_to(mx.arange(17.0)[:, None], (1, 2, 17, 4))  # row r is filled with r
    cache = FullCache() if window is None else WindowCache(window)
    first, _ = append_rows(cache, rows[:, :, :8], rows[:, :, :8], block=3)
    append_rows(cache, rows[:, :, 8:], rows[:, :, 8:], block=2)
    assert first[0, 0, :, 0].tolist() == list(range(8))


def peak_bytes_of_a_step(target, drafter, requests, context, settings):
    """How much memory a step needs at its peak, in bytes, beyond what was in use before it."""
    engine = SteppedEngine(target, drafter, SharedBatch(target, None), stall=1e9)
    for number in range(requests):
        prompt = [token % 150 for token in random_prompt(context, number)]
        engine.submit(prompt, max_tokens=40, **settings)
    for _ in range(4):  # read the prompts, then move the requests into slots of the batch
        engine.scheduler.step()
    assert not engine.scheduler._prefilling
    peaks = []
    for _ in range(3):
        gc.collect()
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.scheduler.step()
        mx.synchronize()
        peaks.append(mx.get_peak_memory() - before)
    engine.scheduler.cancel_all()
    return min(peaks)


@pytest.mark.parametrize("settings", [{}, {"block_size": 4}, {"block_size": 4, "tree_budget": 4}])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_step_copies_no_cache(family, requests, settings):
    """A longer context makes the scores of a step longer, but copies no keys.

    So a step's memory grows by less than the keys of a single layer.
    """
    target = tinymodels.target(family)
    drafter = tinymodels.random_drafter(head_dim=64) if settings else None
    short, long = (
        peak_bytes_of_a_step(
            target, drafter=drafter, requests=requests, context=context, settings=settings
        )
        for context in CONTEXTS
    )
    heads = 2
    float32_bytes = 4
    key_bytes = heads * tinymodels.CONFIGS[family]["head_dim"] * float32_bytes * requests
    added_tokens = CONTEXTS[1] - CONTEXTS[0]
    growth = (long - short) / added_tokens
    print(f"{growth:.0f} bytes per token of context; a layer's keys have {key_bytes}")
    assert growth < key_bytes

"""The device's memory: freed buffers go back, and running out of it is said."""

import mlx.core as mx
import pytest
from request_set import SteppedEngine
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import NotEnoughMemoryError
from dflash_mlx.targets import session

PROMPT = [token % 90 for token in range(700)]
FULL = "[METAL] Command buffer execution failed: Insufficient Memory (00000008)."
FULL_CARD = "cudaMallocAsync(&data, size, stream) failed: out of memory"


@pytest.fixture
def clears(monkeypatch):
    """Every call of `mx.clear_cache`."""
    target()  # loading decodes too
    calls = []
    clear_cache = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(clear_cache()))
    monkeypatch.setattr(session, "CPU_STEP", 128)  # tokens in a piece of a prompt
    return calls


@pytest.mark.parametrize("drafter", [None, random_drafter()], ids=["plain", "drafted"])
def test_buffers_go_back_after_each_piece_of_a_prompt_and_every_256_tokens(clears, drafter):
    dm.generate(target(), drafter, PROMPT, max_tokens=300)
    assert len(clears) == 6 + 1  # 700 tokens in pieces of 128, and 300 more


@pytest.mark.parametrize(("count", "expected"), [(1, 1 + 2 + 2), (5, 1 + 2)])
def test_buffers_of_a_batch_go_back(clears, count, expected):
    """A session without a slot does so every 256 tokens, a batch every 256 steps."""
    played = SteppedEngine(target(), None, SharedBatch(target(), None))
    for index in range(count):
        played.submit(PROMPT[index : 20 + index], max_tokens=600)
    played.run()
    assert len(clears) == expected


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_cache_grows_once_at_most_before_buffers_go_back(clears, rows):
    """Its old buffers are as large as itself, and fit no other request."""
    session = target().start()
    grown = 0
    list(session.prefill(PROMPT))
    while session.position < 3000:
        before = session.cache[0].keys.shape[2]
        cleared = len(clears)
        session.verify(dm.Proposal([1] * rows))
        session.commit(list(range(rows // 3 + 1)))
        grown += session.cache[0].keys.shape[2] > before
        assert grown <= 1
        if len(clears) != cleared:
            grown = 0
    assert len(clears) > 9


def failing(error):
    def evaluate(*arrays):
        raise error

    return evaluate


@pytest.mark.parametrize("tokens, said", [(1, FULL), (3, FULL), (3, FULL_CARD)])
def test_an_out_of_memory_error_says_what_to_lower(monkeypatch, tokens, said):
    events = dm.stream_generate(target(), None, PROMPT[:9])
    for _ in range(tokens - 1):
        next(events)
    monkeypatch.setattr(mx, "eval", failing(RuntimeError(said)))
    with pytest.raises(NotEnoughMemoryError, match=r"(of m|t M)emory.*shorten the prompt"):
        next(events)


def test_another_error_of_the_device_is_raised_unchanged(monkeypatch):
    monkeypatch.setattr(mx, "eval", failing(RuntimeError("Caused GPU Timeout Error")))
    with pytest.raises(RuntimeError, match="^Caused GPU Timeout Error$"):
        dm.generate(target(), None, PROMPT[:9])


def test_an_out_of_memory_error_of_a_callback_is_raised_unchanged():
    def full(tokens, logits):
        raise RuntimeError(FULL)

    with pytest.raises(RuntimeError, match="Insufficient Memory"):
        dm.generate(target(), None, PROMPT[:9], logits_processors=[full])

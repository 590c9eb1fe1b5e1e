"""The device's memory: freed buffers are returned, and running out of it is a clear error."""

import mlx.core as mx
import pytest
from request_set import SteppedEngine
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import NotEnoughMemoryError
from dflash_mlx.targets import session

PROMPT = [token % 90 for token in range(700)]
METAL_ERROR = "[METAL] Command buffer execution failed: Insufficient Memory (00000008)."
CUDA_ERROR = "cudaMallocAsync(&data, size, stream) failed: out of memory"


@pytest.fixture
def cache_clears(monkeypatch):
    """A list with an item for each call of `mx.clear_cache`; prompts are read in chunks of 128."""
    target()  # loads it now, because loading decodes as well
    calls = []
    clear_cache = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(clear_cache()))
    monkeypatch.setattr(session, "CPU_STEP", 128)
    return calls


@pytest.mark.parametrize("drafter", [None, random_drafter()], ids=["plain", "drafted"])
def test_buffers_go_back_after_each_chunk_of_a_prompt_and_every_256_tokens(cache_clears, drafter):
    dm.generate(target(), drafter, PROMPT, max_tokens=300)
    assert len(cache_clears) == 6 + 1  # 700 tokens in chunks of 128, and once for the answer


@pytest.mark.parametrize(("requests", "expected"), [(1, 1 + 2 + 2), (5, 1 + 2)])
def test_buffers_of_a_batch_go_back(cache_clears, requests, expected):
    """A session that is not in the batch clears every 256 tokens, a batch every 256 steps."""
    engine = SteppedEngine(target(), None, SharedBatch(target(), None))
    for index in range(requests):
        engine.submit(PROMPT[index : 20 + index], max_tokens=600)
    engine.run()
    assert len(cache_clears) == expected


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_cache_grows_at_most_once_before_buffers_go_back(cache_clears, rows):
    """A growing cache frees buffers as large as itself, which no other request can use."""
    session = target().start()
    growths = 0  # since the last clear
    list(session.prefill(PROMPT))
    while session.position < 3000:
        size = session.cache[0].keys.shape[2]
        clears = len(cache_clears)
        session.verify(dm.Proposal([1] * rows))
        session.commit(list(range(rows // 3 + 1)))  # a third of the drafts are accepted
        if session.cache[0].keys.shape[2] > size:
            growths += 1
        assert growths <= 1
        if len(cache_clears) != clears:
            growths = 0
    assert len(cache_clears) > 9


def raising(error):
    """A stand-in for `mx.eval` that raises this error."""

    def evaluate(*arrays):
        raise error

    return evaluate


@pytest.mark.parametrize(
    ("failing_token", "message"), [(1, METAL_ERROR), (3, METAL_ERROR), (3, CUDA_ERROR)]
)
def test_an_out_of_memory_error_says_what_to_lower(monkeypatch, failing_token, message):
    events = dm.stream_generate(target(), None, PROMPT[:9])
    for _ in range(failing_token - 1):
        next(events)
    monkeypatch.setattr(mx, "eval", raising(RuntimeError(message)))
    with pytest.raises(NotEnoughMemoryError, match=r"(of m|t M)emory.*shorten the prompt"):
        next(events)


def test_another_error_of_the_device_is_raised_unchanged(monkeypatch):
    monkeypatch.setattr(mx, "eval", raising(RuntimeError("Caused GPU Timeout Error")))
    with pytest.raises(RuntimeError, match="^Caused GPU Timeout Error$"):
        dm.generate(target(), None, PROMPT[:9])


def test_an_out_of_memory_error_of_a_callback_is_raised_unchanged():
    def processor(tokens, logits):
        raise RuntimeError(METAL_ERROR)

    with pytest.raises(RuntimeError, match="Insufficient Memory"):
        dm.generate(target(), None, PROMPT[:9], logits_processors=[processor])

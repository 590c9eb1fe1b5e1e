"""A server asked by many clients at once: what it brings them all, and what each waits for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle, islice
from statistics import quantiles
from threading import Lock
from typing import Any

from .datasets import BenchPrompt
from .server import Server, Timed

ROUNDS = 2  # questions that each client asks at least, one after the other


def measure_clients(
    server: Server,
    prompts: Sequence[BenchPrompt],
    clients: int,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Have so many clients ask, each again when it has its answer, until all prompts were asked.

    Every prompt is asked as often as any other, but for one; of a conversation the first turn.

    Returns tokens per second of all answers together, and spreads of the seconds until the first
    text and between two pieces of it. Raises `ServerError`.
    """
    count = max(len(prompts), ROUNDS * clients)
    waiting, lock = islice(cycle(prompts), count), Lock()

    def questions() -> Iterator[BenchPrompt]:
        while True:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return
            yield prompt

    def client() -> list[Timed]:
        return [
            server.timed(prompt.messages, max_tokens, temperature, seed) for prompt in questions()
        ]

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        asked = [threads.submit(client) for _ in range(clients)]
        answers = list(chain.from_iterable(one.result() for one in asked))
    seconds = time.perf_counter() - start
    tokens = sum(answer.result.stats.output_tokens for answer in answers)
    return {
        "clients": clients,
        "requests": len(answers),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_seconds": spread(
            [answer.result.stats.first_token_seconds for answer in answers if answer.result.text]
        ),
        "gap_seconds": spread([gap for answer in answers for gap in answer.gaps]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and tail; of one value that alone, of none nothing."""
    if len(values) < 2:
        return {"median": round(values[0], 4)} if values else {}
    percent = quantiles(values, n=100, method="inclusive")
    return {
        "median": round(percent[49], 4),
        "p95": round(percent[94], 4),
        "most": round(max(values), 4),
    }

"""Counters for Prometheus, named as vLLM names what means the same."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..events import Event, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """What one server counts.

    Attributes:
        open: answers that are worked on or wait.
        first_token: seconds from a request to its first round's end.
        gap: seconds between two rounds' ends of one answer.
        responses: by status.
        failed: answers that could not be finished, by a fault that is not the client's.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.open = Gauge("dflash_open_answers", "Answers running or waiting", registry=registry)
        self.first_token = Histogram(
            "dflash_time_to_first_token_seconds",
            "From a request to the end of its first round",
            registry=registry,
            buckets=_SECONDS,
        )
        self.gap = Histogram(
            "dflash_inter_round_seconds",
            "Between the ends of two rounds of one answer",
            registry=registry,
            buckets=_SECONDS,
        )
        self.responses = Counter(
            "dflash_responses", "Responses by their HTTP status", ["status"], registry=registry
        )
        self.since_round = Gauge(
            "dflash_seconds_since_last_round",
            "Since a round ended, 0 while there is nothing to do",
            registry=registry,
        )
        self._finished = Counter(
            "dflash_request_success", "Answers by why they ended", ["reason"], registry=registry
        )
        self.failed = self._counter("request_failure", "Answers that could not be finished")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._cached = self._counter("cached_tokens", "Tokens of prompts read earlier")
        self._generated = self._counter("generation_tokens", "Tokens of answers")
        self._drafted = self._counter("drafted_tokens", "Tokens drafted and verified")
        self._accepted = self._counter("accepted_tokens", "Tokens drafted and kept")
        self._rounds = self._counter("rounds", "Rounds of single answers")

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"dflash_{name}", help, registry=self._registry)

    def count_round(self, event: Event) -> None:
        """A round of one answer is over."""
        self._rounds.inc()
        self._generated.inc(len(event.tokens))
        self._drafted.inc(event.drafted)
        self._accepted.inc(event.accepted)

    def count_end(self, stats: Stats, reason: str) -> None:
        """An answer is whole."""
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.reused_tokens)
        self._finished.labels(reason).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)

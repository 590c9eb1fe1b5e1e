"""Prometheus metrics, with vLLM's names if they mean the same."""

from __future__ import annotations

import sys
import time
from resource import RUSAGE_SELF, getrusage
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..events import Event, Stats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024  # bytes
# The upper bounds of the histograms' buckets, in seconds.
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.open = self._gauge("open_answers", "Answers running or waiting")
        self.running = self._gauge("requests_running", "Answers that are decoded together")
        self.waiting = self._gauge("requests_waiting", "Answers in the queue")
        self.prefix_bytes = self._gauge("prefix_cache_bytes", "Prefixes kept in memory")
        self.device_bytes = self._gauge("device_bytes", "Weights and caches of all models")
        cpu = self._gauge("process_cpu_seconds", "CPU time of this process")
        cpu.set_function(time.process_time)
        peak = self._gauge("process_peak_bytes", "The most memory that this process had")
        peak.set_function(lambda: getrusage(RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT)
        self.since_step = self._gauge(
            "seconds_since_last_round", "Since the last decode step; 0 while there is nothing to do"
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request to the end of its first decode step"
        )
        self.step_gap = self._histogram(
            "inter_round_seconds", "Between two decode steps of one answer"
        )
        self.responses = self._counter("responses", "Responses by HTTP status", "status")
        self.failed = self._counter("request_failure", "Answers that could not be finished")
        self._finished = self._counter("request_success", "Answers by finish reason", "reason")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._cached = self._counter("cached_tokens", "Prompt tokens from the prefix cache")
        self._generated = self._counter("generation_tokens", "Tokens of answers")
        self._drafted = self._counter("drafted_tokens", "Tokens drafted and verified")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens that were accepted")
        self._steps = self._counter("rounds", "Decode steps, counted per answer")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"dflash_{name}", help, labels, registry=self._registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"dflash_{name}", help, registry=self._registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"dflash_{name}", help, registry=self._registry, buckets=_BUCKETS)

    def count_step(self, event: Event) -> None:
        """Count a decode step of one answer."""
        self._steps.inc()
        self._generated.inc(len(event.tokens))
        self._drafted.inc(event.drafted)
        self._accepted.inc(event.accepted)

    def count_finish(self, stats: Stats, reason: str) -> None:
        """Count a finished answer."""
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(stats.reused_tokens)
        self._finished.labels(reason).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

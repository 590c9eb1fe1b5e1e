"""Sets of requests for an engine: their plain texts, and a drafter that drafts these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import SupportsSharing
from dflash_mlx.engine.cache_memory import MemoryBudget
from dflash_mlx.engine.job import Job
from dflash_mlx.engine.scheduler import BatchScheduler
from dflash_mlx.generation import GenerationSettings, make_request
from dflash_mlx.proposal import Proposal


class TextOracle:
    """A drafter that is given the texts: each drafted token is right with probability `p`.

    Its sessions draft from the text that begins with the committed tokens. With `branches` they
    draft trees, in which a token may have a wrong sibling. They also check that a drafter gets the
    features of every committed token once and in order, and the right anchor.
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], vocab_size: int, p: float, taps: tuple[int, ...] = ()
    ) -> None:
        self.tap_layers = taps
        self.p = p
        self.vocab_size = vocab_size
        self.texts = [list(text) for text in texts]
        self.branches = False

    def start(self, target: Any, sampler: Any) -> TextOracleSession:
        return TextOracleSession(self, len(self.tap_layers) * target.hidden_size)


class TextOracleSession(SupportsSharing):
    """The session of a `TextOracle`: it keeps the committed tokens, and no features."""

    def __init__(self, oracle: TextOracle, features: int) -> None:
        self.oracle = oracle
        self.features = features
        self.tokens: list[int] = []

    @property
    def position(self) -> int:
        return len(self.tokens)

    def trim_to(self, position: int) -> None:
        del self.tokens[position:]

    rewind = trim_to

    def rows(self, start: int, end: int) -> dict[str, mx.array]:
        return {"tokens": mx.array(self.tokens[start:end], mx.int32)}

    def dry_run(self, taps: mx.array) -> None:
        self.tokens += [0] * taps.shape[1]

    def restore(self, position: int, rows: Any, *rest: Any) -> None:
        tokens: Any = mx.concatenate([piece["tokens"] for piece in rows if piece]).tolist()
        self.tokens = tokens[:position]

    def extend(self, taps: mx.array, kept: Any = None, tokens: Sequence[int] = ()) -> None:
        assert taps.shape[0] == 1 and taps.shape[2] == self.features
        new = taps.shape[1] if kept is None else len(kept)
        assert new == len(tokens), "there are not as many features as tokens"
        self.tokens += tokens

    def propose(self, anchor: int, width: int) -> Proposal:
        oracle = self.oracle
        committed = [*self.tokens, anchor]
        texts = [text for text in oracle.texts if text[: len(committed)] == committed]
        assert texts, "no text begins with the committed tokens"
        continuation = texts[0][len(committed) :]
        tokens = [anchor]
        parents = [-1]
        parent = 0
        for slot in range(width - 1):
            # Depends on the position only, not on other requests in the batch.
            rng = random.Random(1000 * (len(committed) + slot) + committed[0])
            right = continuation[slot] if slot < len(continuation) else 0
            wrong = (right + rng.randrange(1, oracle.vocab_size)) % oracle.vocab_size
            is_right = rng.random() < oracle.p
            if oracle.branches and len(tokens) + 1 < width and rng.random() < 0.4:
                tokens.append(wrong)
                parents.append(parent)
            if len(tokens) >= width:
                break
            tokens.append(right if is_right else wrong)
            parents.append(parent)
            parent = len(tokens) - 1
        return Proposal(tokens, tuple(parents))


class RequestSet:
    """Requests (prompt, settings) of one target, and the tokens of each, plainly decoded alone."""

    def __init__(
        self, target: dm.Target, requests: Sequence[tuple[list[int], dict[str, Any]]]
    ) -> None:
        self.target = target
        self.requests = [*requests]
        self.alone = [self.plain(*request) for request in requests]

    @classmethod
    def joined(cls, sets: Sequence[RequestSet]) -> RequestSet:
        """The requests of several sets of one target."""
        joined = cls(sets[0].target, [])
        for request_set in sets:
            joined.requests += request_set.requests
            joined.alone += request_set.alone
        return joined

    def submit_to(self, engine: Any) -> list[Job]:
        return [engine.submit(prompt, **settings) for prompt, settings in self.requests]

    def plain(self, prompt: list[int], settings: dict[str, Any]) -> list[int]:
        return dm.generate(self.target, None, prompt, **fresh(settings)).tokens

    def oracle(
        self, p: float, taps: tuple[int, ...] = (), kind: type[TextOracle] = TextOracle
    ) -> TextOracle:
        texts = [
            [*prompt, *text] for (prompt, _), text in zip(self.requests, self.alone, strict=True)
        ]
        return kind(texts, self.target.vocab_size, p, taps)


def fresh(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with new logits processors, if any: these have state, and a function makes them."""
    settings = dict(settings)
    if "logits_processors" in settings:
        settings["logits_processors"] = settings["logits_processors"]()
    return settings


class SteppedEngine:
    """An engine without a thread: a test takes its steps one at a time."""

    def __init__(
        self,
        target: dm.Target,
        drafter: Any,
        together: Any,
        **options: Any,
    ) -> None:
        self.pair = target, drafter
        memory = MemoryBudget(
            target,
            drafter=drafter,
            size=options.get("memory"),
            prefix=options.get("prefix"),
            reserve=options.get("reserve", 1024),
            slot_layers=together.slot_layers,
        )
        self.scheduler = BatchScheduler(
            together,
            memory=memory,
            max_running=options.get("most_jobs", 32),
            stall=options.get("stall", 0.25),
        )

    def submit(self, prompt: list[int], **settings: Any) -> Job:
        request = make_request(*self.pair, prompt, GenerationSettings.of(fresh(settings)))
        job = Job(request.stats, lambda: None, lambda: True)
        self.scheduler.add(job, request)
        return job

    def run(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()

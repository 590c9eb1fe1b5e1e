"""Many requests for an engine: a drafter that knows all their texts, and the texts alone."""

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
    """A drafter for requests whose texts it knows: a slot is right with probability `p`.

    Its sessions are told the tokens, and look for a text that begins with them. With `branches` a
    slot may have a wrong sibling, so what is verified is a tree. It checks what drafters are owed:
    the features of every committed token, once and in order, and the right anchor.
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
        assert new == len(tokens), "features of every token, once"
        self.tokens += tokens

    def propose(self, anchor: int, width: int) -> Proposal:
        oracle = self.oracle
        so_far = [*self.tokens, anchor]
        texts = [text for text in oracle.texts if text[: len(so_far)] == so_far]
        assert texts, "the committed tokens begin none of the texts"
        rest = texts[0][len(so_far) :]
        tokens = [anchor]
        parents = [-1]
        last = 0
        for slot in range(width - 1):
            # Depends only on the position, not on which other requests are drafted for.
            luck = random.Random(1000 * (len(so_far) + slot) + so_far[0])
            right = rest[slot] if slot < len(rest) else 0
            wrong = (right + luck.randrange(1, oracle.vocab_size)) % oracle.vocab_size
            good = luck.random() < oracle.p
            if oracle.branches and len(tokens) + 1 < width and luck.random() < 0.4:
                tokens.append(wrong)
                parents.append(last)
            if len(tokens) >= width:
                break
            tokens.append(right if good else wrong)
            parents.append(last)
            last = len(tokens) - 1
        return Proposal(tokens, tuple(parents))


class RequestSet:
    """Requests of one target, and the tokens that plain decoding gives each of them."""

    def __init__(
        self, target: dm.Target, requests: Sequence[tuple[list[int], dict[str, Any]]]
    ) -> None:
        self.target = target
        self.requests = [*requests]
        self.alone = [self.plain(*request) for request in requests]

    @classmethod
    def joined(cls, sets: Sequence[RequestSet]) -> RequestSet:
        """The requests of several sets of one target."""
        whole = cls(sets[0].target, [])
        for requests in sets:
            whole.requests += requests.requests
            whole.alone += requests.alone
        return whole

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
    """Settings of a request: what serves one request only is made anew by a function."""
    return {
        name: value() if name == "logits_processors" else value for name, value in settings.items()
    }


class SteppedEngine:
    """An engine without its thread: the steps are taken by the test, one at a time."""

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
        job = Job(request.stats, lambda: None, lambda: True)  # nobody else would make its text
        self.scheduler.add(job, request)
        return job

    def run(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()

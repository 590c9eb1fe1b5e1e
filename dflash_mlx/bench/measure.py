"""One prompt, decoded in turn by plain decoding, by drafting and by mlx-lm itself.

A machine's speed drifts: it warms up, other programs come and go. So the contestants take turns,
each pair in the opposite order of the last, and medians are reported. mlx-lm takes part because a
slow baseline of our own would flatter every speedup.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mlx_lm import stream_generate as mlx_lm_generate

from ..events import Result
from ..loop import generate
from ..policy import Policy
from ..target import Target


@dataclass(frozen=True)
class Baseline:
    """What mlx-lm generated, and how fast: every token but no prefill counts, as in `Stats`."""

    tokens: list[int]
    tokens_per_second: float


@dataclass
class Comparison:
    """The runs of one prompt. All speeds are medians over the runs, in tokens per second.

    Attributes:
        target, drafter: what runs; see `stream_generate`.
        prompt: token ids.
        max_tokens, block_size, stop, kv_bits, policy: see `stream_generate`.
        sampling: settings of `stream_generate` that say how tokens are chosen, with a seed.
        plain, drafted, mlx_lm: the runs so far; at least one of each of the first two is needed
            before the properties can be read.
    """

    target: Target
    drafter: Any
    prompt: list[int]
    max_tokens: int = 256
    block_size: int | None = None
    stop: Sequence[str] = ()
    kv_bits: int | None = None
    policy: Policy | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    plain: list[Result] = field(default_factory=list)
    drafted: list[Result] = field(default_factory=list)
    mlx_lm: list[Baseline] = field(default_factory=list)

    def run_plain(self) -> None:
        """Decode once without a drafter."""
        self.plain.append(self._generate(None, None))

    def run_drafted(self) -> None:
        """Decode once with the drafter."""
        self.drafted.append(self._generate(self.drafter, self.block_size))

    def run_mlx_lm(self) -> None:
        """Decode once with mlx-lm's own generator. It knows no stop strings."""
        self.mlx_lm.append(run_mlx_lm(self.target, self.prompt, self.max_tokens))

    def run_pair(self) -> None:
        """Decode plainly and with the drafter, in the opposite order of the last pair."""
        if len(self.plain) % 2:
            self.run_drafted()
            self.run_plain()
        else:
            self.run_plain()
            self.run_drafted()

    def _generate(self, drafter: Any, block_size: int | None) -> Result:
        return generate(
            self.target,
            drafter,
            self.prompt,
            max_tokens=self.max_tokens,
            block_size=block_size,
            kv_bits=self.kv_bits,
            stop=self.stop,
            policy=self.policy,
            **self.sampling,
        )

    @property
    def plain_speed(self) -> float:
        """Plain decoding."""
        return median(run.stats.tokens_per_second for run in self.plain)

    @property
    def drafted_speed(self) -> float:
        """Decoding with the drafter."""
        return median(run.stats.tokens_per_second for run in self.drafted)

    @property
    def mlx_lm_speed(self) -> float | None:
        """mlx-lm's plain decoding; None if it did not run."""
        return median(run.tokens_per_second for run in self.mlx_lm) if self.mlx_lm else None

    @property
    def speedup(self) -> float:
        """Drafted over plain; 1.0 when nothing was generated."""
        return self.drafted_speed / self.plain_speed if self.plain_speed else 1.0

    @property
    def first_difference(self) -> int | None:
        """The first position at which a drafted token is not the plain one; None if identical."""
        plain = self.plain[0].tokens
        return first_difference([run.tokens for run in (*self.plain, *self.drafted)], plain)

    @property
    def first_difference_mlx_lm(self) -> int | None:
        """The same against mlx-lm's tokens; None if it did not run or they are identical."""
        return first_difference([run.tokens for run in self.mlx_lm], self.plain[0].tokens)


def run_mlx_lm(target: Target, prompt: Sequence[int], max_tokens: int) -> Baseline:
    """Decode greedily with `mlx_lm.stream_generate` and time it as our own loop times itself.

    Like ours, mlx-lm reads all of the prompt but its last token first; the clock starts there, so
    both count as many forwards as tokens. (mlx-lm's own figure divides n tokens by n - 1 steps.)
    """
    tokens: list[int] = []
    clock = [time.perf_counter()]

    def prefilled(processed: int, total: int) -> None:
        if processed < total:
            clock[0] = time.perf_counter()

    if max_tokens > 0:
        for response in mlx_lm_generate(
            target.model,
            target.tokenizer,
            list(prompt),
            max_tokens=min(max_tokens, target.context_length - len(prompt)),
            prompt_progress_callback=prefilled,
        ):
            tokens.append(response.token)
    return Baseline(tokens, len(tokens) / (time.perf_counter() - clock[0]))


def first_difference(runs: Sequence[Sequence[int]], tokens: Sequence[int]) -> int | None:
    """The first position at which any of the runs is not `tokens`, in either's length."""
    places = []
    for run in runs:
        pairs = zip(run, tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run), len(tokens)))
        if place < max(len(run), len(tokens)):
            places.append(place)
    return min(places, default=None)


def warm_up(target: Target, drafter: Any, block_size: int | None = None) -> None:
    """Run a few short rounds, so that compiling kernels is not counted as decoding."""
    prompt = [0] * 8
    generate(target, None, prompt, max_tokens=2)
    if drafter is not None:
        rows = block_size or drafter.config.block_size
        generate(target, drafter, prompt, max_tokens=2 * rows, block_size=block_size)

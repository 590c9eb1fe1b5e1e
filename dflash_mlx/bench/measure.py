"""Decode one prompt in turn with plain decoding, with drafting and with mlx-lm itself.

A machine's speed drifts: it warms up, other programs come and go. So the methods take turns, every
turn in the opposite order of the last, and medians are reported. mlx-lm takes part because a slow
baseline of our own would inflate every speedup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

import mlx.core as mx
from mlx_lm import stream_generate as mlx_lm_generate
from mlx_lm.sample_utils import make_sampler

from ..drafter.protocol import Drafter, label
from ..errors import DataError, PromptError
from ..events import FinishReason, Result, Stats
from ..generation import resolve_block_size
from ..loop import generate
from ..policy.draft_policy import DraftPolicy
from ..prompt import encode_prompt
from ..targets import Target
from .datasets import BenchPrompt
from .summary import DDTREE, MLX_LM, PLAIN, Difference, PromptRuns

WARM_UP_TOKENS = 32
DRAFTED = "drafted"  # name of the method when the drafter is unknown


@dataclass
class Comparison:
    """The runs of one prompt. Speeds are medians over the runs, in tokens per second.

    Attributes:
        target, drafter: see `stream_generate`.
        prompt: token ids.
        max_tokens, block_size, stop, kv_bits, policy, tree_budget: see `stream_generate`.
        sampling: sampling settings of `stream_generate`, with a seed.
        tree_settings: settings that draft trees, as a `tree_budget`; None leaves trees out.
        with_mlx_lm: whether mlx-lm takes part. It cannot for a target on several machines.
        plain, drafted, tree, mlx_lm: the runs so far.
    """

    target: Target
    drafter: Drafter | None
    prompt: list[int]
    max_tokens: int = 256
    block_size: int | None = None
    stop: Sequence[str] = ()
    kv_bits: int | None = None
    policy: DraftPolicy | None = None
    tree_budget: int | Literal["auto"] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tree_settings: Mapping[str, Any] | None = None
    with_mlx_lm: bool = True
    plain: list[Result] = field(default_factory=list)
    drafted: list[Result] = field(default_factory=list)
    tree: list[Result] = field(default_factory=list)
    mlx_lm: list[Result] = field(default_factory=list)

    @property
    def methods(self) -> dict[str, list[Result]]:
        """The runs by method, without methods that have none."""
        drafted = DRAFTED if self.drafter is None else label(self.drafter)
        runs = {PLAIN: self.plain, drafted: self.drafted, DDTREE: self.tree, MLX_LM: self.mlx_lm}
        return {name: found for name, found in runs.items() if found}

    def untaught(self) -> Comparison:
        """A copy that adds to the same runs, but whose policies learn apart.

        A second run of the same prompt must not profit from what the first one taught.
        """
        policy, tree_settings = deepcopy((self.policy, self.tree_settings))
        return replace(self, policy=policy, tree_settings=tree_settings)

    def run_plain(self) -> None:
        """Decode once without a drafter."""
        self.plain.append(self._generate(None))

    def run_drafted(self) -> None:
        """Decode once with the drafter."""
        settings = {"block_size": self.block_size, "policy": self.policy}
        run = self._generate(self.drafter, tree_budget=self.tree_budget, **settings)
        self.drafted.append(run)

    def run_tree(self) -> None:
        """Decode once with draft trees."""
        settings = {"block_size": self.block_size, **(self.tree_settings or {})}
        self.tree.append(self._generate(self.drafter, **settings))

    def run_mlx_lm(self) -> None:
        """Decode once with mlx-lm's own generator, which knows no stop strings."""
        temperature, seed = self.sampling.get("temperature", 0.0), self.sampling.get("seed")
        self.mlx_lm.append(run_mlx_lm(self.target, self.prompt, self.max_tokens, temperature, seed))

    def run_pair(self) -> None:
        """Decode plainly and with the drafter, in the opposite order of the last pair."""
        self._take_turns([self.run_plain, self.run_drafted])

    def run_all(self) -> None:
        """Decode once with every method, in the opposite order of the last turn."""
        runs = [self.run_plain, self.run_drafted]
        runs += [] if self.tree_settings is None else [self.run_tree]
        runs += [self.run_mlx_lm] if self.with_mlx_lm else []
        self._take_turns(runs)

    def _take_turns(self, runs: list[Callable[[], None]]) -> None:
        for run in reversed(runs) if len(self.plain) % 2 else runs:
            run()

    def _generate(self, drafter: Drafter | None, **settings: Any) -> Result:
        settings |= {"max_tokens": self.max_tokens, "stop": self.stop, "kv_bits": self.kv_bits}
        mx.reset_peak_memory()  # a benchmark run has the process to itself
        return generate(self.target, drafter, self.prompt, **settings, **self.sampling)

    @property
    def plain_speed(self) -> float:
        """Median speed of plain decoding."""
        return median(run.stats.tokens_per_second for run in self.plain)

    @property
    def drafted_speed(self) -> float:
        """Median speed with the drafter."""
        return median(run.stats.tokens_per_second for run in self.drafted)

    @property
    def speedup(self) -> float:
        """Drafted over plain; 1.0 when nothing was generated."""
        return self.drafted_speed / self.plain_speed if self.plain_speed else 1.0

    @property
    def first_difference(self) -> int | None:
        """The first position at which a drafted token is not the plain one; None if identical."""
        plain = self.plain[0].tokens
        return first_difference([run.tokens for run in (*self.plain, *self.drafted)], plain)

    def differences(self) -> dict[str, Difference | None]:
        """By method, where its first differing run departs from the plain text; None if none does.

        mlx-lm samples with noise of its own, so its sampled texts are not compared.
        """
        plain = self.plain[0].tokens
        found: dict[str, Difference | None] = {}
        for name, runs in self.methods.items():
            if name == MLX_LM and self.sampling.get("temperature"):
                continue
            other = next((run.tokens for run in runs if run.tokens != plain), None)
            found[name] = None if other is None else self._difference(plain, other)
        return found

    def _difference(self, plain: list[int], other: list[int]) -> Difference:
        place = first_difference([other], plain) or 0
        ours = plain[place] if place < len(plain) else None
        theirs = other[place] if place < len(other) else None
        gap = None
        if ours is not None and theirs is not None:
            logits = next_logits(self.target, [*self.prompt, *plain[:place]], self.kv_bits)
            gap = float(logits[ours]) - float(logits[theirs])
        return Difference(place, ours, theirs, gap)


def measure_all(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[BenchPrompt],
    repeats: int,
    template: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[PromptRuns]:
    """Measure prompts one after another, each conversation to its end.

    The first prompt is decoded once with every method before anything counts. All prompts are
    encoded first, so that none is refused half-way. What a policy or a drafter learns from the
    first run of a prompt helps the prompts after it, and no further run of the same prompt.

    Args:
        repeats: runs of each prompt and method.
        template: variables of the chat template.
        settings: further attributes of `Comparison`.

    Raises `PromptError` for a prompt that does not fit the target; `DataError` for one of a file.
    """
    settings |= {"target": target, "drafter": drafter}
    ids = [_encoded(target, prompt, template) for prompt in prompts]
    shorter = settings | {"max_tokens": min(WARM_UP_TOKENS, settings["max_tokens"])}
    Comparison(prompt=ids[0], **shorter).untaught().run_all()
    for prompt, tokens in zip(prompts, ids, strict=True):
        turn: BenchPrompt | None = prompt
        while turn is not None:
            if turn is not prompt:
                tokens = _encoded(target, turn, template)
            runs = Comparison(prompt=tokens, **settings)
            untaught = runs.untaught()
            runs.run_all()
            for _ in range(repeats - 1):
                untaught.untaught().run_all()
            yield PromptRuns(turn, runs.methods, runs.differences())
            turn = turn.answered(runs.plain[0].text)


def _encoded(target: Target, prompt: BenchPrompt, template: Mapping[str, Any] | None) -> list[int]:
    try:
        return encode_prompt(target, prompt.messages, template)
    except PromptError as error:
        if not prompt.source:
            raise
        raise DataError(f"{prompt.source}: {error}") from error


def next_logits(target: Target, text: Sequence[int], kv_bits: int | None = None) -> mx.array:
    """The target's logits [V], f32, after the token ids `text`."""
    *_, (logits, _) = target.start((), kv_bits).prefill(text)
    assert logits is not None  # the last forward has them
    return logits[0].astype(mx.float32)


def run_mlx_lm(
    target: Target,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Result:
    """Decode with `mlx_lm.stream_generate`, timed like our own loop.

    Decoding time starts when the prefill has brought the first token, and counts the others.
    (mlx-lm's own figure divides n tokens by n - 1 steps.)
    """
    stats = Stats(prompt_tokens=len(prompt))
    text: list[str] = []
    tokens: list[int] = []
    finish_reason: FinishReason = "length"
    mx.reset_peak_memory()
    if seed is not None:
        mx.random.seed(seed)
    begin = start = time.perf_counter()
    if max_tokens > 0:
        for response in mlx_lm_generate(
            target.model,
            target.tokenizer,
            list(prompt),
            max_tokens=min(max_tokens, target.context_length - len(prompt)),
            sampler=make_sampler(temp=temperature),
        ):
            if tokens:
                stats.count_step(0, 0, 1)
            else:
                start, stats.output_tokens = time.perf_counter(), 1
            text.append(response.text)
            tokens.append(response.token)
            finish_reason = response.finish_reason or finish_reason
    stats.prefill_seconds = stats.first_token_seconds = start - begin
    stats.decode_seconds = time.perf_counter() - start
    stats.peak_bytes = mx.get_peak_memory()
    return Result("".join(text), tokens, finish_reason, stats)


def first_difference(runs: Sequence[Sequence[int]], tokens: Sequence[int]) -> int | None:
    """The first position at which any run differs from `tokens`, in either's length."""
    places = []
    for run in runs:
        pairs = zip(run, tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run), len(tokens)))
        if place < max(len(run), len(tokens)):
            places.append(place)
    return min(places, default=None)


def warm_up(target: Target, drafter: Drafter | None, block_size: int | None = None) -> None:
    """Run a few short steps, so that compiling kernels does not count as decoding."""
    prompt = [0] * 8
    generate(target, None, prompt, max_tokens=2)
    if drafter is not None:
        rows = resolve_block_size(drafter, block_size)
        generate(target, drafter, prompt, max_tokens=2 * rows, block_size=block_size)

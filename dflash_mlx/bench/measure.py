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
from itertools import zip_longest
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate as mlx_lm_generate
from mlx_lm.sample_utils import make_sampler

from ..drafter.protocol import Drafter, label
from ..errors import DataError, PromptError
from ..events import FinishReason, Result, Stats
from ..generation import resolve_block_size
from ..loop import generate
from ..prompt import encode_prompt
from ..targets import Target
from .datasets import BenchPrompt
from .results import DDTREE, MLX_LM, PLAIN, Difference, PromptRuns, ask_all

# Tokens that are decoded before anything counts: plainly in `warm_up`, and per method.
PLAIN_WARM_UP = 2
WARM_UP_TOKENS = 32
# The name of the method if the drafter is unknown.
DRAFTED = "drafted"


@dataclass
class Comparison:
    """The runs of one prompt by several methods.

    Attributes:
        target, drafter: the arguments of `stream_generate`.
        prompt: token ids.
        settings: settings of `stream_generate` for all runs. Sampling needs a seed.
        drafting: further settings for drafted runs.
        trees: further settings for runs that draft trees; None to leave these runs out.
        with_mlx_lm: whether to run mlx-lm as well, which cannot use several machines.
        runs: the results so far, by method.
        ran: called after each run.
    """

    target: Target
    drafter: Drafter | None
    prompt: list[int]
    settings: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, Any] | None = None
    with_mlx_lm: bool = True
    runs: dict[str, list[Result]] = field(default_factory=dict)
    ran: Callable[[], object] = lambda: None

    @property
    def chain(self) -> str:
        """The name of drafting with chains."""
        return DRAFTED if self.drafter is None else label(self.drafter)

    def with_fresh_policy(self) -> Comparison:
        """A copy with fresh policies that records into the same results.

        The second run of a prompt must not profit from what the policy learned in the first one.
        """
        drafting, trees = deepcopy((self.drafting, self.trees))
        return replace(self, drafting=drafting, trees=trees)

    def run(self, *methods: str) -> None:
        """Decode once with each method, in the opposite order of the last turn."""
        turns = len(self.runs.get(PLAIN, ()))
        if turns % 2 == 1:
            methods = methods[::-1]
        for method in methods:
            self.runs.setdefault(method, []).append(self._run(method))
            self.ran()

    def run_all(self) -> None:
        """Decode once with every method."""
        methods = [PLAIN, self.chain]
        if self.trees is not None:
            methods.append(DDTREE)
        if self.with_mlx_lm:
            methods.append(MLX_LM)
        self.run(*methods)

    def _run(self, method: str) -> Result:
        mx.reset_peak_memory()  # nothing else runs in this process
        if method == MLX_LM:
            return run_mlx_lm(self.target, self.prompt, self.settings)
        drafter = None if method == PLAIN else self.drafter
        drafting: Any = self.trees if method == DDTREE else self.drafting
        if method == PLAIN:
            drafting = {}
        return generate(self.target, drafter, self.prompt, **self.settings, **drafting)

    def speed(self, method: str) -> float:
        """Median speed of a method, in tokens per second."""
        return median(run.stats.tokens_per_second for run in self.runs[method])

    @property
    def speedup(self) -> float:
        """The speed of drafting relative to plain decoding; 1.0 if nothing was generated."""
        plain = self.speed(PLAIN)
        return self.speed(self.chain) / plain if plain else 1.0

    @property
    def first_difference(self) -> int | None:
        """The first position at which a token differs from plain decoding; None if none does."""
        differences = self.differences().values()
        positions = [difference.token for difference in differences if difference is not None]
        return min(positions, default=None)

    def differences(self) -> dict[str, Difference | None]:
        """Where the first differing run of each method departs from the plain text, or None.

        mlx-lm samples with different noise, so its sampled texts are not compared.
        """
        plain = self.runs[PLAIN][0].tokens
        differences: dict[str, Difference | None] = {}
        for name, runs in self.runs.items():
            if name == MLX_LM and self.settings.get("temperature"):
                continue
            differing = next((run.tokens for run in runs if run.tokens != plain), None)
            differences[name] = None if differing is None else self._difference(plain, differing)
        return differences

    def _difference(self, plain_tokens: list[int], other_tokens: list[int]) -> Difference:
        position = 0
        for plain_token, other_token in zip_longest(plain_tokens, other_tokens):
            if plain_token != other_token:
                break
            position += 1
        gap = None
        if plain_token is not None and other_token is not None:
            text = [*self.prompt, *plain_tokens[:position]]
            kv_bits = self.settings.get("kv_bits")
            logits = next_logits(self.target, text, kv_bits)
            gap = float(logits[plain_token]) - float(logits[other_token])
        return Difference(position, plain=plain_token, other=other_token, logit_gap=gap)


def measure_all(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[BenchPrompt],
    repeats: int,
    settings: Mapping[str, Any],
    template: Mapping[str, Any] | None = None,
    **further: Any,
) -> Iterator[PromptRuns]:
    """Measure prompts one after another, each conversation to its end.

    The first prompt is decoded once with every method before anything counts. All prompts are
    encoded first, so that none is refused half-way. What a policy learns in the first run of a
    prompt is used for the next prompts, but not for further runs of the same prompt.

    Args:
        target, drafter: the pair.
        prompts: the first prompts of conversations.
        repeats: runs of each prompt and method.
        settings, further: attributes of `Comparison`.
        template: variables of the chat template.

    Raises:
        PromptError: a prompt does not fit the target.
        DataError: the same, for a prompt from a file.
    """
    encoded = [_encoded(target, prompt, template) for prompt in prompts]
    short = {**settings, "max_tokens": min(WARM_UP_TOKENS, settings["max_tokens"])}
    warm_up_runs = Comparison(target, drafter=drafter, prompt=encoded[0], settings=short, **further)
    warm_up_runs.with_fresh_policy().run_all()

    def ask(prompt: BenchPrompt) -> PromptRuns:
        ids = _encoded(target, prompt, template)
        comparison = Comparison(target, drafter=drafter, prompt=ids, settings=settings, **further)
        before = comparison.with_fresh_policy()  # has learned nothing from this prompt
        comparison.run_all()
        for _ in range(repeats - 1):
            before.with_fresh_policy().run_all()
        return PromptRuns(prompt, comparison.runs, comparison.differences())

    yield from ask_all(prompts, ask)


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


def run_mlx_lm(target: Target, prompt: Sequence[int], settings: Mapping[str, Any]) -> Result:
    """Decode with `mlx_lm.stream_generate`, timed like our own loop.

    Decoding time begins with the first token and covers the others. (mlx-lm itself reports n
    tokens divided by the time of n - 1 steps.)

    Args:
        target: the target.
        prompt: token ids.
        settings: our settings, of which max_tokens, temperature and seed are used.
    """
    max_tokens = settings["max_tokens"]
    seed = settings.get("seed")
    stats = Stats(prompt_tokens=len(prompt))
    text: list[str] = []
    tokens: list[int] = []
    finish_reason: FinishReason = "length"
    if seed is not None:
        mx.random.seed(seed)
    begin = time.perf_counter()
    first_token = begin
    if max_tokens > 0:
        for response in mlx_lm_generate(
            target.model,
            target.tokenizer,
            list(prompt),
            max_tokens=min(max_tokens, target.context_length - len(prompt)),
            sampler=make_sampler(temp=settings.get("temperature", 0.0)),
        ):
            if tokens:
                stats.count_step(0, 0, 1)
            else:
                first_token = time.perf_counter()
                stats.output_tokens = 1
            text.append(response.text)
            tokens.append(response.token)
            finish_reason = response.finish_reason or finish_reason
    stats.prefill_seconds = first_token - begin
    stats.first_token_seconds = stats.prefill_seconds
    stats.decode_seconds = time.perf_counter() - first_token
    stats.peak_bytes = mx.get_peak_memory()
    return Result("".join(text), tokens=tokens, finish_reason=finish_reason, stats=stats)


def warm_up(target: Target, drafter: Drafter | None, block_size: int | None = None) -> None:
    """Run a few short steps, so that compiling kernels does not count as decoding."""
    generate(target, None, [0] * 8, max_tokens=PLAIN_WARM_UP)
    if drafter is not None:
        tokens = warm_up_tokens(drafter, block_size) - PLAIN_WARM_UP
        generate(target, drafter, [0] * 8, max_tokens=tokens, block_size=block_size)


def warm_up_tokens(drafter: Drafter | None, block_size: int | None = None) -> int:
    """The most tokens that `warm_up` decodes."""
    blocks = 0 if drafter is None else 2 * resolve_block_size(drafter, block_size)
    return PLAIN_WARM_UP + blocks

"""One prompt, decoded in turn by plain decoding, by drafting and by mlx-lm itself.

A machine's speed drifts: it warms up, other programs come and go. So the contestants take turns,
each turn in the opposite order of the last, and medians are reported. mlx-lm takes part because a
slow baseline of our own would flatter every speedup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate as mlx_lm_generate
from mlx_lm.sample_utils import make_sampler

from ..drafter.protocol import Drafter, label
from ..errors import DataError, PromptError
from ..events import FinishReason, Result, Stats
from ..generation import max_block_size
from ..loop import generate
from ..policy.rounds import AnyPolicy
from ..prompt import encode_prompt
from ..targets import Target
from .datasets import BenchPrompt
from .overhead import overhead
from .summary import DDTREE, MLX_LM, PLAIN, Difference, Measured

WARM_UP_TOKENS = 32
DRAFTED = "drafted"  # a way that nobody knows what drafted


@dataclass
class Comparison:
    """The runs of one prompt. All speeds are medians over the runs, in tokens per second.

    Attributes:
        target, drafter: what runs; see `stream_generate`.
        prompt: token ids.
        max_tokens, block_size, stop, kv_bits, policy: see `stream_generate`.
        trees: a policy that drafts trees, see `stream_generate`; None leaves them out.
        sampling: settings of `stream_generate` that say how tokens are chosen, with a seed.
        against_mlx_lm: whether mlx-lm takes part; of a target on several machines it cannot.
        plain, drafted, tree, mlx_lm: the runs so far; at least one of each of the first two is
            needed before the properties can be read.
    """

    target: Target
    drafter: Drafter | None
    prompt: list[int]
    max_tokens: int = 256
    block_size: int | None = None
    stop: Sequence[str] = ()
    kv_bits: int | None = None
    policy: AnyPolicy | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    trees: AnyPolicy | None = None
    against_mlx_lm: bool = True
    plain: list[Result] = field(default_factory=list)
    drafted: list[Result] = field(default_factory=list)
    tree: list[Result] = field(default_factory=list)
    mlx_lm: list[Result] = field(default_factory=list)

    @property
    def ways(self) -> dict[str, list[Result]]:
        """The runs by the name of what made them, where there are any."""
        drafted = DRAFTED if self.drafter is None else label(self.drafter)
        ways = {PLAIN: self.plain, drafted: self.drafted, DDTREE: self.tree, MLX_LM: self.mlx_lm}
        return {name: runs for name, runs in ways.items() if runs}

    def untaught(self) -> Comparison:
        """The same, to add to the same runs; what those teach is not known here."""
        policy, trees = deepcopy((self.policy, self.trees))
        return replace(self, policy=policy, trees=trees)

    def run_plain(self) -> None:
        """Decode once without a drafter."""
        self.plain.append(self._generate(None))

    def run_drafted(self) -> None:
        """Decode once with the drafter."""
        settings = {"block_size": self.block_size, "policy": self.policy}
        self.drafted.append(self._generate(self.drafter, **settings))

    def run_tree(self) -> None:
        """Decode once with a tree of the drafter's drafts."""
        settings = {"block_size": self.block_size, "policy": self.trees}
        self.tree.append(self._generate(self.drafter, **settings))

    def run_mlx_lm(self) -> None:
        """Decode once with mlx-lm's own generator. It knows no stop strings."""
        temperature, seed = self.sampling.get("temperature", 0.0), self.sampling.get("seed")
        self.mlx_lm.append(run_mlx_lm(self.target, self.prompt, self.max_tokens, temperature, seed))

    def run_pair(self) -> None:
        """Decode plainly and with the drafter, in the opposite order of the last pair."""
        self._take_turns([self.run_plain, self.run_drafted])

    def run_turn(self) -> None:
        """Decode once in every way, in the opposite order of the last turn."""
        others = [] if self.trees is None else [self.run_tree]
        others += [self.run_mlx_lm] if self.against_mlx_lm else []
        self._take_turns([self.run_plain, self.run_drafted, *others])

    def _take_turns(self, contestants: list[Callable[[], None]]) -> None:
        for run in reversed(contestants) if len(self.plain) % 2 else contestants:
            run()

    def _generate(self, drafter: Drafter | None, **settings: Any) -> Result:
        settings |= {"max_tokens": self.max_tokens, "stop": self.stop, "kv_bits": self.kv_bits}
        mx.reset_peak_memory()  # a run has the process to itself
        return generate(self.target, drafter, self.prompt, **settings, **self.sampling)

    @property
    def plain_speed(self) -> float:
        """Plain decoding."""
        return median(run.stats.tokens_per_second for run in self.plain)

    @property
    def drafted_speed(self) -> float:
        """Decoding with the drafter."""
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
        """By way, where the first run that is not the plain text leaves it; None if none does.

        mlx-lm's sampling has noise of its own, so there it is left out.
        """
        plain = self.plain[0].tokens
        found: dict[str, Difference | None] = {}
        for way, runs in self.ways.items():
            if way == MLX_LM and self.sampling.get("temperature"):
                continue
            other = next((run.tokens for run in runs if run.tokens != plain), None)
            found[way] = None if other is None else self._difference(plain, other)
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


def measure(prompt: BenchPrompt, ids: list[int], repeats: int, **settings: Any) -> Measured:
    """Decode one prompt `repeats` times in every way, and its rounds as lean as can be as often.

    Policies, and a drafter that learns, do so from the first time; no other time knows of it.

    Args:
        prompt: what is asked.
        ids: the same as token ids.
        settings: of `Comparison`; the target and the drafter among them.
    """
    runs = Comparison(prompt=ids, **settings)
    overheads, untaught = [], runs.untaught()
    for turn in range(repeats):  # what the first one teaches is for other prompts
        (untaught.untaught() if turn else runs).run_turn()
        of = overhead(runs.target, runs.drafter, ids, runs.drafted[-1], runs.max_tokens)
        overheads += [] if of is None else [of]
    beyond = median(overheads) if overheads else None
    return Measured(prompt, runs.ways, runs.differences(), beyond)


def measure_all(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[BenchPrompt],
    repeats: int,
    **settings: Any,
) -> Iterator[Measured]:
    """Measure prompts one after another, each conversation to its end.

    The first prompt is decoded once in every way before anything counts. Every prompt is looked at
    first, so that none is refused when half of the work is done.

    Raises `PromptError` for one that does not fit the target; of a file's, `DataError`.
    """
    settings |= {"target": target, "drafter": drafter}
    ids = [encoded(target, prompt) for prompt in prompts]
    shorter = settings | {"max_tokens": min(WARM_UP_TOKENS, settings["max_tokens"])}
    Comparison(prompt=ids[0], **shorter).untaught().run_turn()
    for prompt, tokens in zip(prompts, ids, strict=True):
        turn: BenchPrompt | None = prompt
        while turn is not None:
            if turn is not prompt:
                tokens = encoded(target, turn)
            measured = measure(turn, tokens, repeats, **settings)
            yield measured
            turn = turn.answered(measured.runs[PLAIN][0].text)


def encoded(target: Target, prompt: BenchPrompt) -> list[int]:
    """A prompt's token ids. Raises `PromptError`; of a file's `DataError`, which names it."""
    try:
        return encode_prompt(target, prompt.messages)
    except PromptError as error:
        if not prompt.source:
            raise
        raise DataError(f"{prompt.source}: {error}") from error


def next_logits(target: Target, text: Sequence[int], kv_bits: int | None = None) -> mx.array:
    """The target's logits [V], f32, after the token ids `text`."""
    *_, (logits, _) = target.start((), kv_bits).prefill(text)
    assert logits is not None  # the last forward's
    return logits[0].astype(mx.float32)


def run_mlx_lm(
    target: Target,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Result:
    """Decode with `mlx_lm.stream_generate` and time it as our own loop times itself.

    The clock of decoding starts when the first token is there, which is the prefill's, and counts
    the others. (mlx-lm's own figure divides n tokens by n - 1 steps.)
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
                stats.count_round(0, 0, 1)
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
    """The first position at which any of the runs is not `tokens`, in either's length."""
    places = []
    for run in runs:
        pairs = zip(run, tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run), len(tokens)))
        if place < max(len(run), len(tokens)):
            places.append(place)
    return min(places, default=None)


def warm_up(target: Target, drafter: Drafter | None, block_size: int | None = None) -> None:
    """Run a few short rounds, so that compiling kernels is not counted as decoding."""
    prompt = [0] * 8
    generate(target, None, prompt, max_tokens=2)
    if drafter is not None:
        rows = max_block_size(drafter, block_size)
        generate(target, drafter, prompt, max_tokens=2 * rows, block_size=block_size)

"""From logits to the token at each position, by one function that drafter and target share.

The token at absolute position i is argmax(log p + G(seed, i)): p is the processed distribution,
and G is Gumbel noise over the vocabulary, made of the seed and the position alone. That is a sample
of p, and a fixed function of the logits. So for a given seed the text is the same whether anything
drafts or not, and a draft is accepted when it equals the target's choice, as in greedy decoding.
Because the drafter knows the noise too, it mostly draws what the target will draw.

The settings mean what they mean in mlx-lm, in mlx-lm's order: logit bias, penalties, other
processors, top-p, min-p, top-k, temperature. Processors that look at the history cost: they are
called row by row, each row with the history of its own path, and drafts are chosen one after the
other, each with those before it in its history. Nothing waits for the device unless the processor
itself does, as one that reads token ids on the host has to. Processors that are rules (`rules`) and
come last are asked about all rows at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypedDict

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from .choices import NO_CHOICE, Choices, Decision
from .distributions import gumbel, keep_min_p, keep_top_k, keep_top_p
from .errors import SettingsError
from .hindsight import Hindsight
from .proposal import Proposal
from .reading import is_whole, shown
from .rules import Rule, Rules
from .sharpness import Sharpness, matching

# (token ids [H] so far, logits [1, V]) -> logits [1, V], as in mlx-lm. It must be a function of
# these two: histories that will be rejected are seen as well, and one may be seen again.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
# Scores [L, V] of several trials, and the weight of one unit of logit in each.
Trials = tuple[list[mx.array], list[float]]

SEED_BITS = 32
MOST_F32 = 3e38  # what f32 holds, a little less


class History(TypedDict, total=False):
    """The settings of `Sampling` that mind what the text is so far, and the biases; see there."""

    logit_bias: Mapping[int, float] | None
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    presence_context_size: int
    frequency_penalty: float
    frequency_context_size: int
    logits_processors: Sequence[LogitsProcessor]


@dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens. Raises `SettingsError` for a value that makes no sense.

    Attributes:
        temperature: 0 is greedy: no noise, and top_p, top_k, min_p change nothing.
        top_p: keep the most probable tokens that together have this probability.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the most probable one's probability.
        seed: of the noise, 0 to 2**32 - 1; None draws a fresh one.
        logit_bias: token id -> what is added to its logit.
        repetition_penalty: above 1 makes tokens of the recent history less likely; 1 is off.
        presence_penalty, frequency_penalty: what a token's logit loses once, or for each time it
            occurs in the recent history; 0 is off.
        repetition_context_size, presence_context_size, frequency_context_size: how many tokens
            the recent history is.
        logits_processors: further processors, called in this order after the penalties.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logits_processors: Sequence[LogitsProcessor] = ()

    @classmethod
    def of(cls, **settings: Any) -> Sampling:
        """The settings of these names. Raises `SettingsError` for a name that there is not."""
        for name in settings:
            if name not in cls.__dataclass_fields__:
                raise SettingsError(f"There is no setting {name!r}.")
        return cls(**settings)

    def __post_init__(self) -> None:
        # In between, logits divided by it stay within what f32 holds.
        self._check(
            "temperature",
            lambda t: t == 0 or 1e-20 <= t <= 1e20,
            "0 (greedy) or from 1e-20 to 1e20",
        )
        self._check("top_p", lambda p: 0 < p <= 1, "above 0 and at most 1")
        self._check("top_k", lambda k: k >= 0, "0 (off) or more", whole=True)
        self._check("min_p", lambda p: 0 <= p <= 1, "from 0 to 1")
        if self.seed is not None:
            self._check("seed", lambda s: 0 <= s < 2**SEED_BITS, "from 0 to 2**32 - 1", whole=True)
        self._check("repetition_penalty", lambda p: 0 < p <= MOST_F32, "above 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, lambda p: abs(p) <= MOST_F32, "finite (0 is off)")
        for name in ("repetition", "presence", "frequency"):
            self._check(f"{name}_context_size", is_whole, "1 or more", whole=True)
        if isinstance(self.logits_processors, str) or not all(
            callable(one) for one in _items("logits_processors", self.logits_processors)
        ):
            raise SettingsError(
                "logits_processors must be functions of (tokens, logits), "
                f"not {shown(self.logits_processors)}."
            )
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)

    def _check(
        self, name: str, allowed: Callable[[Any], bool], range_: str, whole: bool = False
    ) -> None:
        value = getattr(self, name)
        number = isinstance(value, int if whole else Real) and not isinstance(value, bool)
        if not number or not allowed(value):
            raise SettingsError(f"{name} must be {range_}, not {shown(value)}.")

    def check_vocabulary(self, size: int) -> None:
        """Raise `SettingsError` for a token that a vocabulary of this size does not have."""
        if self.top_k > size:
            raise SettingsError(
                f"top_k {shown(self.top_k)} is more than the vocabulary's {size} tokens."
            )
        for token in self.logit_bias or ():
            if not 0 <= token < size:
                raise SettingsError(
                    f"logit_bias: the vocabulary of {size} has no token {shown(token)}."
                )

    def processors(self) -> list[LogitsProcessor]:
        """The processors that look at the history, the penalties' first."""
        penalty = self.repetition_penalty
        penalties: list[LogitsProcessor] = make_logits_processors(
            None,
            None if penalty == 1 else penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )
        return [*penalties, *self.logits_processors]


class Sampler:
    """One request's choices: the settings, the seed, and the text so far.

    Args:
        settings: how to choose; None is greedy.
        prompt: its token ids.
        sharpness: what was learnt about the drafter so far; None starts anew.

    Attributes:
        settings: as given.
        temperature: theirs.
        seed: the noise's; None when nothing is random.
    """

    def __init__(
        self,
        settings: Sampling | None = None,
        prompt: Sequence[int] = (),
        sharpness: Sharpness | None = None,
    ) -> None:
        settings = settings or Sampling()
        self.settings, self.temperature = settings, settings.temperature
        self.seed: int | None = None
        if settings.temperature > 0:
            self.seed = secrets.randbits(SEED_BITS) if settings.seed is None else settings.seed
        self.sharpness = sharpness or Sharpness()
        self._trials: Hindsight[list[list[int]]] = Hindsight()  # a block for each s of the grid
        self._processors = settings.processors()
        rules: list[Rule] = []
        while self._processors and isinstance(self._processors[-1], Rule):
            rules.append(self._processors.pop())
        self._rules = Rules(rules)
        self._position = len(prompt)  # of the next token
        self._history = mx.array(list(prompt), mx.int32) if self._processors else None
        self._noise: mx.array | None = None  # of the positions from `_noise_start` on
        self._noise_start = 0
        self._blocks: mx.array | None = None  # what each s would have drafted in this round

    def choose(self, proposal: Proposal, logits: mx.array, certainty: bool = False) -> Choices:
        """`decide`, wait for the device, and `take`."""
        decision = self.decide(proposal, logits, certainty)
        values: Any = decision.values.tolist()
        return self.take(decision, values)

    def decide(self, proposal: Proposal, logits: mx.array, certainty: bool = False) -> Decision:
        """What the target chooses after each of a proposal's rows, from its logits [N, V].

        The drafter's part is read along, and with `certainty` how sure the target was. Nothing
        waits, unless a processor does: so many requests' decisions can be read together.
        """
        tokens = proposal.tokens
        if not isinstance(tokens, mx.array):
            tokens = mx.array(list(tokens))
        tokens = tokens.astype(mx.int32)
        paths = proposal.paths() if self._processors or self._rules else []
        chosen = self.log_probs(self._processed(logits, tokens, paths))
        scores = chosen
        if self.temperature > 0:
            rows = self._noise_rows(max(proposal.depths) + 1, logits.shape[-1])
            chosen = chosen + (rows if proposal.is_chain else rows[mx.array(proposal.depths)])
        choices = chosen.argmax(axis=-1).astype(mx.int32)
        if paths or self.settings.logit_bias:
            # The largest of NaN is token 0, for ever: it is told from a choice by its sign.
            choices = mx.where(mx.isnan(chosen).any(axis=-1), NO_CHOICE, choices)
        nats = None
        if certainty:  # of the row it is asked for alone: a vocabulary's exponentials are dear
            one = proposal.is_chain and len(proposal) > 1
            nats = _certainty(scores[_last_kept(tokens, choices)[None]] if one else scores)
        blocks, self._blocks = self._blocks, None
        return Decision.of(tokens, choices, nats, blocks)

    def take(self, decision: Decision, values: Sequence[int]) -> Choices:
        """The choices in a decision's values, once they are read.

        Raises `SettingsError` where processors or a bias leave no number to choose by.
        """
        choices, blocks = decision.read(values)
        if NO_CHOICE in choices.choices:
            raise SettingsError("The logits are NaN after logits_processors and logit_bias.")
        if blocks:
            self._trials.add(decision.slots, blocks)
        return choices

    def draft(self, logits: mx.array) -> mx.array:
        """Draft the next L tokens [L], the best of each row of the drafter's logits [L, V].

        Nothing waits.
        """
        scores, _ = self.trials(logits)
        return self.settle([trial.argmax(axis=-1) for trial in scores])

    def trials(self, logits: mx.array) -> Trials:
        """What the next L tokens are drafted by, from the drafter's logits [L, V].

        Returns scores [L, V] and the weight of one unit of logit in them, for each of the
        sharpnesses that are tried; `settle` takes the tokens of each.
        """
        if self.temperature == 0:
            return [self._drafter_log_probs(logits, None, 1.0)], [1.0]
        # One row more than there are drafts: the target chooses after the last of them, too.
        noise = self._noise_rows(len(logits) + 1, logits.shape[-1])[:-1]
        grid = self.sharpness.grid
        log_probs = self._drafter_log_probs(logits, noise, self.sharpness.value)
        return [s * log_probs + noise for s in grid], [s / self.temperature for s in grid]

    def settle(self, blocks: Sequence[mx.array]) -> mx.array:
        """The block [L] to draft, of those of all trials; the others are judged later."""
        if self.temperature == 0:
            return blocks[0]
        self._blocks = mx.stack(list(blocks)) if len(blocks) > 1 else None
        return blocks[self.sharpness.best]

    def foresee(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """What a tree is ranked by, from the drafter's logits [L, V] of the next L tokens.

        Returns the drafter's log-probabilities [L, V] in f32, and the noise [L, V] that the
        target's choices will contain; None at temperature 0. Nothing waits.
        """
        if self.temperature == 0:
            scores = self._drafter_log_probs(logits, None, 1.0).astype(mx.float32)
            return scores - mx.logsumexp(scores, axis=-1, keepdims=True), None
        noise = self._noise_rows(len(logits) + 1, logits.shape[-1])[:-1]
        return self._drafter_log_probs(logits, noise, self.sharpness.value), noise

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on by these tokens, the next anchor last."""
        self._position += len(tokens)
        self._rules.commit(tokens)
        if self._history is not None:
            self._history = mx.concatenate([self._history, mx.array(list(tokens), mx.int32)])
            mx.async_eval(self._history)  # the next round may be another thread's
        for blocks, text in self._trials.commit(tokens):
            self.sharpness.learn([matching(block, text) for block in blocks])

    def log_probs(self, logits: mx.array) -> mx.array:
        """Log-probabilities [N, V] in f32 of logits [N, V] that the processors have seen.

        At temperature 0 nothing but their order matters, and the logits are returned as they are.
        """
        settings = self.settings
        if self.temperature == 0:
            return logits
        scores = logits.astype(mx.float32)
        if settings.top_p < 1:
            scores = keep_top_p(scores, settings.top_p)
        if settings.min_p > 0:
            scores = keep_min_p(scores, settings.min_p)
        if 0 < settings.top_k < scores.shape[-1]:
            scores = keep_top_k(scores, settings.top_k)
        scores = scores / self.temperature
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)

    def _processed(
        self, logits: mx.array, tokens: mx.array, paths: Sequence[list[int]]
    ) -> mx.array:
        """Logits [N, V] after bias and processors; `paths` are each row's rows after the anchor."""
        logits = self._biased(logits)
        if self._history is not None:
            logits = self._after_histories(self._history, logits, tokens, paths)
        return self._rules.restrict(logits, tokens, paths) if self._rules else logits

    def _after_histories(
        self, history: mx.array, logits: mx.array, tokens: mx.array, paths: Sequence[list[int]]
    ) -> mx.array:
        rows = []
        for row, path in enumerate(paths):
            seen = mx.concatenate([history, tokens[mx.array(path)]]) if path else history
            rows.append(self._apply(seen, logits[row : row + 1]))
        return mx.concatenate(rows)

    def _biased(self, logits: mx.array) -> mx.array:
        bias = self.settings.logit_bias
        if not bias:
            return logits
        return logits.at[:, mx.array(list(bias))].add(mx.array(list(bias.values()), logits.dtype))

    def _apply(self, history: mx.array, logits: mx.array) -> mx.array:
        for processor in self._processors:
            found = processor(history, logits)
            if not isinstance(found, mx.array) or found.shape != logits.shape:
                what = found.shape if isinstance(found, mx.array) else shown(found)
                raise SettingsError(
                    f"A logits processor must return logits of shape {logits.shape}, not {what}."
                )
            logits = found
        return logits

    def _drafter_log_probs(self, logits: mx.array, noise: mx.array | None, s: float) -> mx.array:
        """The drafter's log-probabilities [L, V], each row after the drafts of those before it."""
        logits = self._biased(logits)
        if self._history is None:
            if self._rules:
                return self._rules.drafts(logits, noise, s, self.log_probs)
            return self.log_probs(logits)
        history, rows, drafted = self._history, [], list[int]()
        for slot in range(len(logits)):
            row = self._apply(history, logits[slot : slot + 1])
            row = self.log_probs(self._rules.restrict_row(row, drafted))
            rows.append(row)
            token = (row if noise is None else s * row + noise[slot]).argmax(axis=-1)
            history = mx.concatenate([history, token.astype(mx.int32)])
            if self._rules:
                chosen: Any = token.tolist()
                drafted += chosen
        return mx.concatenate(rows)

    def _noise_rows(self, rows: int, vocab_size: int) -> mx.array:
        """The noise [rows, V] of the next positions. What a round has made, the next ones reuse."""
        assert self.seed is not None
        passed = self._position - self._noise_start
        made = 0 if self._noise is None else max(0, len(self._noise) - passed)
        parts = [] if self._noise is None or not made else [self._noise[passed:]]
        if made < rows:
            parts.append(gumbel(self.seed, self._position + made, rows - made, vocab_size))
        noise = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        self._noise, self._noise_start = noise, self._position
        return noise[:rows]


def _last_kept(tokens: mx.array, choices: mx.array) -> mx.array:
    """The last row of a chain of tokens [N] before which all were as chosen; see `accept`."""
    return mx.cumprod((tokens[1:] == choices[:-1]).astype(mx.int32)).sum()


def _certainty(scores: mx.array) -> mx.array:
    """Log-probability [N] of the likeliest token, from logits or log-probabilities [N, V]."""
    scores = scores.astype(mx.float32)
    return scores.max(axis=-1) - mx.logsumexp(scores, axis=-1)


def _items(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        raise SettingsError(f"{name} must be a list, not {shown(value)}.")
    return value


def _check_bias(bias: Any) -> None:
    """Raise `SettingsError` unless these are finite numbers by token id."""
    whole = isinstance(bias, Mapping) and all(type(token) is int for token in bias)
    values: list[Any] = list(bias.values()) if whole else []
    numbers = all(isinstance(value, Real) for value in values)
    if not whole or not numbers or not all(abs(value) <= MOST_F32 for value in values):
        raise SettingsError(f"logit_bias must map token ids to finite numbers, not {shown(bias)}.")

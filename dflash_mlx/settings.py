"""How a request chooses tokens: the settings of sampling, each checked when it is given.

They mean what they mean in mlx-lm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypedDict

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from .errors import SettingsError
from .validation import brief, is_integer

# (token ids [H] so far, logits [1, V]) -> logits [1, V], as in mlx-lm. It must be a function of
# these two: histories that will be rejected are seen as well, and one may be seen again.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

SEED_BITS = 32
CONTEXT_SIZE = 20  # mlx-lm's
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
            the recent history is; each goes with its penalty.
        logits_processors: further processors, called in this order after the penalties.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    repetition_context_size: int = CONTEXT_SIZE
    presence_penalty: float = 0.0
    presence_context_size: int = CONTEXT_SIZE
    frequency_penalty: float = 0.0
    frequency_context_size: int = CONTEXT_SIZE
    logits_processors: Sequence[LogitsProcessor] = ()

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
        self._check(  # so that logits times it, or over it, stay within what f32 holds
            "repetition_penalty", lambda p: 1e-20 <= p <= 1e20, "from 1e-20 to 1e20 (1 is off)"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, lambda p: abs(p) <= MOST_F32, "from -3e38 to 3e38 (0 is off)")
        for name in ("repetition", "presence", "frequency"):
            self._check(f"{name}_context_size", is_integer, "from 1 to 2**31 - 1", whole=True)
            size, off = getattr(self, f"{name}_context_size"), float(name == "repetition")
            if size != CONTEXT_SIZE and getattr(self, f"{name}_penalty") == off:
                raise SettingsError(f"{name}_context_size goes with a {name}_penalty: give that.")
        if isinstance(self.logits_processors, str) or not all(
            callable(one) for one in _items("logits_processors", self.logits_processors)
        ):
            raise SettingsError(
                "logits_processors must be functions of (tokens, logits), "
                f"not {brief(self.logits_processors)}."
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    def _check(
        self, name: str, allowed: Callable[[Any], bool], range_: str, whole: bool = False
    ) -> None:
        value = getattr(self, name)
        number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if not number or not allowed(value):
            raise SettingsError(f"{name} must be {range_}, not {brief(value)}.")
        object.__setattr__(self, name, int(value) if whole else float(value))  # of numpy's

    def check_vocabulary(self, size: int) -> None:
        """Raise `SettingsError` for a token that a vocabulary of this size does not have."""
        if self.top_k > size:
            raise SettingsError(
                f"top_k {brief(self.top_k)} is more than the vocabulary's {size} tokens."
            )
        for token in self.logit_bias or ():
            if not 0 <= token < size:
                raise SettingsError(
                    f"logit_bias: the vocabulary of {size} has no token {brief(token)}."
                )

    @property
    def edits(self) -> bool:
        """Whether tokens are chosen by other numbers than the model's own."""
        return bool(self.logit_bias or self.processors())

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


def _items(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence):
        raise SettingsError(f"{name} must be a list, not {brief(value)}.")
    return value


def _bias(bias: Any) -> dict[int, float]:
    """Python's finite numbers by token id. Raises `SettingsError` for anything else."""
    whole = isinstance(bias, Mapping) and all(
        isinstance(token, Integral) and type(token) is not bool for token in bias
    )
    values: list[Any] = list(bias.values()) if whole else []
    numbers = all(isinstance(value, Real) for value in values)
    if not whole or not numbers or not all(abs(value) <= MOST_F32 for value in values):
        raise SettingsError(f"logit_bias must map token ids to finite numbers, not {brief(bias)}.")
    return {int(token): float(value) for token, value in bias.items()}

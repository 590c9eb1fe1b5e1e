"""How a request chooses tokens: the sampling settings, which mean what they mean in mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import mlx.core as mx

from .errors import SettingsError
from .setting_table import MAX_F32, SAMPLING
from .validation import MAX_INT32, brief

# (token ids [H] so far, logits [1, V]) -> logits [1, V], as in mlx-lm. It must be a pure function:
# it sees drafts that are rejected later, and may see one history twice.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

CONTEXT_SIZE = 20  # mlx-lm's


@dataclass(frozen=True)
class SamplingSettings:
    """How a request chooses tokens. Raises `SettingsError` for a value out of range.

    Attributes:
        temperature: 0 is greedy: no noise, and top_p, top_k, min_p change nothing.
        top_p: keep the most probable tokens that together have this probability.
        top_k: keep the k most probable tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the most probable one's probability.
        seed: of the noise, 0 to 2**32 - 1; None draws a fresh one.
        logit_bias: token id -> the number added to its logit.
        repetition_penalty: above 1 makes tokens of the recent history less likely; 1 is off.
        repetition_context_size: tokens of history that the repetition penalty looks at.
        presence_penalty: subtracted once from a token's logit if the history has it; 0 is off.
        presence_context_size: tokens of history that the presence penalty looks at.
        frequency_penalty: subtracted for each time the history has the token; 0 is off.
        frequency_context_size: tokens of history that the frequency penalty looks at.
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
        for name, setting in SAMPLING.items():
            object.__setattr__(self, name, setting.check(name, getattr(self, name)))
        for name in ("repetition", "presence", "frequency"):
            size, off = f"{name}_context_size", 1.0 if name == "repetition" else 0.0
            self._check(size, 1, MAX_INT32, "1 or more", Integral)
            if getattr(self, size) != CONTEXT_SIZE and getattr(self, f"{name}_penalty") == off:
                raise SettingsError(f"{size} goes with a {name}_penalty: give that.")
        processors = self.logits_processors
        if (
            isinstance(processors, str)
            or not isinstance(processors, Sequence)
            or not all(map(callable, processors))
        ):
            raise SettingsError(
                "logits_processors must be a list of functions of (tokens, logits), "
                f"not {brief(processors)}."
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def _check(self, name: str, least: float, most: float, range_: str, kind: type = Real) -> None:
        """Check one number, and keep it as Python's own (it may be numpy's)."""
        value: Any = getattr(self, name)
        number = isinstance(value, kind) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise SettingsError(f"{name} must be {range_}, not {brief(value)}.")
        object.__setattr__(self, name, int(value) if kind is Integral else float(value))

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


def _checked_bias(bias: Any) -> dict[int, float]:
    """Finite numbers by token id. Raises `SettingsError` for anything else."""
    is_mapping = isinstance(bias, Mapping) and all(
        isinstance(token, Integral) and type(token) is not bool for token in bias
    )
    values: list[Any] = list(bias.values()) if is_mapping else []
    numbers = all(isinstance(value, Real) for value in values)
    if not is_mapping or not numbers or not all(abs(value) <= MAX_F32 for value in values):
        raise SettingsError(f"logit_bias must map token ids to finite numbers, not {brief(bias)}.")
    return {int(token): float(value) for token, value in bias.items()}

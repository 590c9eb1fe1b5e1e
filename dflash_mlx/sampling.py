"""From logits to the target's choice at each position; the drafter and the target share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import SettingsError

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class Sampler:
    """How a request chooses tokens. Greedy for now: other settings are refused, not ignored.

    Raises `SettingsError` for values that are out of range or not supported yet.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # greedy choices do not depend on it

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise SettingsError(f"temperature must be 0 or more, not {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if self.top_k < 0:
            raise SettingsError(f"top_k must be 0 (off) or more, not {self.top_k}.")
        if not 0 <= self.min_p <= 1:
            raise SettingsError(f"min_p must be from 0 to 1, not {self.min_p}.")
        if self.temperature > 0 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            raise SettingsError(
                "Sampling is not supported yet: leave temperature at 0 (greedy) "
                "and top_p, top_k, min_p at their defaults."
            )

    def choose(self, logits: mx.array) -> mx.array:
        """The target's token for each row: logits [N, V] -> integers [N]."""
        return logits.argmax(axis=-1)

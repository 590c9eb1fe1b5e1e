"""Cutting a drafted chain where its drafter doubts it, if that has been seen to pay.

A drafter with a confidence head says of each slot how likely it is right, given that the slots
before it are. A cut needs these numbers on the host before the target's forward is launched, so the
round waits once more. The numbers themselves are read in every round, when the device is idle, and
judged by what the text became: what the cut *would* have brought, and cost, is booked against the
whole chain. Rounds are cut only while that account says so. So a head that knows nothing, or the
opposite, costs nothing but its own product. Rounds that requests share have an account of their
own: there a row costs more, and a wait is everybody's.

The head's logit x of slot j is corrected by what is believed of the slot anyway, at rate r_j:

    logit P(slot j is right) = a x + b + c logit r_j,

with a, b and c fitted to the slots seen so far by a Newton step a draft. They start at 0, 0 and 1,
which ignores the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

FIRST = (0.0, 0.0, 1.0)  # a, b, c
FIRST_WEIGHT = 4.0  # what they count, in units of the log-likelihood's curvature
LIMIT = 10.0  # of the weights either way
STEEPEST = 12.0  # of a logit either way
MEMORY = 0.98  # a draft's weight against the next one's: the last 50 or so count
TRIALS = 24  # drafts before any is cut
MARGIN = 0.02  # of the tokens that whole chains bring: what cutting has to promise over them
FIRST_WAIT = 1.05  # what a cut round is taken to cost more than was measured, until it is known
SEEN, LATEST = 5, 15  # rounds of a kind before their time counts, and those that are remembered


class Confidence:
    """What is known of a pair's confidences. Kept with the policy, it serves further requests.

    Attributes:
        weights: [a, b, c] in float64.
        alone, shared: whether chains are cut in rounds of one request, and of many.
    """

    def __init__(self) -> None:
        self.weights = np.array(FIRST)
        self._curvature = FIRST_WEIGHT * np.eye(len(FIRST))
        self.alone, self.shared = Cutting(), Cutting()

    def rates(self, logits: Sequence[float], beliefs: Sequence[float]) -> np.ndarray:
        """How likely each slot is right when those before it are."""
        features = _features(np.array(logits), np.array(beliefs))
        return _logistic(features @ self.weights)

    def learn(self, logits: Sequence[float], beliefs: Sequence[float], right: int) -> None:
        """Take in a draft of which the first `right` slots were what the text became."""
        reached = min(right + 1, len(logits))
        features = _features(np.array(logits[:reached]), np.array(beliefs[:reached]))
        p = _logistic(features @ self.weights)
        gradient = features.T @ ((np.arange(reached) < right) - p)
        self._curvature = MEMORY * self._curvature + (features.T * (p * (1 - p))) @ features
        ridge = 1e-2 * np.eye(len(FIRST))
        step = np.linalg.solve(self._curvature + ridge, gradient)
        self.weights = np.clip(self.weights + step, -LIMIT, LIMIT)


class Cutting:
    """Whether chains are cut in rounds of one kind, and where.

    `measured` are seconds [w] of a round that drafts a chain of w rows and verifies its first 1, 2,
    ... w, without waiting; of a round that requests share, a request's part of them.
    """

    def __init__(self) -> None:
        self._drafts, self._gain = 0, 0.0  # tokens that cutting would have been ahead by
        self._tokens, self._spent = 0.0, 0.0  # what whole chains bring, and their seconds
        self._whole: deque[float] = deque(maxlen=LATEST)  # seconds by what was measured,
        self._cut: deque[float] = deque(maxlen=LATEST)  # of whole chains and of cut ones

    @property
    def pays(self) -> bool:
        """Whether chains are cut now."""
        return self._drafts >= TRIALS and self._gain > MARGIN * self._tokens

    def rows(self, rates: np.ndarray, measured: np.ndarray) -> int:
        """The best rows of a chain whose slots are right so often, the anchor included."""
        tokens = 1 + np.concatenate([[0.0], np.cumprod(rates).cumsum()])
        return int((tokens - self._speed() * self.seconds(measured)).argmax()) + 1

    def seconds(self, measured: np.ndarray) -> np.ndarray:
        """The same of rounds that wait for the draft."""
        wait = FIRST_WAIT
        if min(len(self._cut), len(self._whole)) >= SEEN:
            wait = median(self._cut) / median(self._whole)
        return wait * measured

    def took(self, ratio: float, waited: bool) -> None:
        """A round took so many times what was measured; `waited`: for the draft, to cut it."""
        (self._cut if waited else self._whole).append(ratio)

    def learn(self, rates: np.ndarray, right: int, measured: np.ndarray) -> None:
        """Take in a draft of which the first `right` slots were what the text became.

        `rates` are what was said of it.
        """
        cut = self.rows(rates, measured) if self._spent else len(measured)
        gain, whole = min(right, cut - 1) - right, float(measured[-1])
        saved = whole - float(self.seconds(measured)[cut - 1])
        self._gain = MEMORY * self._gain + gain + self._speed() * saved
        self._tokens = MEMORY * self._tokens + right + 1
        self._spent = MEMORY * self._spent + whole
        self._drafts += 1

    def _speed(self) -> float:
        """Tokens per second of whole chains."""
        return self._tokens / self._spent if self._spent else 0.0


def _features(logits: np.ndarray, beliefs: np.ndarray) -> np.ndarray:
    """What the weights multiply, [S, 3]."""
    rates = np.clip(beliefs, 1e-4, 1 - 1e-4)
    return np.stack(
        [
            np.clip(logits, -STEEPEST, STEEPEST),
            np.ones_like(logits),
            np.log(rates / (1 - rates)),
        ],
        axis=1,
    )


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))

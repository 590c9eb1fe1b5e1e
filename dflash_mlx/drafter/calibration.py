"""How likely a drafter's candidates are to be the target's choice: learnt from what it chose.

A tree is built from probabilities, and worth as much as they are true. A drafter's own are not:
it is surer than it should be, or less sure. And above temperature 0 the target's choice follows a
noise G that is known beforehand (see `sampling`). So the candidates x of a slot are given

    P(x) ~ exp(a log q(x) + (b + d sure^4) G(x)),    P(none of them) ~ exp(a log q(the rest) + c)

where `sure` is the probability of the slot's favourite: a drafter is unsure of a slot mostly
because it does not know what stands before it, and then the target's own noise decides little. The
four numbers are fitted to the choices seen so far. Their log-likelihood is concave, so a Newton
step a round finds them: temperature scaling (arXiv 1706.04599), online, with the noise in it.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

FIRST = (1.0, 0.0, 0.2, 0.0)  # a, b, d, c before anything is known,
FIRST_WEIGHT = 4.0  # and what that belief counts, in units of the log-likelihood's curvature
LIMIT = 20.0  # of a, b and d either way, and of c
LEAST_A = 0.01  # the drafter's order of candidates is never turned round
MEMORY = 0.99  # a round's weight against the next one's: the last 100 or so count
POWER = 4  # of `sure`
LEAST_REST = 1e-4  # the probability that is left for no candidate, before it is calibrated


class Calibration:
    """What was learnt about one drafter at one temperature; kept, it serves the next request too.

    Attributes:
        weights: [a, b, d, c] in float64.
    """

    def __init__(self) -> None:
        self.weights = np.array(FIRST)
        self._curvature = FIRST_WEIGHT * np.eye(len(FIRST))

    def ranking(self, log_q: mx.array, noise: mx.array | None) -> mx.array:
        """Scores [L, V] in the order of the probabilities, on the device, as `log_q` and `noise`
        [L, V] are."""
        if noise is None:
            return log_q
        a, b, d = self.weights[:3].tolist()
        sure = mx.exp(POWER * log_q.max(axis=-1, keepdims=True))
        return a * log_q + (b + d * sure) * noise

    def log_probs(self, log_q: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """Log-probabilities [L, P, K] of being chosen.

        Args:
            log_q: [L, P, K] the drafter's own, finite.
            noise: [L, K] the target's noise on the candidates; None at temperature 0.
        """
        scores = self._features(log_q, None if noise is None else noise[:, None]) @ self.weights
        return _log_softmax(scores)[..., :-1]

    def learn(self, log_q: np.ndarray, noise: np.ndarray | None, chosen: np.ndarray) -> None:
        """Take in the choices in S slots that were reached.

        Args:
            log_q: [S, K] the drafter's log-probabilities of their candidates.
            noise: [S, K] the target's noise on them; None at temperature 0.
            chosen: [S] which candidate the target chose in each slot, K for none of them.
        """
        features = self._features(log_q, noise)
        p = np.exp(_log_softmax(features @ self.weights))
        mean = np.einsum("sk,skf->sf", p, features)
        gradient = (features[np.arange(len(chosen)), chosen] - mean).sum(axis=0)
        curvature = np.einsum("sk,skf,skg->fg", p, features, features) - mean.T @ mean
        self._curvature = MEMORY * self._curvature + curvature
        ridge = 1e-3 * np.eye(len(FIRST))  # without noise nothing is known about its weights
        step = np.linalg.solve(self._curvature + ridge, gradient)
        least = (LEAST_A, -LIMIT, -LIMIT, -LIMIT)
        self.weights = np.clip(self.weights + step, least, LIMIT)

    def _features(self, log_q: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        """What the weights multiply, [..., K + 1, 4]; the last row stands for no candidate."""
        *slots, count = log_q.shape
        features = np.zeros((*slots, count + 1, len(FIRST)))
        features[..., :count, 0] = log_q
        if noise is not None:
            features[..., :count, 1] = noise
            features[..., :count, 2] = noise * np.exp(POWER * log_q.max(axis=-1, keepdims=True))
        rest = np.maximum(1 - np.exp(log_q).sum(axis=-1), LEAST_REST)
        features[..., count, 0] = np.log(rest)
        features[..., count, 3] = 1.0
        return features


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores - scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))

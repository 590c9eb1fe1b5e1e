"""One request's chains, cut where their drafter doubts them; see `confidence`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..hindsight import Hindsight
from ..proposal import Proposal
from ..sharpness import matching
from .confidence import Confidence
from .outcome import Outcome
from .widths import Widths


class Draft:
    """A chain as it was drafted, and what was thought of it.

    Args:
        known: what the drafter's numbers are worth.
        proposal: the chain of w rows.
        sure: [w - 1] logits of its slots, on the device.
        beliefs: how often each slot is right, without them.
        at: the level of the target's certainty.
        measured: [w] seconds of its round; see `confidence.Cutting`.
        shared: whether other requests have that round, too.

    Attributes:
        waits: whether the round waits for it, to cut it where that pays.
    """

    def __init__(
        self,
        known: Confidence,
        proposal: Proposal,
        sure: mx.array,
        beliefs: Sequence[float],
        at: int,
        measured: np.ndarray,
        shared: bool,
    ) -> None:
        self._known, self.proposal, self.sure = known, proposal, sure
        self.rows, self.at, self.measured = len(proposal), at, measured
        self.cutting = known.shared if shared else known.alone
        self.waits = self.cutting.pays
        self._beliefs = list(beliefs[: self.rows - 1])

    def rates(self) -> np.ndarray:
        """How likely its slots are right when those before them are; waits for the drafter."""
        return self._known.rates(self._logits(), self._beliefs)

    def chances(self) -> list[float]:
        """How likely its slots are kept."""
        chances: list[float] = np.cumprod(self.rates()).tolist()
        return chances

    def learn(self, text: Sequence[int]) -> int:
        """Take in what the text became in its place; how many slots were right."""
        right = matching(self._tokens()[1:], text)
        self.cutting.learn(self.rates(), right, self.measured)
        self._known.learn(self._logits(), self._beliefs, right)
        return right

    def _tokens(self) -> list[int]:
        return np.array(self.proposal.tokens).tolist()

    def _logits(self) -> list[float]:
        logits: list[float] = np.array(self.sure).tolist()
        return logits


def read_together(drafts: Sequence[Draft]) -> None:
    """Wait, once, for all of these and what their drafter says of them."""
    if drafts:
        mx.eval([(draft.proposal.tokens, draft.sure) for draft in drafts])


class Cuts:
    """The chains of one request whose drafter says how sure it is of them."""

    def __init__(self, known: Confidence) -> None:
        self._known, self._waiting = known, Hindsight[Draft]()

    def look(
        self,
        proposal: Proposal,
        sure: mx.array,
        beliefs: Sequence[float],
        at: int,
        measured: np.ndarray,
        shared: bool = False,
    ) -> Draft:
        """A round's chain, which may be cut if it `waits`; args as of `Draft`."""
        draft = Draft(self._known, proposal, sure, beliefs, at, measured, shared)
        if not draft.waits:
            mx.async_eval(sure)  # it is read rounds later, perhaps by another thread
        return draft

    def observe(self, draft: Draft | None, outcome: Outcome, widths: Widths) -> None:
        """Take in how a round went, of this draft or of anything else."""
        if draft is not None:
            self._book(draft, outcome, widths)
            self._waiting.add(draft.rows - 1, draft)
        for passed, text in self._waiting.commit(outcome.tokens):
            right = passed.learn(text)
            if passed.waits:  # what was cut away was doubtful: the rest says too little of it
                widths.learn(passed.at, passed.rows - 1, right)

    def _book(self, draft: Draft, outcome: Outcome, widths: Widths) -> None:
        """Book the round of a draft: a shared one's cost is on another account."""
        rows, accepted = len(outcome.proposal), outcome.accepted
        if not outcome.shared:
            draft.cutting.took(outcome.seconds / float(draft.measured[rows - 1]), draft.waits)
        if outcome.shared and not draft.waits:
            widths.observe_shared(rows - 1, accepted)
        elif not draft.waits:
            widths.observe(rows - 1, accepted, outcome.seconds)
        elif not outcome.shared:
            widths.book(float(draft.cutting.seconds(draft.measured)[rows - 1]), accepted)

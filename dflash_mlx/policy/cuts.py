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


class Cuts:
    """The chains of one request whose drafter says how sure it is of them."""

    def __init__(self, known: Confidence) -> None:
        self._known = known
        self._draft: _Draft | None = None  # of this round
        self._waiting: Hindsight[_Draft] = Hindsight()

    def propose(
        self, proposal: Proposal, sure: mx.array, beliefs: Sequence[float], at: int, context: int
    ) -> Proposal:
        """The part of a chain that is worth its cost, or all of it where nothing is cut.

        Args:
            proposal: the chain of w rows.
            sure: [w - 1] logits of its slots, on the device.
            beliefs: how often each slot is right, without the head.
            at: the level of the target's certainty.
            context: tokens before the chain.
        """
        draft = self._draft = _Draft(proposal, sure, beliefs, at, context, self._known.pays)
        if not draft.waited:
            mx.async_eval(sure)  # it is read rounds later, perhaps by another thread
            return proposal
        rows = self._known.rows(draft.logits(), draft.beliefs, context)
        return Proposal(draft.tokens()[:rows])

    def observe(self, outcome: Outcome, widths: Widths) -> None:
        """Take in how a round went whose chain was handed to `propose`."""
        draft, known, rows = self._draft, self._known, len(outcome.proposal)
        assert draft is not None
        self._draft = None
        known.took(draft.rows, rows, draft.context, outcome.seconds, draft.waited)
        if draft.waited:
            widths.book(known.seconds(draft.rows, rows, draft.context), outcome.accepted)
        else:
            widths.observe(rows - 1, outcome.accepted, outcome.seconds)
        self._waiting.add(draft.rows - 1, draft)
        for passed, text in self._waiting.commit(outcome.tokens):
            right = matching(passed.tokens()[1:], text)
            known.learn(passed.logits(), passed.beliefs, right, passed.context)
            if passed.waited:  # what was cut away was doubtful: the rest says too little of it
                widths.learn(passed.at, passed.rows - 1, right)


class _Draft:
    """A chain as it was drafted, and what was thought of it."""

    def __init__(
        self,
        proposal: Proposal,
        sure: mx.array,
        beliefs: Sequence[float],
        at: int,
        context: int,
        waited: bool,
    ) -> None:
        self._proposal, self._sure = proposal, sure
        self.rows, self.at, self.context, self.waited = len(proposal), at, context, waited
        self.beliefs = list(beliefs[: self.rows - 1])

    def tokens(self) -> list[int]:
        """All of its rows; this waits for the drafter, if nothing has yet."""
        return np.array(self._proposal.tokens).tolist()

    def logits(self) -> list[float]:
        """Of its slots."""
        logits: list[float] = np.array(self._sure).tolist()
        return logits

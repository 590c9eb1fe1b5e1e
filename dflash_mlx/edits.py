"""Changes to logits before tokens are sampled: bias, penalties, processors and constraints.

Their order is mlx-lm's. The rows of many requests are changed at once. Only processors run row by
row, each with the history of the row's path. They wait for the device only if they read token ids
on the host. Processors that come last and are a `TokenConstraint` apply to all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from .constraints import ConstraintSet, TokenConstraint, masked
from .errors import SettingsError
from .memory import compute
from .penalties import Penalties, add_bias, penalize
from .proposal import Proposal
from .settings import RequestSettings
from .validation import brief


class LogitEdits:
    """The changes to one request's logits, and the text so far that they depend on.

    Args:
        settings: the request's settings.
        prompt: the request's token ids.

    Attributes:
        bias: token -> number to add to its logit; None for no bias.
        penalties: the request's penalties.
        constraints: the constraints on the answer; None if there are none.
        history: the token ids so far, [H] int32; None if no processor reads them.
        read_text: whether a token's logits depend on the tokens before it.
    """

    def __init__(self, settings: RequestSettings, prompt: Sequence[int]) -> None:
        self.bias = settings.logit_bias
        self.penalties = Penalties(settings, prompt)
        processors = list(settings.logits_processors)
        self.read_text = self.penalties.active or bool(processors)
        constraints: list[TokenConstraint] = []
        while processors and isinstance(processors[-1], TokenConstraint):
            constraints.append(processors.pop())
        self._processors = processors
        self.constraints = ConstraintSet(constraints) if constraints else None
        self.history = mx.array(list(prompt), mx.int32) if processors else None

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        self.penalties.commit(tokens)
        if self.constraints is not None:
            self.constraints.commit(tokens)
        if self.history is not None:
            self.history = mx.concatenate([self.history, mx.array(list(tokens), mx.int32)])
            mx.async_eval(self.history)  # the next step may run in another thread

    def process(self, proposal: Proposal, logits: mx.array) -> mx.array:
        """Run the processors on the logits [N, V], each row with the history of its path."""
        if self.history is None:
            return logits
        tokens = proposal.array(logits.shape[-1]).astype(mx.int32)
        rows = []
        for row, path in enumerate(proposal.paths()):
            history = self.history
            if path:
                history = mx.concatenate([history, tokens[mx.array(path)]])
            rows.append(self._process_row(history, logits[row : row + 1]))
        return mx.concatenate(rows)

    def masks(self, proposal: Proposal, vocab_size: int) -> list[np.ndarray | None]:
        """Return which tokens the constraints allow in each row, [V] of bool; None for all."""
        if self.constraints is None:
            return [None] * len(proposal)
        tokens = proposal.array(vocab_size).astype(mx.int32)
        masks = self.constraints.masks(tokens, proposal.paths())
        if any(mask is not None and mask.shape != (vocab_size,) for mask in masks):
            raise SettingsError(f"A constraint must return masks of shape ({vocab_size},).")
        return masks

    def draft_scores(
        self,
        logits: mx.array,
        before: mx.array | None,
        to_scores: Callable[[mx.array], mx.array],
        noise: mx.array | None,
    ) -> mx.array:
        """Return a drafter's scores [L, V]; each row's history ends with the drafts before it.

        Args:
            logits: the drafter's logits, [L, V].
            before: [k] tokens that were drafted before these; None for none.
            to_scores: turns edited logits into scores.
            noise: [L, V], added to the scores to choose drafts; None for greedy drafts.
        """
        logits = add_bias([self.bias] * len(logits), logits)
        if not self.read_text:
            return to_scores(logits)
        drafts = mx.array([], mx.int32) if before is None else before.astype(mx.int32)
        host_drafts: Any = drafts.tolist() if self.constraints is not None else []
        has_other_edits = self.history is not None or self.penalties.active
        if self.constraints is not None and not has_other_edits:
            return self.constraints.drafts(
                logits,
                noise=noise,
                to_scores=to_scores,
                before=host_drafts,
            )
        rows = []
        for slot in range(len(logits)):
            history = (self.penalties, drafts, [range(len(drafts))])
            row = penalize([history], logits[slot : slot + 1])
            if self.history is not None:
                row = self._process_row(mx.concatenate([self.history, drafts]), row)
            if self.constraints is not None:
                row = self.constraints.restrict_row(row, host_drafts)
            row = to_scores(row)
            rows.append(row)
            noisy = row if noise is None else row + noise[slot]
            token = noisy.argmax(axis=-1)
            drafts = mx.concatenate([drafts, token.astype(mx.int32)])
            if self.constraints is not None:
                host_drafts += token.tolist()
        return mx.concatenate(rows)

    def _process_row(self, history: mx.array, logits: mx.array) -> mx.array:
        """Run the processors on the logits [1, V] of one row, after a history [H]."""
        for processor in self._processors:
            processed = processor(history, logits)
            is_array = isinstance(processed, mx.array)
            if not is_array or processed.shape != logits.shape:
                returned = processed.shape if is_array else brief(processed)
                raise SettingsError(
                    f"A logits processor must return logits of shape {logits.shape}, not "
                    f"{returned}."
                )
            logits = processed
        return logits


# One request's changes, its rows, and a context in which its own processors and constraints run.
EditedRows = tuple[LogitEdits, Proposal, AbstractContextManager[Any]]


def edit(requests: Sequence[EditedRows], logits: mx.array) -> mx.array:
    """Apply each request's changes to the logits [N, V] of many requests' rows."""
    vocab_size = logits.shape[-1]
    biases: list[Mapping[int, float] | None] = []
    for edits, proposal, _ in requests:
        biases += [edits.bias] * len(proposal)
    logits = add_bias(biases, logits)
    if not any(edits.read_text for edits, _, _ in requests):
        return logits
    histories = [
        (edits.penalties, proposal.array(vocab_size).astype(mx.int32), proposal.paths())
        for edits, proposal, _ in requests
    ]
    logits = penalize(histories, logits)
    if any(edits.history is not None for edits, _, _ in requests):
        processed = []
        first = 0
        for edits, proposal, guard in requests:
            rows = logits[first : first + len(proposal)]
            first += len(proposal)
            with guard:
                rows = edits.process(proposal, rows)
            processed.append(rows)
        logits = mx.concatenate(processed)
    if any(edits.constraints is not None for edits, _, _ in requests):
        compute(logits, wait=False)
        masks: list[np.ndarray | None] = []
        for edits, proposal, guard in requests:
            allowed: list[np.ndarray | None] = [None] * len(proposal)
            with guard:
                allowed = edits.masks(proposal, vocab_size)
            masks += allowed
        logits = masked(logits, masks)
    return logits

"""From logits to the token at each position, by one function that drafter and target share.

The token at absolute position i is argmax(log p + G(seed, i)): p is the processed distribution,
and G is Gumbel noise over the vocabulary that depends only on the seed and the position. That is a
sample of p, and a fixed function of the logits. So a seed's text is the same with and without a
drafter, and a draft is accepted if it equals the target's choice, as in greedy decoding. The
drafter uses the same noise, so it mostly drafts what the target will choose.

The settings and their order are mlx-lm's: logit bias, penalties, other processors, top-p, min-p,
top-k, temperature; only presence and frequency penalties count otherwise (`penalties`). All rows of
many requests are chosen at once. Only processors run row by row, each row with the history of its
own path. They wait for the device only if they read token ids on the host. Those that are a
`TokenConstraint` and come last are applied to all rows at once. With penalties or processors,
drafts are chosen one after the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .constraints import ConstraintSet, TokenConstraint, masked
from .distributions import gumbel, keep_min_p, keep_top_k, keep_top_p
from .errors import SettingsError
from .memory import compute
from .penalties import Penalties, add_bias, penalize
from .proposal import Proposal
from .settings import SEED_BITS, SETTINGS, RequestSettings
from .validation import brief

# Scores [L, V] of the next tokens, and the factor of the logits in them. A chain takes the best; a
# tree's probabilities are the softmax.
DraftScores = tuple[mx.array, float]

NO_CHOICE = -1  # in place of a token, if the logits leave none


class DraftSharpness:
    """How much a drafter's scores count beside the noise of the target's choice; learnt.

    Drafts are the best of scores + noise / s. s = 1 is right for a drafter whose distribution is
    the target's; one that is less sure than it should be needs more. The best s brings up to half
    as many tokens again per step as the others, and differs by pair and temperature.
    """

    GRID = (1.0, 3.0, 10.0)
    MEMORY, LEAD = 0.98, 2.0  # weight of a draft relative to the next one; lead of the middle s
    SOON, SELDOM = 16, 8  # the first drafts are drawn with every s, later one of so many

    def __init__(self) -> None:
        self._accepted, self._drafts = [0.0, self.LEAD, 0.0], 0

    @property
    def value(self) -> float:
        """The s to draft with."""
        return self.GRID[self._accepted.index(max(self._accepted))]

    def compares(self) -> bool:
        """Whether the next draft is drawn with every s, for `learn`."""
        self._drafts += 1
        return self._drafts <= self.SOON or self._drafts % self.SELDOM == 0

    def learn(self, drafts: Sequence[Sequence[int]], text: Sequence[int]) -> None:
        """Compare the draft of each s with the tokens that were committed in its place."""
        for at, draft in enumerate(drafts):
            pairs = enumerate(zip(draft, text, strict=False))
            right = next((slot for slot, (a, b) in pairs if a != b), min(len(draft), len(text)))
            self._accepted[at] = self.MEMORY * self._accepted[at] + right


class Sampler:
    """Chooses one request's tokens: the settings, the seed, and the text so far.

    Args:
        settings: how to choose; None is greedy.
        prompt: its token ids.
        sharpness: of the drafter, learnt by earlier requests; None starts anew.

    Attributes:
        settings: as given.
        temperature: of the settings.
        seed: of the noise; None if greedy.
        can_pipeline: whether a token can be chosen before the one before it is on the host.
            Processors read that token.
        group: equal in requests whose rows are chosen in one operation: whether anything but the
            model's logits, noise and truncation decides a token, and the truncation.
    """

    def __init__(
        self,
        settings: RequestSettings | None = None,
        prompt: Sequence[int] = (),
        sharpness: DraftSharpness | None = None,
    ) -> None:
        settings = settings or RequestSettings()
        self.settings, self.temperature = settings, settings.temperature
        self.seed: int | None = None
        if settings.temperature > 0:
            self.seed = secrets.randbits(SEED_BITS) if settings.seed is None else settings.seed
        self._sharpness = sharpness or DraftSharpness()
        self._compared: mx.array | None = None  # [S, L], the draft of this step with each s
        self._penalties = Penalties(settings, prompt)
        processors = list(settings.logits_processors)
        self.can_pipeline = not (self._penalties.active or processors)
        constraints: list[TokenConstraint] = []
        while processors and isinstance(processors[-1], TokenConstraint):
            constraints.append(processors.pop())
        self._processors = processors
        self._constraints = ConstraintSet(constraints) if constraints else None
        edits = bool(settings.logit_bias) or not self.can_pipeline
        self._plain = not edits and settings.temperature == 0
        names = ["temperature", *(name for name, one in SETTINGS.items() if one.samples)]
        truncation = [getattr(settings, name) for name in names if name != "seed"]
        self.group = edits, *(truncation if settings.temperature > 0 else ())
        self._position = len(prompt)  # of the next token
        self._history = mx.array(list(prompt), mx.int32) if processors else None
        self._noise: mx.array | None = None  # [R, V], from position `_noise_start` on
        self._noise_start = 0

    def decide(self, proposal: Proposal, logits: mx.array, ahead: int = 0) -> mx.array:
        """Choose the target's token after each row of a proposal. Lazy, unless a processor is not.

        Args:
            proposal: N rows.
            logits: [N, V] after each of them.
            ahead: tokens before the proposal that are not committed yet (`can_pipeline`).

        Returns the choices [N], integers.
        """
        return _decide_group([Decision(self, proposal, ahead)], logits)

    def noise_key(self, ahead: int) -> tuple[int, int]:
        """The seed, and the position of the token after `ahead` more: the key of its noise."""
        assert self.seed is not None
        return self.seed, self._position + ahead

    def draft(self, logits: mx.array) -> mx.array:
        """Draft the next L tokens [L] from the drafter's logits [L, V]. Lazy."""
        scores, _ = self.draft_scores(logits)
        return scores.argmax(axis=-1)

    def draft_scores(self, logits: mx.array, before: mx.array | None = None) -> DraftScores:
        """The scores of the next L tokens, from the drafter's logits [L, V].

        `before` are the tokens [k] that a drafter which drafts one by one has drafted before them.
        """
        if self._plain:
            return logits, 1.0
        if self.temperature == 0:
            return self._drafter_scores(logits, None, before), 1.0
        # One row more than drafts, because the target also chooses after the last one.
        first = 0 if before is None else len(before)
        noise = self._noise_rows(first + len(logits) + 1, logits.shape[-1])[first:-1]
        scores, s = self._drafter_scores(logits, noise, before), self._sharpness.value
        if not first and self._sharpness.compares():
            drafts = [(scores + noise / each).argmax(axis=-1) for each in DraftSharpness.GRID]
            self._compared = mx.stack(drafts)
        return scores + noise / s, 1 / self.temperature

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, the next anchor last."""
        self._position += len(tokens)
        if self._plain:
            return
        if self._compared is not None:
            drafts: Any = self._compared.tolist()
            self._sharpness.learn(drafts, tokens)
            self._compared = None
        if self._constraints is not None:
            self._constraints.commit(tokens)
        self._penalties.commit(tokens)
        if self._history is not None:
            self._history = mx.concatenate([self._history, mx.array(list(tokens), mx.int32)])
            mx.async_eval(self._history)  # the next step may run in another thread

    def scores(self, logits: mx.array) -> mx.array:
        """The scores [N, V] of tokens, from processed logits [N, V].

        These are f32 log-probabilities up to a constant per row, which changes no choice. At
        temperature 0 they are the logits.
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
        # With the maximum at 0, a low temperature cannot overflow the best scores.
        return (scores - scores.max(axis=-1, keepdims=True)) / self.temperature

    def _processed(self, proposal: Proposal, logits: mx.array) -> mx.array:
        """The logits [N, V] after the processors, each row with the history of its path."""
        assert self._history is not None
        tokens, rows = proposal.array(logits.shape[-1]).astype(mx.int32), []
        for row, path in enumerate(proposal.paths()):
            seen = [self._history, tokens[mx.array(path)]] if path else [self._history]
            rows.append(self._apply(mx.concatenate(seen), logits[row : row + 1]))
        return mx.concatenate(rows)

    def _apply(self, history: mx.array, logits: mx.array) -> mx.array:
        for processor in self._processors:
            found = processor(history, logits)
            if not isinstance(found, mx.array) or found.shape != logits.shape:
                what = found.shape if isinstance(found, mx.array) else brief(found)
                raise SettingsError(
                    f"A logits processor must return logits of shape {logits.shape}, not {what}."
                )
            logits = found
        return logits

    def _drafter_scores(
        self, logits: mx.array, noise: mx.array | None, before: mx.array | None
    ) -> mx.array:
        """The drafter's `scores` [L, V], each row after the drafts of those before it."""
        logits = add_bias([self.settings.logit_bias] * len(logits), logits)
        drafts = mx.array([], mx.int32) if before is None else before.astype(mx.int32)
        drafted: Any = drafts.tolist() if self._constraints is not None else []
        if self.can_pipeline:
            return self.scores(logits)
        s, rows = self._sharpness.value, []
        only_constraints = self._history is None and not self._penalties.active
        if self._constraints is not None and only_constraints:
            return self._constraints.drafts(logits, noise, s, self.scores, drafted)
        for slot in range(len(logits)):
            history = self._penalties, drafts, [range(len(drafts))]
            row = penalize([history], logits[slot : slot + 1])
            if self._history is not None:
                row = self._apply(mx.concatenate([self._history, drafts]), row)
            if self._constraints is not None:
                row = self._constraints.restrict_row(row, drafted)
            row = self.scores(row)
            rows.append(row)
            token = (row if noise is None else row + noise[slot] / s).argmax(axis=-1)
            drafts = mx.concatenate([drafts, token.astype(mx.int32)])
            if self._constraints is not None:
                drafted += token.tolist()
        return mx.concatenate(rows)

    @property
    def _kept_noise(self) -> int:
        """How many of the next positions have their noise already."""
        end = 0 if self._noise is None else self._noise_start + len(self._noise)
        return max(0, end - self._position)

    def _noise_rows(self, rows: int, vocab_size: int) -> mx.array:
        """The noise [rows, V] of the next positions; rows that a step did not use are kept."""
        assert self.seed is not None
        passed, made = self._position - self._noise_start, self._kept_noise
        parts = [] if self._noise is None or not made else [self._noise[passed:]]
        if made < rows:
            keys = [self.noise_key(ahead) for ahead in range(made, rows)]
            parts.append(gumbel(keys, vocab_size))
        noise = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        self._noise, self._noise_start = noise, self._position
        return noise[:rows]


class Decision(NamedTuple):
    """One request's part in `decide_all`.

    Attributes:
        sampler, proposal, ahead: as in `Sampler.decide`.
        guard: entered around what runs for this request only, as its processors.
    """

    sampler: Sampler
    proposal: Proposal
    ahead: int = 0
    guard: AbstractContextManager[Any] = nullcontext()


def decide_all(decisions: Sequence[Decision], logits: mx.array) -> mx.array:
    """Choose the target's token after each row of many requests' proposals; see `Sampler.decide`.

    Rows of requests of one `Sampler.group` are chosen in one operation. If a guard suppresses an
    error, its rows' choices mean nothing.

    Args:
        decisions: of the requests, whose proposals have R rows together.
        logits: [R, V] after the rows.

    Returns the choices [R], integers.
    """
    groups: dict[Any, list[tuple[int, Decision]]] = {}
    first = 0
    for decision in decisions:
        groups.setdefault(decision.sampler.group, []).append((first, decision))
        first += len(decision.proposal)
    if len(groups) == 1:
        return _decide_group(decisions, logits)
    rows, parts = list[int](), list[mx.array]()
    for group in groups.values():
        own = [first + row for first, each in group for row in range(len(each.proposal))]
        parts.append(_decide_group([decision for _, decision in group], logits[mx.array(own)]))
        rows += own
    return mx.concatenate(parts)[mx.argsort(mx.array(rows))]


def _decide_group(decisions: Sequence[Decision], logits: mx.array) -> mx.array:
    """The choices [N] of requests of one group."""
    sampler = decisions[0].sampler
    edits, *_ = sampler.group
    scores = sampler.scores(_edited(decisions, logits) if edits else logits)
    if sampler.temperature > 0:
        scores = scores + _noise(decisions, logits.shape[-1])
        compared = [one.sampler._compared for one in decisions]
        # `commit` reads these, perhaps in another thread.
        compute([drafts for drafts in compared if drafts is not None], wait=False)
    choices = scores.argmax(axis=-1)
    if not edits:
        return choices
    # argmax would return token 0 if all are NaN or -inf; +inf and noise make NaN.
    none = mx.isnan(scores).any(axis=-1) | mx.isinf(scores.max(axis=-1))
    return mx.where(none, NO_CHOICE, choices.astype(mx.int32))


def _noise(decisions: Sequence[Decision], vocab_size: int) -> mx.array:
    """The noise [N, V] of all rows; in one operation if no drafter has made some of it."""
    if all(len(one.proposal) == 1 and one.sampler._kept_noise <= one.ahead for one in decisions):
        return gumbel([one.sampler.noise_key(one.ahead) for one in decisions], vocab_size)
    parts = []
    for sampler, proposal, ahead, _ in decisions:
        rows = sampler._noise_rows(ahead + max(proposal.depths) + 1, vocab_size)[ahead:]
        parts.append(rows if proposal.is_chain else rows[mx.array(proposal.depths)])
    return mx.concatenate(parts)


def _edited(decisions: Sequence[Decision], logits: mx.array) -> mx.array:
    """The logits [N, V] after biases, penalties, processors and constraints of each request."""
    samplers = [one.sampler for one in decisions for _ in range(len(one.proposal))]
    logits = add_bias([one.settings.logit_bias for one in samplers], logits)
    if all(one.can_pipeline for one in samplers):
        return logits
    drafts = [one.proposal.array(logits.shape[-1]).astype(mx.int32) for one in decisions]
    paths = [one.proposal.paths() for one in decisions]
    penalties = [one.sampler._penalties for one in decisions]
    logits = penalize(list(zip(penalties, drafts, paths, strict=True)), logits)
    if any(one._history is not None for one in samplers):
        edited, first = [], 0
        for one in decisions:
            rows = logits[first : first + len(one.proposal)]
            first += len(one.proposal)
            if one.sampler._history is not None:
                with one.guard:
                    rows = one.sampler._processed(one.proposal, rows)
            edited.append(rows)
        logits = mx.concatenate(edited)
    if any(one._constraints is not None for one in samplers):
        compute(logits, wait=False)
        masks: list[np.ndarray | None] = []
        for one, tokens, under in zip(decisions, drafts, paths, strict=True):
            own: list[np.ndarray | None] = [None] * len(under)
            if one.sampler._constraints is not None:
                with one.guard:
                    found = one.sampler._constraints.masks(tokens, under)
                    if any(mask is not None and mask.shape != logits.shape[1:] for mask in found):
                        raise SettingsError("A constraint must return masks of the vocabulary.")
                    own = found
            masks += own
        logits = masked(logits, masks)
    return logits


def check_choice(token: int) -> None:
    """Raise `SettingsError` if processors, penalties or a bias left no token to choose.

    After a rejected draft that is no error, so only accepted rows are checked.
    """
    if token == NO_CHOICE:
        raise SettingsError(
            "No token can be chosen: logits_processors, penalties or logit_bias leave NaN, an "
            "infinite number, or nothing but -inf in the logits."
        )

"""From logits to the token at each position, by one function that drafter and target share.

The token at absolute position i is argmax(log p + G(seed, i)): p is the processed distribution,
and G is Gumbel noise over the vocabulary that depends only on the seed and the position. That is a
sample of p, and a fixed function of the logits. So a seed's text is the same with and without a
drafter, and a draft is accepted if it equals the target's choice, as in greedy decoding. The
drafter uses the same noise, so it mostly drafts what the target will choose.

The settings and their order are mlx-lm's: what changes the logits (`edits`), top-p, min-p, top-k,
temperature. All rows of many requests are chosen at once. With penalties or processors, drafts are
chosen one after the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from .distributions import gumbel, keep_min_p, keep_top_k, keep_top_p
from .edits import LogitEdits, edit
from .errors import SettingsError
from .proposal import Proposal
from .settings import SEED_BITS, SETTINGS, RequestSettings

# Scores [L, V] of the next tokens, and the factor of the logits in them. A chain takes the best; a
# tree's probabilities are the softmax.
DraftScores = tuple[mx.array, float]

# Drafts are the best of scores + noise / DRAFT_SCALE. 1 is right for a drafter whose distribution
# is the target's; one that is less sure than it should be needs more (docs/experiments.md).
DRAFT_SCALE = 2.0

NO_CHOICE = -1  # in place of a token, if the logits leave none


class Sampler:
    """What chooses one request's tokens: the settings, the seed, and the text so far.

    Args:
        settings: how to choose; None is greedy.
        prompt: its token ids.

    Attributes:
        settings: as given.
        temperature: of the settings.
        seed: of the noise; None if greedy.
        edits: what changes the logits; None if nothing does.
        can_pipeline: whether a token can be chosen before the one before it is on the host.
        group: equal in requests whose rows `sample` chooses in one operation: whether anything
            edits the logits, and the truncation.
    """

    def __init__(self, settings: RequestSettings | None = None, prompt: Sequence[int] = ()) -> None:
        settings = settings or RequestSettings()
        self.settings = settings
        self.temperature = settings.temperature
        self.seed: int | None = None
        truncation: list[Any] = []
        if settings.temperature > 0:
            self.seed = secrets.randbits(SEED_BITS) if settings.seed is None else settings.seed
            samples = [name for name, described in SETTINGS.items() if described.samples]
            truncation = [getattr(settings, name) for name in samples if name != "seed"]
        self.edits = LogitEdits(settings, prompt) if settings.edits_logits else None
        self.can_pipeline = self.edits is None or not self.edits.read_text
        self.group = self.edits is not None, self.temperature, *truncation
        self._plain = self.edits is None and self.temperature == 0
        self._position = len(prompt)  # of the next token
        self._noise: mx.array | None = None  # [R, V], from position `_noise_start` on
        self._noise_start = 0

    def rows(
        self,
        proposal: Proposal,
        vocab_size: int,
        ahead: int = 0,
        guard: AbstractContextManager[Any] | None = None,
    ) -> SampledRows:
        """The rows of a proposal for `sample`.

        Args:
            proposal: N rows.
            vocab_size: of the logits after them.
            ahead: tokens before the proposal that are not committed yet (`can_pipeline`).
            guard: see `SampledRows`.
        """
        noise = None
        key = None
        if self.seed is not None:
            if len(proposal) == 1 and self._kept_noise <= ahead:
                key = self.noise_key(ahead)
            else:
                noise = self._noise_rows(ahead + max(proposal.depths) + 1, vocab_size)[ahead:]
                noise = noise if proposal.is_chain else noise[mx.array(proposal.depths)]
        guard = guard or nullcontext()
        return SampledRows(self.settings, self.group, proposal, noise, key, self.edits, guard)

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
        scores_of = partial(token_scores, self.settings)
        noise = None
        if self.temperature > 0:
            # One row more than drafts, because the target also chooses after the last one.
            first = 0 if before is None else len(before)
            noise = self._noise_rows(first + len(logits) + 1, logits.shape[-1])[first:-1]
            noise = noise / DRAFT_SCALE
        if self.edits is None:
            scores = scores_of(logits)
        else:
            scores = self.edits.draft_scores(logits, before, scores_of, noise)
        return (scores, 1.0) if noise is None else (scores + noise, 1 / self.temperature)

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, the next anchor last."""
        self._position += len(tokens)
        if self.edits is not None:
            self.edits.commit(tokens)

    @property
    def _kept_noise(self) -> int:
        """How many of the next positions have their noise already."""
        end = 0 if self._noise is None else self._noise_start + len(self._noise)
        return max(0, end - self._position)

    def _noise_rows(self, rows: int, vocab_size: int) -> mx.array:
        """The noise [rows, V] of the next positions; rows that a step did not use are kept."""
        assert self.seed is not None
        passed = self._position - self._noise_start
        made = self._kept_noise
        parts = [] if self._noise is None or not made else [self._noise[passed:]]
        if made < rows:
            keys = [self.noise_key(ahead) for ahead in range(made, rows)]
            parts.append(gumbel(keys, vocab_size))
        noise = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        self._noise = noise
        self._noise_start = self._position
        return noise[:rows]


class SampledRows(NamedTuple):
    """The rows of one request, and all that decides which token the target chooses after each.

    Attributes:
        settings: of the request.
        group: see `Sampler.group`.
        proposal: the N rows.
        noise: [N, V] of the tokens after them; None if greedy, or to be made of `noise_key`.
        noise_key: the seed and the position of a single row's noise.
        edits: what changes the logits; None if nothing does.
        guard: entered around what runs for this request only, as its processors.
    """

    settings: RequestSettings
    group: tuple[Any, ...]
    proposal: Proposal
    noise: mx.array | None
    noise_key: tuple[int, int] | None
    edits: LogitEdits | None
    guard: AbstractContextManager[Any]


def sample(requests: Sequence[SampledRows], logits: mx.array) -> mx.array:
    """Choose the target's token after each row of many requests' proposals.

    A pure function: it changes nothing of what it is given. Rows of requests of one
    `Sampler.group` are chosen in one operation. It is lazy, unless a processor is not. If a guard
    suppresses an error, its rows' choices mean nothing.

    Args:
        requests: whose proposals have R rows together.
        logits: [R, V] after the rows.

    Returns the choices [R], integers; `NO_CHOICE` where the edited logits leave no token.
    """
    groups: dict[Any, list[tuple[int, SampledRows]]] = {}
    first = 0
    for request in requests:
        groups.setdefault(request.group, []).append((first, request))
        first += len(request.proposal)
    if len(groups) == 1:
        return _sample_group(requests, logits)
    rows: list[int] = []
    parts: list[mx.array] = []
    for group in groups.values():
        places = [first + row for first, each in group for row in range(len(each.proposal))]
        parts.append(_sample_group([request for _, request in group], logits[mx.array(places)]))
        rows += places
    return mx.concatenate(parts)[mx.argsort(mx.array(rows))]


def _sample_group(requests: Sequence[SampledRows], logits: mx.array) -> mx.array:
    """The choices [N] of requests of one group."""
    settings = requests[0].settings
    edited = [
        (request.edits, request.proposal, request.guard)
        for request in requests
        if request.edits is not None
    ]
    scores = token_scores(settings, edit(edited, logits) if edited else logits)
    if settings.temperature > 0:
        scores = scores + _noise_of(requests, logits.shape[-1])
    choices = scores.argmax(axis=-1)
    if not edited:
        return choices
    # argmax would return token 0 if all are NaN or -inf; +inf and noise make NaN.
    none = mx.isnan(scores).any(axis=-1) | mx.isinf(scores.max(axis=-1))
    return mx.where(none, NO_CHOICE, choices.astype(mx.int32))


def _noise_of(requests: Sequence[SampledRows], vocab_size: int) -> mx.array:
    """The noise [N, V] of all rows; in one operation if no drafter has made some of it."""
    keys = [request.noise_key for request in requests if request.noise_key is not None]
    if len(keys) == len(requests):
        return gumbel(keys, vocab_size)
    parts = []
    for request in requests:
        noise = request.noise
        if noise is None:
            assert request.noise_key is not None
            noise = gumbel([request.noise_key], vocab_size)
        parts.append(noise)
    return mx.concatenate(parts)


def token_scores(settings: RequestSettings, logits: mx.array) -> mx.array:
    """The scores [N, V] of tokens, from edited logits [N, V].

    These are f32 log-probabilities up to a constant per row, which changes no choice. At
    temperature 0 they are the logits.
    """
    if settings.temperature == 0:
        return logits
    scores = logits.astype(mx.float32)
    if settings.top_p < 1:
        scores = keep_top_p(scores, settings.top_p)
    if settings.min_p > 0:
        scores = keep_min_p(scores, settings.min_p)
    if 0 < settings.top_k < scores.shape[-1]:
        scores = keep_top_k(scores, settings.top_k)
    # With the maximum at 0, a low temperature cannot overflow the best scores.
    return (scores - scores.max(axis=-1, keepdims=True)) / settings.temperature


def check_choice(token: int) -> None:
    """Raise `SettingsError` if processors, penalties or a bias left no token to choose.

    After a rejected draft that is no error, so only accepted rows are checked.
    """
    if token == NO_CHOICE:
        raise SettingsError(
            "No token can be chosen: logits_processors, penalties or logit_bias leave NaN, an "
            "infinite number, or nothing but -inf in the logits."
        )

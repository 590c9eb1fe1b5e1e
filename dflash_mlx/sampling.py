"""Samples the token at each position, with one function that drafter and target share.

The token at absolute position i is argmax(log p + G(seed, i)). p is the processed distribution, and
G is Gumbel noise over the vocabulary that depends only on the seed and the position. The result is
a sample of p, and a fixed function of the logits. So a seed gives the same text with and without a
drafter, and a draft is accepted if it equals the target's choice, as in greedy decoding. The
drafter uses the same noise, so it usually drafts what the target will choose.

The settings and their order are mlx-lm's: changes to the logits (`edits`), top-p, min-p, top-k,
temperature. The tokens of all rows of many requests are sampled at once. With penalties or
processors, drafts are sampled one after the other.
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

# Drafts are the best of scores + noise / DRAFT_SCALE. 1 is right for a drafter whose distribution
# equals the target's; a less confident drafter needs more (docs/experiments.md).
DRAFT_SCALE = 2.0

NO_CHOICE = -1  # stands for a token if the logits leave none


class Sampler:
    """Samples one request's tokens. It holds the settings, the seed, and the text so far.

    Args:
        settings: how to sample; None is greedy.
        prompt: the request's token ids.

    Attributes:
        settings: the settings.
        temperature: the temperature in the settings.
        seed: the seed of the noise; None if greedy.
        edits: the changes to the logits; None if there are none.
        can_pipeline: whether a token can be sampled before the previous one is on the host.
        group: `sample` samples the rows of requests with equal groups in one operation. The group
            says whether anything edits the logits, and how the distribution is truncated.
    """

    def __init__(self, settings: RequestSettings | None = None, prompt: Sequence[int] = ()) -> None:
        settings = settings or RequestSettings()
        self.settings = settings
        self.temperature = settings.temperature
        self.seed: int | None = None
        truncation: list[Any] = []
        if settings.temperature > 0:
            self.seed = secrets.randbits(SEED_BITS) if settings.seed is None else settings.seed
            sampling_names = [name for name, described in SETTINGS.items() if described.samples]
            truncation = [getattr(settings, name) for name in sampling_names if name != "seed"]
        self.edits = LogitEdits(settings, prompt) if settings.edits_logits else None
        self.can_pipeline = self.edits is None or not self.edits.read_text
        self.group = (self.edits is not None, self.temperature, *truncation)
        self._plain = self.edits is None and self.temperature == 0
        self._position = len(prompt)  # the position of the next token
        self._noise: mx.array | None = None  # [R, V], from position `_noise_start` on
        self._noise_start = 0

    def rows(
        self,
        proposal: Proposal,
        vocab_size: int,
        ahead: int = 0,
        guard: AbstractContextManager[Any] | None = None,
    ) -> SampledRows:
        """Describe the rows of a proposal for `sample`.

        Args:
            proposal: the N rows.
            vocab_size: the size of the vocabulary.
            ahead: how many tokens before the proposal are not committed yet (`can_pipeline`).
            guard: a context in which the request's processors and constraints run.
        """
        noise = None
        key = None
        if self.seed is not None:
            if len(proposal) == 1 and self._kept_noise <= ahead:
                key = self.noise_key(ahead)  # `sample` makes the noise of all such rows at once
            else:  # one row of noise for each depth
                noise = self._noise_rows(ahead + max(proposal.depths) + 1, vocab_size)[ahead:]
                noise = noise if proposal.is_chain else noise[mx.array(proposal.depths)]
        return SampledRows(
            settings=self.settings,
            group=self.group,
            proposal=proposal,
            noise=noise,
            noise_key=key,
            edits=self.edits,
            guard=guard or nullcontext(),
        )

    def noise_key(self, ahead: int) -> tuple[int, int]:
        """Return the key of a token's noise: the seed, and its position.

        `ahead` counts the tokens before it that are not committed yet.
        """
        assert self.seed is not None
        return self.seed, self._position + ahead

    def draft(self, logits: mx.array) -> mx.array:
        """Draft the next L tokens [L] from the drafter's logits [L, V]. The result is lazy."""
        scores, _ = self.draft_scores(logits)
        return scores.argmax(axis=-1)

    def draft_scores(
        self, logits: mx.array, before: mx.array | None = None
    ) -> tuple[mx.array, float]:
        """Return the scores of the next L tokens, from the drafter's logits [L, V].

        Also returns the factor by which logits count in the scores. A chain drafts the best scores;
        a tree takes their softmax as probabilities.

        A drafter that drafts token by token passes the tokens [k] it has drafted so far as
        `before`.
        """
        if self._plain:
            return logits, 1.0
        to_scores = partial(token_scores, self.settings)
        noise = None
        if self.temperature > 0:
            # Make one row more than there are drafts: the target also samples after the last draft.
            first = 0 if before is None else len(before)
            noise = self._noise_rows(first + len(logits) + 1, logits.shape[-1])[first:-1]
            noise = noise / DRAFT_SCALE
        if self.edits is None:
            scores = to_scores(logits)
        else:
            scores = self.edits.draft_scores(
                logits,
                before=before,
                to_scores=to_scores,
                noise=noise,
            )
        if noise is None:
            return scores, 1.0
        return scores + noise, 1 / self.temperature

    def commit(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text, the next anchor last."""
        self._position += len(tokens)
        if self.edits is not None:
            self.edits.commit(tokens)

    @property
    def _kept_noise(self) -> int:
        """How many of the next positions already have their noise."""
        end = 0 if self._noise is None else self._noise_start + len(self._noise)
        return max(0, end - self._position)

    def _noise_rows(self, rows: int, vocab_size: int) -> mx.array:
        """Return the noise [rows, V] of the next positions. Rows that no step used are kept."""
        assert self.seed is not None
        kept = self._kept_noise
        parts = []
        if self._noise is not None and kept:
            parts.append(self._noise[self._position - self._noise_start :])
        if kept < rows:
            keys = [self.noise_key(ahead) for ahead in range(kept, rows)]
            parts.append(gumbel(keys, vocab_size))
        noise = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        self._noise = noise
        self._noise_start = self._position
        return noise[:rows]


class SampledRows(NamedTuple):
    """The rows of one request, and everything that decides which tokens the target chooses.

    Attributes:
        settings: the request's settings.
        group: requests with equal groups are sampled in one operation (`Sampler.group`).
        proposal: the N rows.
        noise: [N, V] for the tokens after the rows; None if greedy, or if `noise_key` makes it.
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

    This is a pure function: it does not change its arguments. Rows of requests with equal groups
    are sampled in one operation. The result is lazy, unless a processor waits for the device. If a
    guard suppresses an error, the choices for its rows mean nothing.

    Args:
        requests: the requests, whose proposals have R rows in total.
        logits: [R, V], the logits after the rows.

    Returns the choices [R], integers; `NO_CHOICE` where the edited logits leave no token.
    """
    groups: dict[Any, list[SampledRows]] = {}
    rows_of_group: dict[Any, list[int]] = {}
    end = 0
    for request in requests:
        start = end
        end += len(request.proposal)
        groups.setdefault(request.group, []).append(request)
        rows_of_group.setdefault(request.group, []).extend(range(start, end))
    if len(groups) == 1:
        return _sample_group(requests, logits)
    order: list[int] = []
    choices: list[mx.array] = []
    for key, group in groups.items():
        rows = rows_of_group[key]
        choices.append(_sample_group(group, logits[mx.array(rows)]))
        order += rows
    return mx.concatenate(choices)[mx.argsort(mx.array(order))]


def _sample_group(requests: Sequence[SampledRows], logits: mx.array) -> mx.array:
    """Choose the tokens [N] after the rows of requests of one group."""
    settings = requests[0].settings
    edited = [
        (request.edits, request.proposal, request.guard)
        for request in requests
        if request.edits is not None
    ]
    scores = token_scores(settings, edit(edited, logits) if edited else logits)
    if settings.temperature > 0:
        scores = scores + _noise_of_rows(requests, logits.shape[-1])
    choices = scores.argmax(axis=-1)
    if not edited:
        return choices
    # argmax would return token 0 if all scores are NaN or -inf. Noise turns +inf into NaN.
    has_no_choice = mx.isnan(scores).any(axis=-1) | mx.isinf(scores.max(axis=-1))
    return mx.where(has_no_choice, NO_CHOICE, choices.astype(mx.int32))


def _noise_of_rows(requests: Sequence[SampledRows], vocab_size: int) -> mx.array:
    """Return the noise [N, V] of all rows, in one operation if no drafter made some of it."""
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
    """Turn edited logits [N, V] into the scores [N, V] of tokens.

    Scores are f32 log-probabilities, up to a constant per row that does not change the choice. At
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

    That is no error after a rejected draft, so only accepted rows are checked.
    """
    if token == NO_CHOICE:
        raise SettingsError(
            "No token can be chosen: logits_processors, penalties or logit_bias leave NaN, an "
            "infinite number, or nothing but -inf in the logits."
        )

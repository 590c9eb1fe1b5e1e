"""A smaller language model with the target's vocabulary as its drafter.

It reads the same tokens as the target and drafts one token after the other, so it needs no features
of the target. Its caches hold the text. The rows of drafted tokens leave them after each draft;
accepted tokens are read again, in the same forward as the next anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import mlx.core as mx

from ..errors import IncompatibleDrafterError
from ..kernels.shapes import weight_bytes
from ..sampling import Sampler
from ..targets.caches import Arrays, Checkpoint
from ..targets.session import longest_step
from .candidates import DraftScores
from .network_session import NetworkDrafter, NetworkSession
from .stepwise import BLOCK_SIZE, draft_chain

if TYPE_CHECKING:
    from ..targets import Target

# At least this share of the target's tokens must have the same id in the draft model.
MIN_SHARED_TOKENS = 0.99


class DraftModel(NetworkDrafter):
    """Drafts with any model that mlx-lm loads.

    Args:
        model: the draft model, as `load_target` returns it.

    Attributes:
        model: the draft model.
    """

    tap_layers = ()
    block_size = BLOCK_SIZE
    label = "draft model"

    def __init__(self, model: Target) -> None:
        self.model = model
        self._fits: WeakSet[Target] = WeakSet()  # targets whose tokens were compared

    def slot_cost(self, target: Target) -> float:
        """What a drafted token is likely to cost, in plain steps of the target."""
        return weight_bytes(self.model.model) / weight_bytes(target.model)

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless both models have the same tokens.

        A target's tokens, which may be hundreds of thousands, are compared once.
        """
        if target in self._fits:
            return
        draft_ids = _vocabulary(self.model)
        target_ids = _vocabulary(target)
        same = sum(draft_ids.get(token) == number for token, number in target_ids.items())
        if same < MIN_SHARED_TOKENS * len(target_ids):
            raise IncompatibleDrafterError(
                f"{self.model.name} cannot draft for {target.name}: {same:,} of "
                f"{len(target_ids):,} tokens have the same number in both. A draft model "
                "needs the target's tokenizer: use a smaller model of the same family."
            )
        self._fits.add(target)

    def start(self, target: Target, sampler: Sampler | None = None) -> ModelSession:
        """Begin one request over `target`; without a sampler it drafts greedily.

        Raises `IncompatibleDrafterError`.
        """
        self.check_fits(target)
        return ModelSession(self, target.vocab_size, sampler or Sampler())


class ModelSession(NetworkSession):
    """Drafts chains and trees for one request with a draft model.

    The caches hold the text, and after a draft also its anchor, which is committed next.

    Args:
        drafter: the drafter that the session belongs to.
        vocab_size: the vocabulary size of the target.
        sampler: the sampler of the request.

    Attributes:
        position: how many tokens are committed.
    """

    def __init__(self, drafter: DraftModel, vocab_size: int, sampler: Sampler) -> None:
        self.drafter = drafter
        self.sampler = sampler
        self._session = drafter.model.start()
        self._draft_vocab_size = drafter.model.vocab_size
        self._vocab_size = vocab_size
        self._pending: list[int] = []  # committed tokens that the caches do not hold
        self._forwards = 0  # how many forwards of the target committed them

    @property
    def pending_features(self) -> int:  # type: ignore[override]
        """How many tokens the next draft reads first."""
        return len(self._pending)

    @property
    def can_trim(self) -> bool:  # type: ignore[override]
        """Whether the model's caches can go back to any position."""
        return self._session.can_trim

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Add newly committed tokens, except those that the caches hold. `taps` has no features."""
        self._make_room(self._forwards, len(self._pending) + len(tokens))
        already_cached = max(0, self._session.position - self.position)  # the last draft's anchor
        self._pending += tokens[already_cached:]
        self._forwards += 1
        self.position += len(tokens)

    def draft(self, anchor: int, width: int) -> DraftScores:
        """Score the slots of a draft of at most `width` rows, one forward per slot."""
        session = self._session
        rewind_to = session.checkpoint()
        behind_anchor: Checkpoint | None = None

        def logits(token: mx.array | None) -> mx.array:
            """The logits [1, V] after a drafted token; after the anchor for None."""
            nonlocal behind_anchor
            tokens = mx.array([*self._pending, anchor]) if token is None else token
            token_logits = self._logits(tokens)
            behind_anchor = behind_anchor or session.checkpoint()
            return token_logits

        try:
            slots = min(width, BLOCK_SIZE) - 1
            draft = draft_chain(self.sampler, anchor, slots=slots, logits_after=logits)
            rewind_to = behind_anchor or rewind_to
            self._pending = []
            self._forwards = 0
        finally:  # a processor may fail
            session.rewind(rewind_to)
        session.start_computing()
        return draft

    def _logits(self, tokens: mx.array) -> mx.array:
        """The logits [1, V] after tokens [S], for the target's vocabulary."""
        logits, _ = self._session.read_lazily(mx.minimum(tokens, self._draft_vocab_size - 1))
        missing = self._vocab_size - self._draft_vocab_size
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)

    def _read_pending(self) -> None:
        step = longest_step()
        for start in range(0, len(self._pending), step):
            self._session.read(self._pending[start : start + step], last=False)
        self._pending = []
        self._forwards = 0

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        cached = self._session.position
        self._pending = self._pending[: max(0, position - cached)]
        self._session.trim_to(min(position, cached))
        self.position = position

    def checkpoint(self) -> tuple[Checkpoint, int, list[int]]:
        """The current state; nothing is copied."""
        return self._session.checkpoint(), self.position, list(self._pending)

    def rewind(self, checkpoint: tuple[Checkpoint, int, list[int]]) -> None:
        """Go back to a checkpoint."""
        session_checkpoint, self.position, pending = checkpoint
        self._session.rewind(session_checkpoint)
        self._pending = list(pending)

    def rows(self, start: int, end: int) -> Arrays:
        """The model's keys and values of the tokens from `start` to `end`."""
        self._read_pending()
        return self._session.rows(start, end)

    def state(self) -> Arrays:
        """The model's windows and recurrent states."""
        self._read_pending()
        return self._session.state()

    def dry_run(self, taps: mx.array) -> None:
        """Extend the session without computing anything: only shapes count."""
        self._session.dry_run(taps.shape[1])

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Start with `position` tokens from stored rows and state, as in `SupportsSharing`."""
        self._session.restore(position, rows=rows, state=state, room=room)
        self.position = position


def _vocabulary(model: Target) -> dict[str, int]:
    """The tokens of a model's tokenizer with their ids; the ids alone if it does not list them."""
    get_vocab: Callable[[], dict[str, int]] | None = getattr(model.tokenizer, "get_vocab", None)
    if get_vocab is None:
        return {str(token_id): token_id for token_id in range(model.vocab_size)}
    return get_vocab()

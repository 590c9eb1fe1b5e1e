"""The caches that one request leaves for the next: a chat reads only its new tokens.

The next prompt mostly begins with the tokens in the caches. Where it diverges (an undone turn, a
template that drops old reasoning) the caches are trimmed to that token. Sliding windows and
recurrent states cannot be trimmed; they go back to the last checkpoint before it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from .drafter.protocol import Drafter, DraftSession, SupportsResume, check_pair, start_session
from .errors import SettingsError
from .prefix.blocks import BlockKeys
from .prefix.cache import PrefixCache
from .sampling import Sampler
from .targets import Target, TargetSession
from .targets.caches import check_kv_bits
from .targets.session import LAST_STEP, PREFILL_STEP, PromptEnd
from .validation import brief, check_type

MAX_PENDING = 2 * PREFILL_STEP  # tokens whose features may wait until after the first token
MAX_CHECKPOINTS = 8  # each keeps the windows and states of target and drafter


class SupportsEnded(Protocol):
    """The request that uses a conversation."""

    ended: bool


class PairCheckpoint(NamedTuple):
    """The states of both sessions after the same tokens; `drafter` is None if it can trim."""

    target: Any
    drafter: Any


class Conversation:
    """The caches of a pair, for one request after another.

    Pass it to `stream_generate` with every turn's whole prompt, from any thread, but to one request
    at a time: the last one must have ended, or been closed or garbage collected. A drafter of your
    own is resumed if its sessions are a `SupportsResume` (`drafter.protocol`). Otherwise every
    request reads its whole prompt. Its methods are the loop's.

    Args:
        target, drafter, kv_bits: as in `stream_generate`, for all turns.
        prefix: a prefix cache of the pair. A request that cannot continue these caches starts from
            it, and its tokens are added to it.
        salt: only conversations with the same salt share its entries.

    Raises `SettingsError` for a prefix cache of another pair, or an argument of a wrong type.

    Attributes:
        target, kv_bits, prefix: as given.
        ids: the tokens in the caches.
        target_session: the target's session of the last request.
        draft_session: the drafter's session.
    """

    target_session: TargetSession
    draft_session: DraftSession
    _keys: BlockKeys  # of `ids`, where there is a prefix cache

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        kv_bits: int | None = None,
        *,
        prefix: PrefixCache | None = None,
        salt: str = "",
    ) -> None:
        check_pair(target, drafter)
        check_type("prefix", prefix, PrefixCache, "dm.PrefixStore(target, drafter, memory=...)")
        check_kv_bits(kv_bits)
        if not isinstance(salt, str):
            raise SettingsError(f"salt must be text, not {brief(salt)}.")
        if prefix is not None:
            prefix.check(target, drafter)
        self.target, self._drafter, self.kv_bits = target, drafter, kv_bits
        self.prefix, self._salt = prefix, salt
        self._branches: Sequence[int] = ()
        self._checkpoints: list[PairCheckpoint] = []  # by position
        self._started = False
        self._prompt: Sequence[int] = ()
        # Features of the prompt that the drafter does not have yet, each with the target's
        # checkpoint after them or None. They may be lazy arrays of this thread.
        self._pending: list[tuple[mx.array, Any]] = []
        self._prefill_thread = 0
        self._flushed = True
        self._opening = threading.Lock()
        self._request: weakref.ref[SupportsEnded] | None = None  # the last one
        self.ids: list[int] = []

    def check(self, target: Target, drafter: Drafter | None, kv_bits: int | None) -> None:
        """Raise `SettingsError` unless the conversation was made for these."""
        if self.target is not target or self._drafter is not drafter:
            what = "target" if self.target is not target else "drafter"
            raise SettingsError(f"The conversation is of another {what}: begin a new one.")
        if self.kv_bits != kv_bits:
            raise SettingsError(
                f"The conversation is of kv_bits={self.kv_bits}: say so in every turn, or begin a "
                "new one."
            )

    def open(self, request: SupportsEnded) -> None:
        """Reserve the caches for a request. Raises `SettingsError` while another uses them."""
        with self._opening:
            last = None if self._request is None else self._request()
            if last is not None and not last.ended:
                raise SettingsError(
                    "The conversation has a request that has not ended: read it to its end or "
                    "close it first, or give each its own Conversation."
                )
            self._request = weakref.ref(request)

    # What follows is for the request that uses the conversation.

    def drop_caches(self) -> None:
        """Drop the caches; `resume` and `prefill` rebuild them."""
        if self._started:
            self.target_session.intact = False  # a slot's rows need not be copied
            self.target_session.leave_slot()
            del self.target_session, self.draft_session
        self._started, self._checkpoints, self.ids = False, [], []
        self._pending, self._flushed = [], True

    def resume(self, prompt: Sequence[int], sampler: Sampler, branches: Sequence[int] = ()) -> int:
        """Get the caches ready for a prompt; returns how many of its tokens they hold.

        The last token is never among them, because the logits after it are needed.

        Args:
            prompt: token ids.
            sampler: of the request.
            branches: positions where other prompts are likely to diverge, for the prefix cache.
        """
        self._branches = branches
        shared, most = 0, min(len(self.ids), len(prompt) - 1)
        while shared < most and self.ids[shared] == prompt[shared]:
            shared += 1
        # Both sessions must hold exactly `ids`: no forward failed or was left out.
        session = self.draft_session if self._started else None
        if (
            isinstance(session, SupportsResume)
            and self.target_session.intact
            and self.target_session.position == session.position == len(self.ids)
            and self._go_back(session, shared)
            and (self.ids or self.prefix is None)
        ):
            session.resume(sampler)
            if session.lookup is not None:
                session.lookup.trim_to(len(self.ids))
            return len(self.ids)
        target, drafter, kv_bits = self.target, self._drafter, self.kv_bits
        if self.prefix is None:
            self.target_session = target.start(
                () if drafter is None else drafter.tap_layers, kv_bits
            )
            self.draft_session, held = start_session(drafter, target, sampler), 0
        else:
            opened = self.prefix.open(prompt, sampler, kv_bits, self._salt)
            self.target_session, self.draft_session, held = opened
            self._keys = self.prefix.keys(kv_bits, self._salt)
        self._started, self._checkpoints, self.ids = True, [], list(prompt[:held])
        self._pending, self._flushed = [], True
        return held

    def prefill(
        self, prompt: Sequence[int], chunk: Callable[[], int]
    ) -> Iterator[mx.array | PromptEnd | None]:
        """Read the rest of the prompt, at most one forward per iteration.

        Yields None after a forward, a `PromptEnd` before the last one, which is left out if that
        has a result then, and the logits [1, V] after it. The drafter gets most features
        later, with `flush_features`, so that the first token need not wait for it. A prefix cache
        gets tokens as soon as both models have read them.

        A checkpoint is made where the last forward begins: a prompt that differs only at its end
        can then go back to it.

        Args:
            prompt: token ids.
            chunk: returns the most tokens of the next forward.
        """
        stops: list[int] = []
        if self.prefix is not None:
            sessions = self.target_session, self.draft_session
            stops = self.prefix.checkpoint_positions(*sessions, prompt, self._branches, self._salt)
        self._prompt, self._prefill_thread, self._flushed = prompt, threading.get_ident(), False
        session = self.target_session
        for tokens, last in session.pieces(prompt[len(self.ids) :], stops, chunk):
            end = PromptEnd(session, tokens)
            if last:
                yield end
            logits, taps = end.result or session.read(tokens, last)
            last_begins = self.target_session.position == len(prompt) - LAST_STEP
            self._pending.append((taps, self.target_session.checkpoint() if last_begins else None))
            if logits is None:
                rows = sum(taps.shape[1] for taps, _ in self._pending)
                if self.prefix is not None or rows > MAX_PENDING:
                    self._extend_pending()
                self.store(checkpoint=len(self.ids) in stops)
            yield logits
        if threading.current_thread() is not threading.main_thread():
            self.flush_features()  # the next event may be read by another thread of a pool

    def flush_features(self) -> bool:
        """Give the drafter all pending features; before a step, and at the end of a request.

        Returns False if that is impossible: the features are lazy arrays of another thread. The
        caches must be dropped then.
        """
        if self._pending and threading.get_ident() != self._prefill_thread:
            return False
        if not self._flushed:
            self._extend_pending()
            self.store(checkpoint=False)
            self._flushed = True
        return True

    def store(self, checkpoint: bool = True) -> None:
        """Add the caches to the prefix cache, if there is one; at the end with a checkpoint."""
        if self.prefix is not None:
            sessions = self.target_session, self.draft_session
            self.prefix.insert(*sessions, self._keys, self.ids, checkpoint)

    def leave_batch(self) -> None:
        """Take the target's caches out of a batch, after which any thread may use them."""
        if self._started:
            self.target_session.leave_slot()

    def feed_drafter(self, tokens: Sequence[int], taps: mx.array, kept: Sequence[int]) -> None:
        """Give the drafter tokens that the target has just committed.

        Args:
            tokens: S token ids.
            taps: the features [1, N, K*D] of a forward, being computed.
            kept: the rows of the S tokens in it, rising.
        """
        if self.draft_session.lookup is not None:
            self.draft_session.lookup.read(tokens)
        self.draft_session.extend(taps, kept, tokens)
        self.ids += tokens

    def _extend_pending(self) -> None:
        pending, self._pending = self._pending, []
        for taps, target_checkpoint in pending:
            mx.async_eval(taps)  # the drafter may use them in another thread
            rows = range(taps.shape[1])
            self.feed_drafter(self._prompt[len(self.ids) :][: len(rows)], taps, rows)
            if target_checkpoint is not None:
                self._add_checkpoint(target_checkpoint)

    def _go_back(self, drafter: SupportsResume, shared: int) -> bool:
        """Forget the tokens after the first `shared`; whether that is possible."""
        if shared == len(self.ids):
            if self.ids:
                self._add_checkpoint(self.target_session.checkpoint())
            return True
        if self.target_session.can_trim and drafter.can_trim:
            self.target_session.trim_to(shared)
            drafter.trim_to(shared)
        else:
            earlier = [one for one in self._checkpoints if one.target.position <= shared]
            self._checkpoints = earlier
            if not earlier:
                return False
            self.target_session.rewind(earlier[-1].target)
            if earlier[-1].drafter is None:
                drafter.trim_to(self.target_session.position)
            else:
                drafter.rewind(earlier[-1].drafter)
        del self.ids[self.target_session.position :]
        if self.prefix is not None:
            self._keys.cut(len(self.ids))
        return True

    def _add_checkpoint(self, target_checkpoint: Any) -> None:
        """Add a checkpoint of both, unless both can trim."""
        drafter = self.draft_session
        if not isinstance(drafter, SupportsResume):
            return
        if not (self.target_session.can_trim and drafter.can_trim):
            own = None if drafter.can_trim else drafter.checkpoint()
            added = [*self._checkpoints, PairCheckpoint(target_checkpoint, own)]
            self._checkpoints = added[-MAX_CHECKPOINTS:]

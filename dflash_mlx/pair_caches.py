"""A request's caches: the sessions of target and drafter, which hold the same tokens.

A prompt is read into them in pieces, and each step adds the rows that were kept. Where the next
prompt diverges from the tokens in them (an undone turn, a template that drops old reasoning) they
are trimmed to that token. Sliding windows and recurrent states cannot be trimmed; they go back to
the last checkpoint before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .drafter.protocol import Drafter, DraftSession, SupportsResume, start_session
from .prefix.entries import BlockKeys
from .prefix.store import PrefixStore
from .proposal import Proposal
from .sampling import Sampler
from .targets import Target, TargetSession
from .targets.session import LAST_STEP, PREFILL_STEP
from .targets.span import Span

MAX_CHECKPOINTS = 8  # each keeps the windows and states of target and drafter


class PairCheckpoint(NamedTuple):
    """The states of both sessions after the same tokens; `drafter` is None if it can trim."""

    target: Any
    drafter: Any


class Caches:
    """The caches of a pair: a request owns them, or borrows those of a `Conversation`.

    Args:
        target, drafter, kv_bits: as in `stream_generate`.
        prefix: a prefix cache of the pair. Caches that cannot go on with a prompt start from it,
            and their tokens are added to it.
        salt: only caches with the same salt share its entries.
        kept: whether they go on after their request, as a conversation's do.

    Raises `SettingsError` for a prefix cache of another pair; its callers have checked the types.

    Attributes:
        target, drafter, kv_bits, prefix: as given.
        ids: the tokens that both sessions hold.
        target_session: the target's session, from `resume` to `drop`.
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
        prefix: PrefixStore | None = None,
        salt: str = "",
        kept: bool = False,
    ) -> None:
        if prefix is not None:
            prefix.check(target, drafter)
        self.target = target
        self.drafter = drafter
        self.kv_bits = kv_bits
        self.prefix = prefix
        self._salt = salt
        self._kept = kept
        self._started = False
        self._forget()

    def _forget(self) -> None:
        """Begin without a token."""
        self.ids: list[int] = []
        self._prompt: Sequence[int] = ()
        self._stops: Sequence[int] = ()  # where reading the prompt pauses for a checkpoint
        self._checkpoints: list[PairCheckpoint] = []  # by position
        self._before_end: Any = None  # the target's checkpoint before the prompt's last forward

    def drop(self) -> None:
        """Drop the caches; `resume` and reading the prompt again rebuild them."""
        if self._started:
            self.target_session.intact = False  # a slot's rows need not be copied
            self.target_session.leave_slot()
            del self.target_session, self.draft_session
            self._started = False
        self._forget()

    def resume(self, prompt: Sequence[int], sampler: Sampler, branches: Sequence[int] = ()) -> int:
        """Get the caches ready for a prompt; returns how many of its tokens they hold.

        The last token is never among them, because the logits after it are needed.

        Args:
            prompt: token ids.
            sampler: of the request.
            branches: positions where other prompts are likely to diverge, for the prefix cache.
        """
        if not self._continues(prompt, sampler):
            self._start(prompt, sampler)
        self._prompt = prompt
        self._before_end = None  # of a prompt that was not read to its end
        if self.prefix is not None:
            self._stops = self.prefix.checkpoint_positions(
                self.target_session, self.draft_session, prompt, branches, self._salt
            )
        return len(self.ids)

    def _continues(self, prompt: Sequence[int], sampler: Sampler) -> bool:
        """Whether both sessions go on with a prompt, for which they may go back to its tokens."""
        shared = 0
        most = min(len(self.ids), len(prompt) - 1)
        while shared < most and self.ids[shared] == prompt[shared]:
            shared += 1
        # Both sessions must hold exactly `ids`: no forward failed or was left out.
        session = self.draft_session if self._started else None
        if (
            not isinstance(session, SupportsResume)
            or not self.target_session.intact
            or not self.target_session.position == session.position == len(self.ids)
            or not self._go_back(session, shared)
            or not (self.ids or self.prefix is None)
        ):
            return False
        session.resume(sampler)
        if session.lookup is not None:
            session.lookup.trim_to(len(self.ids))
        return True

    def _start(self, prompt: Sequence[int], sampler: Sampler) -> None:
        """New sessions, with what the prefix cache has of a prompt."""
        self._forget()
        if self.prefix is None:
            taps = () if self.drafter is None else self.drafter.tap_layers
            self.target_session = self.target.start(taps, self.kv_bits)
            self.draft_session = start_session(self.drafter, self.target, sampler)
        else:
            opened = self.prefix.open(prompt, sampler, self.kv_bits, self._salt)
            self.target_session, self.draft_session, held = opened
            self._keys = self.prefix.keys(self.kv_bits, self._salt)
            self.ids = list(prompt[:held])
        self._started = True

    def next_chunk(self, most: int = PREFILL_STEP) -> Span | None:
        """The next tokens of the prompt to read, at most so many; None at its end."""
        session = self.target_session
        prompt = self._prompt
        if session.position == len(prompt):
            return None
        end = session.chunk_end(len(prompt), self._stops, most)
        tokens = Proposal(prompt[session.position : end])
        return Span(session, tokens, ends_prompt=end == len(prompt))

    def keep_prompt(self, piece: Span, taps: mx.array) -> None:
        """Give the drafter a piece of the prompt that the target has read.

        A prefix cache gets its tokens, too, unless it is the last. A checkpoint is made where the
        last forward begins: a prompt that differs only at its end can then go back to it. Nothing
        waits for the device.

        Args:
            piece: from `next_chunk`.
            taps: its features [1, S, K*D], which may still be lazy.
        """
        if piece.ends_prompt and self._before_end is not None:
            self._add_checkpoint(self._before_end)
            self._before_end = None
        tokens: Any = piece.proposal.tokens
        self.feed_drafter(tokens, taps, range(taps.shape[1]))
        if len(self.ids) == len(self._prompt) - LAST_STEP:
            self._before_end = self.target_session.checkpoint()
        if piece.ends_prompt:
            self.draft_session.start_computing()  # another thread may take the next step
        else:
            self.store(checkpoint=len(self.ids) in self._stops)

    def finish_prompt(self) -> None:
        """What need not delay the first token: the drafter catches up, the prefix cache stores."""
        self.draft_session.catch_up()
        self.store(checkpoint=False)

    def store(self, checkpoint: bool = True) -> None:
        """Add the caches to the prefix cache, if there is one; at the end with a checkpoint."""
        if self.prefix is not None and self._started:
            sessions = self.target_session, self.draft_session
            self.prefix.insert(*sessions, self._keys, self.ids, checkpoint)

    def end_request(self) -> None:
        """Leave a batch's slots. Caches that are kept can go on in any thread then."""
        if not self._kept:
            self.drop()
        elif self._started:
            self.target_session.leave_slot()

    def feed_drafter(self, tokens: Sequence[int], taps: mx.array, kept: Sequence[int]) -> None:
        """Give the drafter tokens that the target has just committed.

        Args:
            tokens: S token ids.
            taps: the features [1, R, K*D] of a forward, being computed.
            kept: the rows of the S tokens in it, rising.
        """
        if self.draft_session.lookup is not None:
            self.draft_session.lookup.read(tokens)
        self.draft_session.extend(taps, kept, tokens)
        self.ids += tokens

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
            earlier = [pair for pair in self._checkpoints if pair.target.position <= shared]
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
            draft_checkpoint = None if drafter.can_trim else drafter.checkpoint()
            added = [*self._checkpoints, PairCheckpoint(target_checkpoint, draft_checkpoint)]
            self._checkpoints = added[-MAX_CHECKPOINTS:]

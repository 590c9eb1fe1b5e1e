"""A request's caches: the sessions of target and drafter, which hold the same tokens.

A prompt is read into them in chunks, and each step adds the accepted rows. If the next prompt
diverges from the tokens that they hold (an undone turn, a template that drops old reasoning), they
are trimmed to the last common token. Sliding windows and recurrent states cannot be trimmed; they
go back to the last checkpoint before that token.
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

# Caches keep the newest checkpoints only: each holds the windows and states of target and drafter.
MAX_CHECKPOINTS = 8


class PairCheckpoint(NamedTuple):
    """The states of both sessions after the same tokens; `drafter` is None if it can trim."""

    target: Any
    drafter: Any


class Caches:
    """The caches of a pair: a request owns them, or borrows those of a `Conversation`.

    Args:
        target, drafter, kv_bits: as in `stream_generate`.
        prefix: a prefix cache of the pair. Caches that cannot continue with a prompt start from it,
            and their tokens are added to it.
        salt: only caches with the same salt share its entries.
        kept: whether the caches outlive their request, as those of a conversation do.

    Raises `SettingsError` for a prefix cache of another pair. Callers check the types.

    Attributes:
        target, drafter, kv_bits, prefix: the arguments.
        ids: the tokens that both sessions hold.
        target_session: the target's session, from `resume` to `drop`.
        draft_session: the drafter's session.
    """

    target_session: TargetSession
    draft_session: DraftSession
    _keys: BlockKeys  # the keys of `ids`; set if there is a prefix cache

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
        """Forget all tokens."""
        self.ids: list[int] = []
        self._prompt: Sequence[int] = ()
        self._stops: Sequence[int] = ()  # positions at which a checkpoint is stored
        self._checkpoints: list[PairCheckpoint] = []  # by position
        self._before_end: Any = None  # the target's checkpoint before the prompt's last forward

    def drop(self) -> None:
        """Drop the caches. To rebuild them, call `resume` and read the prompt again."""
        if self._started:
            self.target_session.intact = False  # so the slot's rows are not copied
            self.target_session.leave_slot()
            del self.target_session, self.draft_session
            self._started = False
        self._forget()

    def resume(self, prompt: Sequence[int], sampler: Sampler, branches: Sequence[int] = ()) -> int:
        """Prepare the caches for a prompt, and return how many of its tokens they hold.

        They never hold the last token, because the logits after it are needed.

        Args:
            prompt: token ids.
            sampler: the sampler of the request.
            branches: positions where other prompts are likely to diverge, for the prefix cache.
        """
        if not self._continues(prompt, sampler):
            self._start(prompt, sampler)
        self._prompt = prompt
        self._before_end = None  # the last prompt may not have been read to its end
        if self.prefix is not None:
            self._stops = self.prefix.checkpoint_positions(
                self.target_session,
                self.draft_session,
                prompt=prompt,
                ends=branches,
                salt=self._salt,
            )
        return len(self.ids)

    def _continues(self, prompt: Sequence[int], sampler: Sampler) -> bool:
        """Go back to the tokens that a prompt shares. Returns whether both sessions can do so."""
        shared = 0
        max_shared = min(len(self.ids), len(prompt) - 1)
        while shared < max_shared and self.ids[shared] == prompt[shared]:
            shared += 1
        # Both sessions must hold exactly `ids`. They do not if a forward failed or was skipped.
        session = self.draft_session if self._started else None
        if not isinstance(session, SupportsResume) or not self.target_session.intact:
            return False
        if not self.target_session.position == session.position == len(self.ids):
            return False
        if not self._go_back(session, shared):
            return False
        if self.prefix is not None and not self.ids:
            return False  # the prefix cache may hold more
        session.resume(sampler)
        if session.lookup is not None:
            session.lookup.trim_to(len(self.ids))
        return True

    def _start(self, prompt: Sequence[int], sampler: Sampler) -> None:
        """Start new sessions, with the tokens of a prompt that the prefix cache holds."""
        self._forget()
        if self.prefix is None:
            taps = () if self.drafter is None else self.drafter.tap_layers
            self.target_session = self.target.start(taps, self.kv_bits)
            self.draft_session = start_session(self.drafter, self.target, sampler)
        else:
            opened = self.prefix.open(
                prompt, sampler=sampler, kv_bits=self.kv_bits, salt=self._salt
            )
            self.target_session, self.draft_session, cached = opened
            self._keys = self.prefix.keys(self.kv_bits, self._salt)
            self.ids = list(prompt[:cached])
        self._started = True

    def next_chunk(self, most: int = PREFILL_STEP) -> Span | None:
        """The next chunk of the prompt, of at most `most` tokens; None at its end."""
        session = self.target_session
        prompt = self._prompt
        if session.position == len(prompt):
            return None
        end = session.chunk_end(len(prompt), self._stops, most)
        tokens = Proposal(prompt[session.position : end])
        return Span(session, tokens, ends_prompt=end == len(prompt))

    def keep_prompt(self, chunk: Span, taps: mx.array) -> None:
        """Give the drafter a chunk of the prompt that the target has read.

        The prefix cache also gets its tokens, unless it is the last chunk. A checkpoint is made
        where the last forward begins, so that a prompt that differs only at its end can go back to
        it. This does not wait for the device.

        Args:
            chunk: from `next_chunk`.
            taps: its features [1, S, K*D], which may still be lazy.
        """
        if chunk.ends_prompt and self._before_end is not None:
            self._add_checkpoint(self._before_end)
            self._before_end = None
        tokens: Any = chunk.proposal.tokens
        self.feed_drafter(tokens, taps, range(taps.shape[1]))
        if len(self.ids) == len(self._prompt) - LAST_STEP:
            self._before_end = self.target_session.checkpoint()
        if chunk.ends_prompt:
            self.draft_session.start_computing()  # another thread may take the next step
        else:
            self.store(checkpoint=len(self.ids) in self._stops)

    def finish_prompt(self) -> None:
        """Do the work that need not delay the first token.

        The drafter reads its features, and the prefix cache stores the prompt.
        """
        self.draft_session.catch_up()
        self.store(checkpoint=False)

    def store(self, checkpoint: bool = True) -> None:
        """Add the tokens to the prefix cache, if there is one.

        `checkpoint` says whether to store the windows and states at the end as well.
        """
        if self.prefix is not None and self._started:
            self.prefix.insert(
                self.target_session,
                self.draft_session,
                keys=self._keys,
                ids=self.ids,
                checkpoint=checkpoint,
            )

    def end_request(self) -> None:
        """Leave the slots of a batch. Any thread can then continue with caches that are kept."""
        if not self._kept:
            self.drop()
        elif self._started:
            self.target_session.leave_slot()

    def feed_drafter(self, tokens: Sequence[int], taps: mx.array, kept: Sequence[int]) -> None:
        """Give the drafter tokens that the target has just committed.

        Args:
            tokens: S token ids.
            taps: the features [1, R, K*D] of a forward that is being computed.
            kept: the rows of the S tokens in this forward, in rising order.
        """
        if self.draft_session.lookup is not None:
            self.draft_session.lookup.read(tokens)
        self.draft_session.extend(taps, kept, tokens)
        self.ids += tokens

    def _go_back(self, drafter: SupportsResume, shared: int) -> bool:
        """Forget the tokens after the first `shared` ones. Returns whether that is possible."""
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
        """Add a checkpoint of both sessions, unless both can trim."""
        drafter = self.draft_session
        if not isinstance(drafter, SupportsResume):
            return
        if not (self.target_session.can_trim and drafter.can_trim):
            draft_checkpoint = None if drafter.can_trim else drafter.checkpoint()
            added = [*self._checkpoints, PairCheckpoint(target_checkpoint, draft_checkpoint)]
            self._checkpoints = added[-MAX_CHECKPOINTS:]

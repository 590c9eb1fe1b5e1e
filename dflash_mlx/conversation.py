"""What one request leaves for the next: the caches of a chat stay, and only new tokens are read.

The next prompt mostly begins with what the caches hold. Where it parts from them (an undone turn,
a template that drops old thinking) they go back to that token or, when a sliding window or a
recurrent state cannot be cut there, to the last mark before it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Protocol

import mlx.core as mx

from .drafter.protocol import Drafter, DraftSession, check_pair, start_session
from .errors import SettingsError
from .prefix.cache import PrefixCache
from .sampling import Sampler
from .targets import Target, TargetSession
from .targets.caches import check_kv_bits
from .targets.target import LAST_STEP, PREFILL_STEP
from .validation import brief, check_type

MOST_HELD = 2 * PREFILL_STEP  # tokens whose features wait for the first token, but in a store
MOST_MARKS = 8  # each holds the windows and the states of the target and the drafter


class Holder(Protocol):
    """What a conversation belongs to, as a request."""

    ended: bool


class Conversation:
    """The caches of a pair, for one request after another.

    Hand it to `stream_generate` with every turn's whole prompt, in any thread. One request at a
    time: the one before has ended, was closed, or nobody holds it any more. A drafter of your own
    is resumed if its sessions are `resumable` (`DraftSession`). Else every request reads its
    whole prompt.

    Args:
        target, drafter, kv_bits: as in `stream_generate`, for all turns.
        prefix: where a request begins that cannot go on with these caches, and what it reads is
            kept for others; of the same pair.
        salt: who may share in it; conversations with other salts do not.

    Raises `SettingsError` for a store of another pair, and for an argument of another kind.

    Attributes:
        ids: the tokens in the caches.
        target: the target's session, of the last request.
        drafter: the drafter's.
    """

    target: TargetSession
    drafter: DraftSession

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
        self._pair, self._prefix, self._salt = (target, drafter, kv_bits), prefix, salt
        self._ends: Sequence[int] = ()
        self._marks: list[tuple[Any, Any]] = []  # of target and drafter, in the order of positions
        self._started = False
        self._prompt: Sequence[int] = ()  # that is read
        # Features of it that the drafter has not got yet, and the target's mark behind them,
        self._held: list[tuple[mx.array, Any]] = []
        self._reader_thread = 0  # lazy, in this thread
        self._settled = True
        self._opening = threading.Lock()
        self._request: weakref.ref[Holder] | None = None  # the last one
        self.ids: list[int] = []

    @property
    def kv_bits(self) -> int | None:
        """Of the target's keys and values."""
        return self._pair[2]

    @property
    def shares(self) -> bool:
        """Whether there is a store."""
        return self._prefix is not None

    def check(self, target: Target, drafter: Drafter | None, kv_bits: int | None) -> None:
        """Raise `SettingsError` unless the conversation is of this pair."""
        of, drafting, bits = self._pair
        if of is not target or drafting is not drafter:
            what = "target" if of is not target else "drafter"
            raise SettingsError(f"The conversation is of another {what}: begin a new one.")
        if bits != kv_bits:
            raise SettingsError(
                f"The conversation is of kv_bits={bits}: say so in every turn, or begin a new one."
            )

    def open(self, request: Holder) -> None:
        """Belong to a request until it has ended, or nobody holds it any more.

        Raises `SettingsError` while the conversation belongs to another.
        """
        with self._opening:
            self._check_free()
            self._request = weakref.ref(request)

    def _check_free(self) -> None:
        last = None if self._request is None else self._request()
        if last is not None and not last.ended:
            raise SettingsError(
                "The conversation has a request that has not ended: read it to its end or close "
                "it first, or give each its own Conversation."
            )

    def resume(self, prompt: Sequence[int], sampler: Sampler, ends: Sequence[int] = ()) -> int:
        """Get the caches ready for a request; the first tokens of its prompt that they hold.

        The prompt's last token is never among them: what comes after it is to be read.

        Args:
            prompt, sampler: the request's.
            ends: where other prompts are likely to diverge, for `PrefixCache`.
        """
        pairs = zip(self.ids, prompt[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        drafting, self._ends = self._resumable(), ends
        if (
            drafting is not None
            and self._go_back(shared, drafting)
            and (self.ids or not self._prefix)
        ):
            drafting.resume(sampler)
        else:
            self._begin(prompt, sampler)
        return len(self.ids)

    def forget(self) -> None:
        """Give the caches back; the next request reads its whole prompt.

        Raises `SettingsError` while the conversation belongs to a request.
        """
        with self._opening:
            self._check_free()
            self.give_back()

    def give_back(self) -> None:
        """As `forget`, by the request it belongs to: that reads its text again to go on."""
        if self._started:
            del self.target, self.drafter
        self._started, self._marks, self.ids = False, [], []
        self._held, self._settled = [], True

    def prefill(
        self, prompt: Sequence[int], step: Callable[[], int] = lambda: PREFILL_STEP
    ) -> Iterator[mx.array | None]:
        """Read the rest of the prompt, forward by forward; the last one yields the logits [1, V].

        The drafter gets the features with `settle`, and those of a long prompt's beginning before:
        the first token need not wait for it. A store gets what is read as soon as both have read
        it. `step` says how many tokens the next forward may have.

        There is a mark where the last forward begins: whoever asks the same again, or says the end
        of it differently, has that one to read. Behind it nobody could go back to it.
        """
        stops: list[int] = []
        if self._prefix is not None:
            sessions = self.target, self.drafter
            stops = self._prefix.checkpoint_positions(*sessions, prompt, self._ends, self._salt)
        self._prompt, self._reader_thread, self._settled = prompt, threading.get_ident(), False
        for logits, taps in self.target.prefill(prompt[len(self.ids) :], stops, step):
            last_begins = self.target.position == len(prompt) - LAST_STEP
            self._held.append((taps, self.target.checkpoint() if last_begins else None))
            rows = sum(taps.shape[1] for taps, _ in self._held)
            if logits is None and (self.shares or rows > MOST_HELD):
                self._hand_over()
            if logits is None and self.shares:
                self.keep(mark=len(self.ids) in stops)
            yield logits
        if threading.current_thread() is not threading.main_thread():
            self.settle()  # a pool of threads would read the next event in another one

    def settle(self) -> bool:
        """Let the drafter know all of the prompt that was read; before a round, and at the end.

        Features may still be lazy, and then only the thread that has read the prompt can take
        them. Returns whether it is this one; else the caches are to be given up.
        """
        if self._held and threading.get_ident() != self._reader_thread:
            return False
        if not self._settled:
            self._hand_over()
            self.keep(mark=False)
            self._settled = True
        return True

    def _hand_over(self) -> None:
        held, self._held = self._held, []
        for taps, mark in held:
            self.extend(self._prompt[len(self.ids) :][: taps.shape[1]], taps)
            if mark is not None:
                self._mark(mark)

    def keep(self, mark: bool = True) -> None:
        """Store what the caches hold, if there is a store; at the end of a request, with a mark."""
        if self._prefix is not None:
            self._prefix.insert(self.target, self.drafter, self.ids, mark, self._salt)

    def extend(
        self, tokens: Sequence[int], taps: mx.array, kept: Sequence[int] | None = None
    ) -> None:
        """Let the drafter know the tokens that the target has just committed.

        Args:
            tokens: S of them.
            taps: their features, [1, S, K*D], perhaps lazy; or a round's, [1, N, K*D], computed,
            kept: and which rows of those they are, rising.
        """
        self.drafter.read_tokens(tokens)
        if kept is not None:
            self.drafter.extend_rows(taps, kept)
        else:
            mx.async_eval(taps)  # the drafter may use them in another thread
            self.drafter.extend(taps)
        self.ids += tokens

    def _begin(self, prompt: Sequence[int], sampler: Sampler) -> None:
        """Begin with new sessions: in the store if there is one, else with nothing."""
        target, drafter, kv_bits = self._pair
        if self._prefix is None:
            self.target = target.start(() if drafter is None else drafter.tap_layers, kv_bits)
            self.drafter, held = start_session(drafter, target, sampler), 0
        else:
            opened = self._prefix.open(prompt, sampler, kv_bits, self._salt)
            self.target, self.drafter, held = opened
        self._started, self._marks, self.ids = True, [], list(prompt[:held])
        self._held, self._settled = [], True

    def _resumable(self) -> DraftSession | None:
        """The drafter's session, if the caches are whole: no forward was left out or broken off."""
        if not (self._started and self.drafter.resumable and self.target.intact):
            return None
        held = {self.target.position, self.drafter.position, len(self.ids)}
        return self.drafter if len(held) == 1 else None

    def _go_back(self, shared: int, drafting: DraftSession) -> bool:
        """Forget what comes after the first `shared` tokens, if that can be done."""
        if shared < len(self.ids):
            if self.target.can_trim and drafting.can_trim:
                self.target.trim_to(shared)
                drafting.trim_to(shared)
            else:
                self._marks = [mark for mark in self._marks if mark[0].position <= shared]
                if not self._marks:
                    return False
                target, drafter = self._marks[-1]
                self.target.rewind(target)
                if drafter is None:
                    drafting.trim_to(target.position)
                else:
                    drafting.rewind(drafter)
            del self.ids[self.target.position :]
        elif self.ids:
            self._mark(self.target.checkpoint())
        return True

    def _mark(self, target: Any) -> None:
        """Mark this place, of which `target` is the target's, where caches cannot be cut at any."""
        drafting = self.drafter
        if drafting.resumable and not (self.target.can_trim and drafting.can_trim):
            mark = None if drafting.can_trim else drafting.checkpoint()
            self._marks = [*self._marks, (target, mark)][-MOST_MARKS:]

"""What one request leaves for the next: the caches of a chat stay, and only new tokens are read.

The next prompt mostly begins with what the caches hold. Where it parts from them (an undone turn,
a template that drops old thinking) they go back to that token or, when a sliding window or a
recurrent state cannot be cut there, to the last mark before it.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from itertools import takewhile
from typing import Any

from .drafter.plain import NoDrafter
from .errors import SettingsError
from .sampling import Sampler
from .target import Target, TargetSession

MOST_MARKS = 8  # each holds the windows and the states of the target and the drafter


class Conversation:
    """The caches of a pair, for one request after another.

    Hand it to `stream_generate` with every turn's whole prompt, in any thread. One request at a
    time: the one before has ended, was closed, or is forgotten. A drafter of your own is resumed if
    its sessions have what `DraftSession` has for it: `resume`, `position`, `can_be_cut`, and `cut`
    if that is true, `mark` and `rewind` if not. Else every request reads its whole prompt.

    Args:
        target, drafter, kv_bits: as in `stream_generate`, for all turns.

    Attributes:
        ids: the tokens in the caches.
        target: the target's session, of the last request.
        drafter: the drafter's.
    """

    target: TargetSession
    drafter: Any

    def __init__(self, target: Target, drafter: Any, kv_bits: int | None = None) -> None:
        self._pair = target, drafter, kv_bits
        self._marks: list[tuple[Any, Any]] = []  # of target and drafter, in the order of positions
        self._started = False
        self._opening = threading.Lock()
        self._request: weakref.ref[Generator[Any, None, None]] | None = None  # the last one
        self.ids: list[int] = []

    def check(self, target: Target, drafter: Any, kv_bits: int | None) -> None:
        """Raise `SettingsError` unless the conversation is of this pair."""
        of, drafting, bits = self._pair
        if of is not target or drafting is not drafter or bits != kv_bits:
            raise SettingsError(
                "The conversation is of another target, drafter or kv_bits: begin a new one."
            )

    def open(self, request: Generator[Any, None, None]) -> None:
        """Belong to a request until it has ended, is closed, or is forgotten.

        Raises `SettingsError` while the conversation belongs to another.
        """
        with self._opening:
            last = None if self._request is None else self._request()
            if last is not None and inspect.getgeneratorstate(last) != inspect.GEN_CLOSED:
                raise SettingsError(
                    "The conversation has a request that has not ended: read it to its end or "
                    "close it first, or give each its own Conversation."
                )
            self._request = weakref.ref(request)

    def resume(self, prompt: Sequence[int], sampler: Sampler) -> int:
        """Get the caches ready for a request; the first tokens of its prompt that they hold.

        The prompt's last token is never among them: it is the first anchor.
        """
        pairs = zip(self.ids, prompt[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if self._can_resume() and self._go_back(shared):
            self.drafter.resume(sampler)
        else:
            target, drafter, kv_bits = self._pair
            drafter = NoDrafter() if drafter is None else drafter
            self.target = target.start(drafter.tap_layers, kv_bits)
            self.drafter = drafter.start(target, sampler)
            self._started, self._marks, self.ids = True, [], []
        return len(self.ids)

    def prefill(self, prompt: Sequence[int]) -> Iterator[int]:
        """Read the rest of the prompt but its last token; yields how many are read, by chunks."""
        for taps in self.target.prefill(prompt[len(self.ids) : -1]):
            self.drafter.extend(taps)
            self.ids += prompt[len(self.ids) : self.target.position]
            yield len(self.ids)
        self._mark()

    def _can_resume(self) -> bool:
        """Whether the caches are whole: no forward was interrupted, and none was left out."""
        return (
            self._started
            and hasattr(self.drafter, "resume")
            and self.target.whole
            and self.target.position == self.drafter.position == len(self.ids)
        )

    def _go_back(self, shared: int) -> bool:
        """Forget what comes after the first `shared` tokens, if that can be done."""
        if shared < len(self.ids):
            if self._can_be_cut():
                self.target.cut(shared)
                self.drafter.cut(shared)
            else:
                self._marks = [mark for mark in self._marks if mark[0].position <= shared]
                if not self._marks:
                    return False
                target, drafter = self._marks[-1]
                self.target.rewind(target)
                if drafter is None:
                    self.drafter.cut(target.position)
                else:
                    self.drafter.rewind(drafter)
            del self.ids[self.target.position :]
        elif self.ids:
            self._mark()
        return True

    def _can_be_cut(self) -> bool:
        return self.target.can_be_cut and bool(self.drafter.can_be_cut)

    def _mark(self) -> None:
        """Mark this place, where caches cannot be cut at any."""
        if hasattr(self.drafter, "resume") and not self._can_be_cut():
            drafter = None if self.drafter.can_be_cut else self.drafter.mark()
            self._marks = [*self._marks, (self.target.mark(), drafter)][-MOST_MARKS:]

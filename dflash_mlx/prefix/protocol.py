"""What a request asks of a store of prefixes: `Conversation` asks, `Store` answers.

    when a request is admitted    open, then stops
    after each chunk of a prompt  keep
    when the request ends         keep, with mark; whether it was finished or cancelled
    when live requests grow       leave_room

Nothing here waits for the device, and nothing runs the target. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ..drafter.protocol import Drafter, DraftSession
    from ..sampling import Sampler
    from ..targets import Target, TargetSession


@runtime_checkable
class Prefix(Protocol):
    """A store of what requests have read, for one target and one drafter."""

    def check(self, target: Target, drafter: Drafter | None) -> None:
        """Raise `SettingsError` unless the store is of this pair."""

    def open(
        self, prompt: Sequence[int], sampler: Sampler, kv_bits: int | None = None, salt: str = ""
    ) -> tuple[TargetSession, DraftSession, int]:
        """New sessions of both, and how many tokens of the prompt they hold already.

        Two tokens of the prompt at least are left to read. Requests of other `kv_bits` or of
        another `salt` share nothing.
        """

    def stops(
        self,
        target: TargetSession,
        drafter: DraftSession,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        salt: str = "",
    ) -> list[int]:
        """Where reading the rest of the prompt has to pause for a `keep` with `mark`.

        Empty for a pair whose caches can be cut anywhere. `ends` are places where other prompts
        will part from this one, as the end of a system prompt; see `prompt.branch_points`.
        """

    def keep(
        self,
        target: TargetSession,
        drafter: DraftSession,
        ids: Sequence[int],
        mark: bool = False,
        salt: str = "",
    ) -> None:
        """Store what is new of these tokens, all that the sessions hold.

        Args:
            target, drafter: a request's, from `open` or not, between two forwards.
            ids: the tokens in their caches.
            mark: this place is to be gone on from, also by a pair that cannot be cut there.
            salt: as in `open`.
        """

    def leave_room(self, size: int) -> bool:
        """Leave this many bytes in all to the caches of live requests; False if there are fewer."""

"""A conversation: caches that one request leaves for the next, which reads only what is new."""

from __future__ import annotations

import threading
import weakref

from .caches import Caches
from .drafter.protocol import Drafter, check_pair
from .errors import SettingsError
from .prefix.store import PrefixStore
from .request import Request
from .targets import Target
from .targets.caches import check_kv_bits
from .validation import brief, check_type


class Conversation:
    """The caches of a pair, for one request after another.

    Pass it to `stream_generate` with every turn's whole prompt, from any thread, but to one request
    at a time: the last one must have ended, or been closed or garbage collected. A drafter of your
    own is resumed if its sessions are a `SupportsResume` (`drafter.protocol`). Otherwise every
    request reads its whole prompt.

    Args:
        target, drafter, kv_bits: as in `stream_generate`, for all turns.
        prefix: a prefix cache of the pair. A request that cannot continue these caches starts from
            it, and its tokens are added to it.
        salt: only conversations with the same salt share its entries.

    Raises `SettingsError` for a prefix cache of another pair, or an argument of a wrong type.

    Attributes:
        target, kv_bits, prefix: as given.
        caches: of the last request; the methods are the loop's.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        kv_bits: int | None = None,
        *,
        prefix: PrefixStore | None = None,
        salt: str = "",
    ) -> None:
        check_pair(target, drafter)
        check_type("prefix", prefix, PrefixStore, "dm.PrefixStore(target, drafter, memory=...)")
        check_kv_bits(kv_bits)
        if not isinstance(salt, str):
            raise SettingsError(f"salt must be text, not {brief(salt)}.")
        self.caches = Caches(target, drafter, kv_bits, prefix, salt, kept=True)
        self.target, self.kv_bits, self.prefix = target, kv_bits, prefix
        self._opening = threading.Lock()
        self._request: weakref.ref[Request] | None = None  # the last one

    @property
    def ids(self) -> list[int]:
        """The tokens in the caches."""
        return self.caches.ids

    def check(self, target: Target, drafter: Drafter | None, kv_bits: int | None) -> None:
        """Raise `SettingsError` unless the conversation was made for these."""
        caches = self.caches
        if caches.target is not target or caches.drafter is not drafter:
            what = "target" if caches.target is not target else "drafter"
            raise SettingsError(f"The conversation is of another {what}: begin a new one.")
        if caches.kv_bits != kv_bits:
            raise SettingsError(
                f"The conversation is of kv_bits={caches.kv_bits}: say so in every turn, or begin "
                "a new one."
            )

    def open(self, request: Request) -> None:
        """Reserve the caches for a request. Raises `SettingsError` while another uses them."""
        with self._opening:
            last = None if self._request is None else self._request()
            if last is not None and not last.ended:
                raise SettingsError(
                    "The conversation has a request that has not ended: read it to its end or "
                    "close it first, or give each its own Conversation."
                )
            self._request = weakref.ref(request)

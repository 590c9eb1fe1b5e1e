"""A conversation keeps its caches from one request to the next, which reads only new tokens."""

from __future__ import annotations

import threading
import weakref

from .drafter.protocol import Drafter, check_pair
from .errors import SettingsError
from .pair_caches import Caches
from .prefix.store import PrefixStore
from .request import Request
from .targets import Target
from .targets.caches import check_kv_bits
from .validation import brief, check_type


class Conversation:
    """The caches of a target and a drafter, which one request after another continues.

    Pass it to `stream_generate` with the whole prompt of every turn, from any thread, but to one
    request at a time: the last one must have ended, or been closed or garbage collected. A drafter
    that you wrote is resumed if its sessions are a `SupportsResume` (`drafter.protocol`). Otherwise
    every request reads its whole prompt.

    Args:
        target, drafter, kv_bits: the same as in `stream_generate`, for all turns.
        prefix: a prefix store of the pair. A request that cannot continue these caches starts from
            it, and its tokens are added to it.
        salt: only conversations with the same salt share entries of the prefix store.

    Raises `SettingsError` for a prefix store of another pair, or an argument of a wrong type.

    Attributes:
        target, kv_bits, prefix: the arguments.
        caches: the caches of the last request. Only the decoding loop uses them.
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
        self.caches = Caches(
            target,
            drafter,
            kv_bits=kv_bits,
            prefix=prefix,
            salt=salt,
            kept=True,
        )
        self.target = target
        self.kv_bits = kv_bits
        self.prefix = prefix
        self._lock = threading.Lock()
        self._last_request: weakref.ref[Request] | None = None

    @property
    def ids(self) -> list[int]:
        """The token ids in the caches."""
        return self.caches.ids

    def check(self, target: Target, drafter: Drafter | None, kv_bits: int | None) -> None:
        """Raise `SettingsError` unless the conversation was made for these."""
        caches = self.caches
        if caches.target is not target or caches.drafter is not drafter:
            model = "target" if caches.target is not target else "drafter"
            raise SettingsError(f"The conversation has caches of another {model}: begin a new one.")
        if caches.kv_bits != kv_bits:
            raise SettingsError(
                f"The conversation has caches of kv_bits={caches.kv_bits}: pass that in every "
                "turn, or begin a new conversation."
            )

    def open(self, request: Request) -> None:
        """Reserve the caches for a request. Raises `SettingsError` while another uses them."""
        with self._lock:
            last = None if self._last_request is None else self._last_request()
            if last is not None and not last.ended:
                raise SettingsError(
                    "The conversation has a request that has not ended: read it to its end or "
                    "close it first, or use another Conversation."
                )
            self._last_request = weakref.ref(request)

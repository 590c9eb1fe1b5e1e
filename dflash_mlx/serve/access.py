"""Who may speak to the server: the hosts it is called by, the pages that may ask, the key.

A page of another site that a browser shows on this machine can send requests to 127.0.0.1, too. It
is kept out by its Origin; and where it lets its own name lead here (DNS rebinding), by the Host
header.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

from ..errors import SettingsError
from ..validation import brief
from .errors import Refusal

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})
NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?")
# As browsers say it: without the port that the scheme has anyhow. A file's page is "null", and so
# is any page in a frame that is kept apart.
ORIGIN: Final = re.compile(
    r"null|(?!http://[^:]*:80$|https://[^:]*:443$)"
    r"[a-z][a-z0-9+.-]*://([a-z0-9_]([a-z0-9._-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
)
OPEN: Final = frozenset({"/", "/health", "/ready"})  # without a key: they tell nothing of anybody


@dataclass(frozen=True)
class Access:
    """Who may speak to a server.

    Attributes:
        host: the address it is bound to.
        keys: any of which has to come with a request; none asks for none.
        hosts: further names that it is called by.
        origins: of pages of other sites that may ask.
        everybody: whether another host than this machine may go without a key.

    Raises `SettingsError` for another host's access without a key, and for names and origins as no
    request has them.
    """

    host: str = "127.0.0.1"
    keys: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    everybody: bool = False

    def __post_init__(self) -> None:
        if not self.keys and not self.everybody and self.host not in LOOPBACK:
            raise SettingsError(
                f"--host {self.host} lets other machines in: give --api-key, or --no-auth if "
                "everybody may use this server."
            )
        for host in self.hosts:
            if not NAME.fullmatch(host) and not _is_address(host, canonical=True):
                raise SettingsError(
                    "--allow-host is a name alone, as mybox.local: no wildcard, no http://, no "
                    f"port; not {brief(host)}."
                )
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise SettingsError(
                    "--allow-origin is as a browser says it, https://chat.example or "
                    f"http://chat.example:3000: no wildcard, no path; not {brief(origin)}."
                )

    def check(self, path: str, headers: Headers) -> str:
        """Who asks, for the prefix store: the same for all but where several people have keys.

        How soon an answer comes would else tell one person what another one has asked.

        Raises `Refusal` for a request that may not be.
        """
        host = _name(headers.get("host", ""))
        if not self._is_ours(host):
            raise Refusal(
                f"This server is not called {host[:100]!r}: start it with --allow-host.", 403
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins:
            same = {f"{scheme}://{headers.get('host', '')}" for scheme in ("http", "https")}
            if origin not in same:
                raise Refusal(
                    f"Pages of {origin[:100]!r} may not ask: start the server with --allow-origin.",
                    403,
                )
        if not self.keys or path in OPEN:
            return ""
        key = self._key(headers)
        if key is None:
            raise Refusal(
                "The API key is missing or wrong: send this server's, as 'Authorization: Bearer "
                "KEY' or 'x-api-key: KEY'.",
                401,
                code="invalid_api_key",
            )
        return hashlib.sha256(key.encode()).hexdigest() if len(self.keys) > 1 else ""

    def _is_ours(self, host: str) -> bool:
        if host in LOOPBACK or host == self.host or host in self.hosts:
            return True
        return self.host in WILDCARDS and _is_address(host)  # which no name server can lead here

    def _key(self, headers: Headers) -> str | None:
        """The key of ours that a request brings."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else ""
        offered = [one.encode() for one in (given, headers.get("x-api-key", "")) if one]
        # Every pair is compared, so that time tells nothing.
        right = [
            key for one in offered for key in self.keys if hmac.compare_digest(one, key.encode())
        ]
        return right[0] if right else None


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_address(host: str, canonical: bool = False) -> bool:
    """Whether it is a number; `canonical`: written as clients write it."""
    try:
        address = str(ipaddress.ip_address(host))
    except ValueError:
        return False
    return host == address or not canonical

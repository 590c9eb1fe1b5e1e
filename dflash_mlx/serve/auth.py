"""Authentication: the API keys, host names and browser origins that a server accepts.

Web pages of other sites can send requests to 127.0.0.1 as well. The Origin header reveals them. If
a site points its own name at this machine (DNS rebinding), the Host header does.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from ..errors import SettingsError
from .http_errors import RequestError

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})
PUBLIC_PATHS: Final = frozenset({"/", "/health", "/ready"})  # paths that need no key


@dataclass(frozen=True)
class Auth:
    """Who may use a server.

    Attributes:
        host: the address that the server is bound to.
        keys: API keys, one of which a request must bring; empty requires none.
        hosts: additional host names of this server, in lower case, without a port.
        origins: origins of other sites whose pages may use it, such as https://chat.example.
        no_auth: allow other machines without a key.

    Raises `SettingsError` if other machines could connect without a key.
    """

    host: str = "127.0.0.1"
    keys: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    no_auth: bool = False

    def __post_init__(self) -> None:
        if not self.keys and not self.no_auth and self.host not in LOOPBACK:
            raise SettingsError(
                f"--host {self.host} lets other machines in: give --api-key, or --no-auth if "
                "anyone may use this server."
            )

    def check(self, request: Request) -> str:
        """Check a request, and return the cache salt of its user.

        With several keys each user has a separate prefix cache, because the time to an answer would
        reveal what others have asked. The salt is "" otherwise.

        Raises `RequestError`: 403 for a wrong host or origin, 401 for a wrong key.
        """
        host = _host_name(request.headers.get("host", ""))
        if not self._is_this_server(host):
            raise RequestError(f"Unknown host {host[:100]!r}: allow it with --allow-host.", 403)
        origin = request.headers.get("origin")
        own_origins = {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
        if origin is not None and origin not in self.origins | own_origins:
            raise RequestError(
                f"Pages of {origin[:100]!r} are not allowed: allow them with --allow-origin.", 403
            )
        if not self.keys or request.url.path in PUBLIC_PATHS:
            return ""
        key = self._key(request)
        if key is None:
            raise RequestError(
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                401,
                code="invalid_api_key",
            )
        return hashlib.sha256(key.encode()).hexdigest() if len(self.keys) > 1 else ""

    def _is_this_server(self, host: str) -> bool:
        """Whether a host name means this server."""
        if host in LOOPBACK or host == self.host or host in self.hosts:
            return True
        # An address cannot be the name of another site.
        return self.host in WILDCARDS and _is_address(host)

    def _key(self, request: Request) -> str | None:
        """Return the valid key that a request brings, or None."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        valid = None
        # Compare all pairs, each in constant time, so that timing reveals nothing.
        for offered in (bearer, request.headers.get("x-api-key", "")):
            for key in self.keys:
                if hmac.compare_digest(offered.encode(), key.encode()) and valid is None:
                    valid = key
        return valid


def _host_name(header: str) -> str:
    """Return a Host header without its port.

    starlette's URL would replace a header that it cannot parse.
    """
    if header.startswith("["):  # an IPv6 address
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

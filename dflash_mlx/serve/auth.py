"""Authentication: the API keys, host names and browser origins that a server accepts.

A web page of another site can send requests to 127.0.0.1 too. The Origin header reveals it. If the
site points its own name at this machine (DNS rebinding), the Host header does.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from ..errors import SettingsError
from .errors import RequestError

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})
PUBLIC_PATHS: Final = frozenset({"/", "/health", "/ready"})  # need no key


@dataclass(frozen=True)
class Auth:
    """Who may use a server.

    Attributes:
        host: the address that the server is bound to.
        keys: API keys, one of which a request has to bring; empty asks for none.
        hosts: additional host names of this server, lower case, without a port.
        origins: origins of other sites whose pages may use it, as https://chat.example.
        no_auth: allow other machines without a key.

    Raises `SettingsError` if other machines could come in without a key.
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
                "everybody may use this server."
            )

    def check(self, request: Request) -> str:
        """Check a request, and return the cache salt of its user.

        With several keys each user has a prefix cache of their own: the time to an answer would
        reveal what others have asked. The salt is "" otherwise.

        Raises `RequestError`: 403 for a wrong host or origin, 401 for a wrong key.
        """
        host = _host_name(request.headers.get("host", ""))
        if not self._is_own_host(host):
            raise RequestError(f"Unknown host {host[:100]!r}: allow it with --allow-host.", 403)
        origin = request.headers.get("origin")
        own = {f"{scheme}://{request.headers.get('host')}" for scheme in ("http", "https")}
        if origin is not None and origin not in self.origins | own:
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

    def _is_own_host(self, host: str) -> bool:
        if host in LOOPBACK or host == self.host or host in self.hosts:
            return True
        return self.host in WILDCARDS and _is_address(host)  # no DNS entry leads to an address

    def _key(self, request: Request) -> str | None:
        """The valid key that a request brings."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        offered = [key for key in (bearer, request.headers.get("x-api-key", "")) if key]
        # Compare all pairs in constant time, so that timing reveals nothing.
        valid = [
            key
            for given in offered
            for key in self.keys
            if hmac.compare_digest(given.encode(), key.encode())
        ]
        return valid[0] if valid else None


def _host_name(header: str) -> str:
    """A Host header without its port. starlette's URL replaces one that it cannot parse."""
    start, separator = (1, "]") if header.startswith("[") else (0, ":")
    return header[start:].partition(separator)[0].lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""Which hosts, origins and keys a server accepts."""

import pytest
from dialects import CHAT, MESSAGES, ask
from serving import FakeEngine, client

from dflash_mlx.errors import SettingsError
from dflash_mlx.serve.auth import Auth

LOCAL = Auth()
KEYS = Auth(keys=frozenset({"right", "other"}))
WITH_HOSTS = Auth(hosts=frozenset({"mybox.local", "10.0.0.2", "::2"}))
OPEN = Auth("0.0.0.0", no_auth=True, hosts=frozenset({"mac.local"}))
SITE = "http://web.example"
ORIGINS = frozenset({SITE, "https://a.example:3000", "http://[::2]:3000", "null"})
WITH_ORIGINS = Auth(origins=ORIGINS)


def with_header(name, *values):
    """The headers of several requests, each with one of these values."""
    return [{name: value} for value in values]


@pytest.mark.parametrize(
    ("auth", "status", "headers"),
    [
        (LOCAL, 200, with_header("host", "127.0.0.1", "localhost:8000", "[::1]:8000", "LOCALHOST")),
        (
            LOCAL,
            403,
            with_header("host", "evil.example", "127.0.0.1.evil.example", "e_vil.example", ""),
        ),
        (LOCAL, 403, with_header("host", "[", "[::2]", "10.0.0.1")),
        (WITH_HOSTS, 200, with_header("host", "MYBOX.LOCAL", "10.0.0.2", "[::2]:80")),
        (OPEN, 200, with_header("host", "192.168.0.7:8000", "mac.local")),
        (OPEN, 403, with_header("host", "evil.example")),
        (LOCAL, 200, with_header("origin", "http://127.0.0.1:8000")),
        (
            LOCAL,
            403,
            with_header("origin", "https://evil.example", "null", "http://127.0.0.1:9999"),
        ),
        (WITH_ORIGINS, 200, with_header("origin", *ORIGINS)),
        (WITH_ORIGINS, 403, with_header("origin", "https://evil.example")),
        (KEYS, 200, with_header("authorization", "Bearer right", "bearer other")),
        (KEYS, 200, with_header("x-api-key", "right")),
        (KEYS, 401, [*with_header("authorization", "Bearer wrong"), {}]),
        (KEYS, 401, with_header("x-api-key", "righ\xe9".encode("latin-1"))),
    ],
)
def test_hosts_origins_and_keys_decide_who_is_let_in(target, auth, status, headers):
    with client(FakeEngine(target), auth=auth) as server:
        for header in headers:
            for path in ("/v1/models", "/metrics"):
                assert server.get(path, headers=header).status_code == status, header
            without_key = 200 if status == 401 else status  # these paths need no key
            for path in ("/", "/health", "/ready"):
                assert server.get(path, headers=header).status_code == without_key
            answer = server.post(MESSAGES, json=ask(MESSAGES), headers=header)
            assert answer.status_code == status
            if status == 403:
                error = answer.json()["error"]
                assert error["type"] == "permission_error"
                assert f"--allow-{next(iter(header))}" in error["message"]


def test_an_allowed_page_gets_cors_headers(target):
    preflight = {"origin": SITE, "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "content-type, authorization"
    preflight["access-control-request-private-network"] = "true"
    with client(FakeEngine(target), auth=WITH_ORIGINS) as server:
        allowed = server.options(CHAT, headers=preflight)
        answer = server.post(CHAT, json=ask(CHAT), headers={"origin": SITE})
    assert allowed.status_code == 200 and answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == SITE
    assert allowed.headers["access-control-allow-private-network"] == "true"


def test_users_with_different_keys_share_no_prefix_cache(target):
    """Each key has its salt, which does not show the key. With a single key there is none."""

    def salts(server_keys, request_keys):
        engine = FakeEngine(target)
        with client(engine, auth=Auth(keys=frozenset(server_keys))) as server:
            for key in request_keys:
                server.post(CHAT, json=ask(CHAT), headers={"x-api-key": key})
        return [settings.get("salt") for _, settings in engine.submitted]

    assert salts([], ["k"]) == salts(["k"], ["k"]) == [None]
    first, other, again = salts(["k", "other"], ["k", "other", "k"])
    assert first and other
    assert first == again != other
    assert "k" not in (first, other)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::"])
def test_other_machines_need_a_key(host):
    with pytest.raises(SettingsError, match="--api-key"):
        Auth(host)
    assert Auth(host, keys=frozenset({"k"})) and Auth(host, no_auth=True)

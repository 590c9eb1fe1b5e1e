"""Which hosts, origins and keys a server accepts."""

import pytest
from dialects import CHAT, MESSAGES, ask
from serving import FakeEngine, client

from dflash_mlx.errors import SettingsError
from dflash_mlx.serve.auth import Auth

OWN = Auth()
KEYS = Auth(keys=frozenset({"right", "other"}))
NAMED = Auth(hosts=frozenset({"mybox.local", "10.0.0.2", "::2"}))
OPEN = Auth("0.0.0.0", no_auth=True, hosts=frozenset({"mac.local"}))
SITE = "http://web.example"
PAGES = Auth(origins=frozenset({SITE, "https://a.example:3000", "http://[::2]:3000", "null"}))


def with_header(name, *values):
    return [{name: value} for value in values]


@pytest.mark.parametrize(
    ("auth", "status", "headers"),
    [
        (OWN, 200, with_header("host", "127.0.0.1", "localhost:8000", "[::1]:8000", "LOCALHOST")),
        (
            OWN,
            403,
            with_header("host", "evil.example", "127.0.0.1.evil.example", "e_vil.example", ""),
        ),
        (OWN, 403, with_header("host", "[", "[::2]", "10.0.0.1")),
        (NAMED, 200, with_header("host", "MYBOX.LOCAL", "10.0.0.2", "[::2]:80")),
        (OPEN, 200, with_header("host", "192.168.0.7:8000", "mac.local")),
        (OPEN, 403, with_header("host", "evil.example")),
        (OWN, 200, with_header("origin", "http://127.0.0.1:8000")),
        (OWN, 403, with_header("origin", "https://evil.example", "null", "http://127.0.0.1:9999")),
        (PAGES, 200, with_header("origin", *PAGES.origins)),
        (PAGES, 403, with_header("origin", "https://evil.example")),
        (KEYS, 200, with_header("authorization", "Bearer right", "bearer other")),
        (KEYS, 200, with_header("x-api-key", "right")),
        (KEYS, 401, [*with_header("authorization", "Bearer wrong"), {}]),
        (KEYS, 401, with_header("x-api-key", "righ\xe9".encode("latin-1"))),
    ],
)
def test_who_is_let_in(target, auth, status, headers):
    with client(FakeEngine(target), auth=auth) as server:
        for header in headers:
            for path in ("/v1/models", "/metrics"):
                assert server.get(path, headers=header).status_code == status, header
            public = 200 if status == 401 else status  # a key is not needed everywhere
            for path in ("/", "/health", "/ready"):
                assert server.get(path, headers=header).status_code == public
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
    with client(FakeEngine(target), auth=PAGES) as server:
        allowed = server.options(CHAT, headers=preflight)
        answer = server.post(CHAT, json=ask(CHAT), headers={"origin": SITE})
    assert allowed.status_code == 200 and answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == SITE
    assert allowed.headers["access-control-allow-private-network"] == "true"


def test_users_with_keys_of_their_own_share_no_prefix_cache(target):
    def salts(keys, used):
        engine = FakeEngine(target)
        with client(engine, auth=Auth(keys=frozenset(keys))) as server:
            for key in used:
                server.post(CHAT, json=ask(CHAT), headers={"x-api-key": key})
        return [settings.get("salt") for _, settings in engine.submitted]

    assert salts([], ["k"]) == salts(["k"], ["k"]) == [None]
    first, other, again = salts(["k", "other"], ["k", "other", "k"])
    assert first == again != other and other and "k" not in (first, other)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::"])
def test_other_machines_need_a_key(host):
    with pytest.raises(SettingsError, match="--api-key"):
        Auth(host)
    assert Auth(host, keys=frozenset({"k"})) and Auth(host, no_auth=True)

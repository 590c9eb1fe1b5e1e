"""Which hosts, origins and keys a server accepts."""

import pytest
from serving import FakeEngine, client

from dflash_mlx.errors import SettingsError
from dflash_mlx.serve.auth import Auth

CHAT = "/v1/chat/completions"
HI = {"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:8000", "LOCALHOST"])
def test_hosts_of_this_machine(server, host):
    assert server.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "e_vil.example", "", "[", "[::2]", "10.0.0.1"],
)
def test_dns_rebinding_is_refused(server, host):
    answer = server.post(CHAT, json=HI, headers={"host": host})
    assert answer.status_code == 403 and "--allow-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9999"])
def test_pages_of_other_sites_are_refused(server, origin):
    answer = server.post("/v1/messages", json=HI, headers={"origin": origin})
    assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
    own = {"origin": "http://127.0.0.1:8000"}
    assert server.post("/v1/messages", json=HI, headers=own).status_code == 200


@pytest.mark.parametrize("host", ["mybox.local", "10.0.0.2", "::2"])
def test_allowed_hosts(target, host):
    with client(FakeEngine(target), auth=Auth(hosts=frozenset({host}))) as server:
        header = f"[{host}]:80" if ":" in host else host.upper()
        assert server.get("/v1/models", headers={"host": header}).status_code == 200


@pytest.mark.parametrize("origin", ["https://a.example:3000", "http://[::2]:3000", "null"])
def test_origins_that_pages_have(origin):
    assert Auth(origins=frozenset({origin}))


def test_an_allowed_page_gets_cors_headers(target):
    auth = Auth(origins=frozenset({"http://web.example"}))
    preflight = {"origin": "http://web.example", "access-control-request-method": "POST"}
    preflight["access-control-request-headers"] = "content-type, authorization"
    preflight["access-control-request-private-network"] = "true"
    with client(FakeEngine(target), auth=auth) as server:
        allowed = server.options(CHAT, headers=preflight)
        answer = server.post(CHAT, json=HI, headers={"origin": "http://web.example"})
    assert allowed.status_code == 200 and answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://web.example"
    assert allowed.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "right"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "righ\xe9".encode("latin-1")}, 401),
        ({}, 401),
    ],
)
def test_keys(target, headers, status):
    auth = Auth(keys=frozenset({"right", "other"}))
    with client(FakeEngine(target), auth=auth) as server:
        for path in ("/v1/models", "/metrics"):
            assert server.get(path, headers=headers).status_code == status
        for path in ("/", "/health", "/ready"):
            assert server.get(path, headers=headers).status_code == 200


def test_users_with_keys_of_their_own_share_no_prefix_cache(target):
    def salts(keys, used):
        engine = FakeEngine(target)
        with client(engine, auth=Auth(keys=frozenset(keys))) as server:
            for key in used:
                server.post(CHAT, json=HI, headers={"x-api-key": key})
        return [settings.get("salt") for _, settings in engine.submitted]

    assert salts([], ["k"]) == salts(["k"], ["k"]) == [None]
    one, other, again = salts(["k", "other"], ["k", "other", "k"])
    assert one == again != other and other and "k" not in (one, other)


def test_other_machines_need_a_key():
    for host in ("0.0.0.0", "192.168.0.7", "::"):
        with pytest.raises(SettingsError, match="--api-key"):
            Auth(host)
        Auth(host, keys=frozenset({"k"}))
        Auth(host, no_auth=True)


def test_a_server_on_all_addresses_accepts_addresses_but_no_unknown_names(target):
    auth = Auth("0.0.0.0", no_auth=True, hosts=frozenset({"mac.local"}))
    with client(FakeEngine(target), auth=auth) as server:
        for host, status in (("192.168.0.7:8000", 200), ("mac.local", 200), ("evil.example", 403)):
            assert server.get("/health", headers={"host": host}).status_code == status

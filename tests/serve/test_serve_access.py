"""Who may speak to the server: hosts, pages, keys."""

import pytest
from serving import Says, a_target, client

from dflash_mlx.errors import SettingsError
from dflash_mlx.serve.access import Access

CHAT = "/v1/chat/completions"
HI = {"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def target():
    return a_target()


@pytest.fixture(scope="module")
def server(target):
    with client(Says(target)) as found:
        yield found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:8000", "LOCALHOST"])
def test_hosts_that_are_this_machine(server, host):
    assert server.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]", "10.0.0.1"]
)
def test_a_name_that_was_led_here_is_refused(server, host):
    answer = server.post(CHAT, json=HI, headers={"host": host})
    assert answer.status_code == 403 and "--allow-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9999"])
def test_pages_of_others_are_refused(server, origin):
    answer = server.post("/v1/messages", json=HI, headers={"origin": origin})
    assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
    own = {"origin": "http://127.0.0.1:8000"}
    assert server.post("/v1/messages", json=HI, headers=own).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["http://mybox", "mybox:8000", "mybox/", "", "my box", "[::2]", "*", "*.local", "mybox.local."]
    + ["user@mybox", "a?b", "m\u00fcller.local", "0:0:0:0:0:0:0:2", "MyBox"],
)
def test_names_that_no_request_has_are_refused(host):
    with pytest.raises(SettingsError, match="--allow-host is a name alone"):
        Access(hosts=frozenset({host}))


@pytest.mark.parametrize("host", ["mybox.local", "10.0.0.2", "::2"])
def test_another_name_is_answered(target, host):
    with client(Says(target), access=Access(hosts=frozenset({host}))) as server:
        called = f"[{host}]:80" if ":" in host else host.upper()
        assert server.get("/v1/models", headers={"host": called}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "nonsense",
        "http://",
        "http://a.example/chat",
        "a.example",
        "",
        "https://*",
        "https://*.a.com",
    ]
    + ["https://Chat.com", "https://a.com:443", "http://a.com:80", "https://u:p@a", "https://a:b"],
)
def test_origins_that_no_page_has_are_refused(origin):
    with pytest.raises(SettingsError, match="--allow-origin is as a browser says it"):
        Access(origins=frozenset({origin}))


@pytest.mark.parametrize(
    "origin",
    [
        "https://a.example:3000",
        "http://a.example:443",
        "http://[::2]:3000",
        "app://obsidian.md",
        "null",
    ],
)
def test_origins_that_pages_have(origin):
    assert Access(origins=frozenset({origin}))


def test_a_page_that_is_allowed_gets_what_its_browser_asks_for(target):
    access = Access(origins=frozenset({"http://web.example"}))
    asks = {"origin": "http://web.example", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "content-type, authorization"
    with client(Says(target), access=access) as server:
        preflight = server.options(CHAT, headers=asks)
        answer = server.post(CHAT, json=HI, headers={"origin": "http://web.example"})
    assert preflight.status_code == 200 and answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://web.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "right"}, 200),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "right"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "righ\xe9".encode("latin-1")}, 401),
        ({}, 401),
    ],
)
def test_keys(target, headers, status):
    access = Access(keys=frozenset({"right", "other"}))
    with client(Says(target), access=access) as server:
        for path in ("/v1/models", "/metrics"):
            assert server.get(path, headers=headers).status_code == status
        for path in ("/", "/health", "/ready"):
            assert server.get(path, headers=headers).status_code == 200


def test_who_shares_what_was_read(target):
    """One key is one person; each of several shares with nobody else."""

    def salts(keys, asked):
        engine = Says(target)
        with client(engine, access=Access(keys=frozenset(keys))) as server:
            for key in asked:
                server.post(CHAT, json=HI, headers={"x-api-key": key})
        return [settings.get("salt") for _, settings in engine.asked]

    assert salts([], ["k"]) == salts(["k"], ["k"]) == [None]
    one, other, again = salts(["k", "other"], ["k", "other", "k"])
    assert one == again != other and other and "k" not in (one, other)


def test_another_host_needs_a_key():
    for host in ("0.0.0.0", "192.168.0.7", "::"):
        with pytest.raises(SettingsError, match="--api-key"):
            Access(host)
        Access(host, keys=frozenset({"k"}))
        Access(host, everybody=True)


def test_bound_to_all_addresses_it_is_called_by_any_but_by_no_strange_name(target):
    access = Access("0.0.0.0", everybody=True, hosts=frozenset({"mac.local"}))
    with client(Says(target), access=access) as server:
        for host, status in (("192.168.0.7:8000", 200), ("mac.local", 200), ("evil.example", 403)):
            assert server.get("/health", headers={"host": host}).status_code == status

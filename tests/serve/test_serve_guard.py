"""Who may speak to the server and how much; what the server tells of itself."""

import asyncio
import json
import logging

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving import Says, a_desk, a_target, client

from dflash_mlx.errors import SettingsError
from dflash_mlx.serve import chat, completions, messages, responses
from dflash_mlx.serve.access import Access
from dflash_mlx.serve.app import Endpoints, Options
from dflash_mlx.serve.ask import Ask
from dflash_mlx.serve.body import Bounds
from dflash_mlx.serve.errors import Refusal

CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: chat.ChatBody,
    "/v1/completions": completions.CompletionsBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/messages": messages.MessagesBody,
    "/v1/messages/count_tokens": messages.CountBody,
}
POSTS = [*BODIES]
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


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_none(server, path):
    for content in (
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": "\xed\xa0\x80"}',
    ):
        answer = server.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, content
    answer = server.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415  # what a form of another site could send
    deep = b'{"a":' * 200 + b"1" + b"}" * 200
    deeper = b"[" * 100_000
    for content in (deep, deeper):
        answer = server.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "nested" in answer.text or "JSON" in answer.text
    for many in (b"[]," * 30_000 + b"[]", b"[" * 200_001, b"," * 2_000_001):
        content = b'{"a": [' + many + b"]}"
        answer = server.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413


@pytest.mark.parametrize("path", POSTS)
def test_a_list_is_refused_at_its_first_wrong_value(path):
    """Pydantic would write down millions of them, and nobody else be answered meanwhile."""
    wrong = [0.5] * 20_000
    for name in BODIES[path].model_fields:
        for value in (wrong, [wrong], [{"content": wrong}], dict.fromkeys(map(str, range(20_000)))):
            try:
                BODIES[path].model_validate({name: value})
            except ValidationError as error:
                assert error.error_count() < 40, name


def test_large_bodies_are_refused_before_and_while_they_are_read(target):
    bounds = Bounds(bytes=1000)
    with client(Says(target), bounds=bounds) as server:
        told = server.post(CHAT, json=HI | {"x": "y" * 2000})
        kind = {"content-type": "application/json"}
        untold = server.post(CHAT, content=iter([b"y" * 600] * 3), headers=kind)
    assert told.status_code == untold.status_code == 413


def test_slow_bodies_are_not_waited_for(target):
    """A body of which nothing comes, by ASGI itself: a test client would send it at once."""
    sent = []

    async def ask(app):
        async def receive():
            await anyio.sleep_forever()

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
        await app(scope | {"server": ("localhost", 80), "raw_path": CHAT.encode()}, receive, send)

    anyio.run(ask, client(Says(target), bounds=Bounds(seconds=0.01)).app)
    assert sent[0]["status"] == 408


def test_paths_and_methods_that_there_are_not(server):
    assert server.get("/v2/x").status_code == 404
    assert server.get("/v1/messages/x").json()["type"] == "error"
    assert server.get(CHAT).status_code == 405
    assert server.get("/v1/models/told").json()["id"] == "told"
    assert server.get("/models/other/name").json()["error"]["code"] == "model_not_found"
    (model,) = server.get("/v1/models").json()["data"]
    assert model["object"] == "model" and model["type"] == "model" and model["created_at"]


def test_the_page_may_run_its_own_script_and_nothing_else(server):
    answer = server.get("/")
    assert answer.status_code == 200 and server.head("/").status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy


def test_health_follows_rounds(target):
    """Asked of the endpoint itself: a test client waits for the end of the answer before it."""
    desk = a_desk(Says(target, ["Hello"], reason=None))  # an answer that does not go on
    patient, strict = (
        Endpoints(desk, Options("told", Access(), stalled_seconds=most)) for most in (99, 0)
    )

    async def ask():
        assert (await strict.health(None)).status_code == 200  # nothing to do is no reason to worry
        answering = await desk.ask(Ask("m", "Hi"))
        assert (await patient.health(None)).status_code == 200
        stalled = await strict.health(None)
        assert stalled.status_code == 503 and b"stalled" in stalled.body
        answering.leave()
        assert (await strict.health(None)).status_code == 200

    asyncio.run(ask())


def test_the_queue_has_an_end(target):
    desk = a_desk(Says(target, ["Hello"], reason=None), room=2)

    async def ask():
        answering = await desk.ask(Ask("m", "Hi", n=2))
        with pytest.raises(Refusal) as refused:
            await desk.ask(Ask("m", "Hi"))
        assert refused.value.status == 429 and refused.value.headers["Retry-After"] == "2"
        answering.leave()
        (await desk.ask(Ask("m", "Hi"))).leave()  # the slots came back

    asyncio.run(ask())


def test_who_comes_while_the_server_ends_is_sent_away(target):
    desk = a_desk(Says(target, ["Hello"], reason=None))
    ends = Endpoints(desk, Options("told", Access()))

    async def ask():
        answering = await desk.ask(Ask("m", "Hi"))
        assert (await ends.ready(None)).status_code == 200
        desk.draining = True
        assert (await ends.ready(None)).status_code == 503
        with pytest.raises(Refusal) as refused:
            await desk.ask(Ask("m", "Hi"))
        assert refused.value.status == 503 and refused.value.headers["Retry-After"]
        desk.abandon()
        with pytest.raises(Refusal) as refused:
            async for _ in answering.steps():
                pass
        assert refused.value.status == 503 and not desk.busy

    asyncio.run(ask())


def test_metrics_count(target):
    with client(Says(target, cached=2)) as server:
        usage = server.post(CHAT, json=HI).json()["usage"]
        server.post(CHAT, json={})
        text = server.get("/metrics").text
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(told["dflash_generation_tokens_total"]) == usage["completion_tokens"]
    assert float(told["dflash_prompt_tokens_total"]) == usage["prompt_tokens"]
    assert float(told["dflash_cached_tokens_total"]) == 2
    assert told['dflash_responses_total{status="400"}'] == "1.0"
    assert told["dflash_time_to_first_token_seconds_count"] == "1.0"


def test_logs_say_nothing_of_prompts(target, caplog):
    secret = "Xyzzy-plugh"
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": secret}]}
    with caplog.at_level(logging.DEBUG), client(Says(target, [secret])) as server:
        server.post(CHAT, json=body)
        server.post("/v1/messages", json=body | {"stream": True})
        server.post(CHAT, json=body | {"n": secret})
        server.get("/v1/%0aFAKE%1b[31m")
    assert caplog.records and secret not in caplog.text
    assert all(
        "\n" not in one.getMessage() and "\x1b" not in one.getMessage() for one in caplog.records
    )


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]),
            "content": st.text(max_size=9)
            | st.lists(
                st.fixed_dictionaries(
                    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "x"])},
                    optional={"text": JSON, "content": JSON, "input": JSON, "name": JSON},
                ),
                max_size=2,
            ),
        },
        optional={"tool_calls": JSON, "name": JSON, "type": JSON, "reasoning_content": JSON},
    ),
    max_size=3,
)
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace"])},
    optional={
        "name": JSON,
        "input_schema": JSON,
        "parameters": JSON,
        "function": JSON,
        "tools": JSON,
    },
)


@pytest.mark.parametrize("path", POSTS)
def test_no_body_makes_the_server_fail(server, path):
    names = st.sampled_from(sorted(BODIES[path].model_fields))
    plain = {"messages": HI["messages"], "prompt": "x", "input": "x", "max_tokens": 3}

    @settings(max_examples=60)
    @given(
        st.dictionaries(names, JSON, max_size=4),
        st.none() | MESSAGES,
        st.none() | st.lists(TOOL, max_size=2),
    )
    def ask(wrong, messages, tools):
        body = plain | wrong
        if messages is not None:
            body |= {"messages": messages, "input": messages}
        if tools is not None:
            body["tools"] = tools
        content = json.dumps(body).encode()
        answer = server.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), answer.text

    ask()

"""How much may be said to the server, and what it tells of itself."""

import asyncio
import json
import logging

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving import Says, a_desk, a_target, client

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

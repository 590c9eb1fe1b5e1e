"""Limits of requests, and the server's lists, metrics and logs."""

import json
import logging

import anyio
import make_docs
import pytest
from dialects import CHAT, HI, MESSAGES, ask, user
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from serving import FakeEngine, client, make_handler, models_of

from dflash_mlx.serve import body
from dflash_mlx.serve.generation_request import GenerationRequest
from dflash_mlx.serve.http_errors import RequestError
from dflash_mlx.serve.web_app import Endpoints

pytestmark = pytest.mark.anyio

# Path -> the class of its body, without the last one, that of /api/show.
BODIES = {body.__doc__.split()[1]: body for body in make_docs.BODIES[:-1]}
REQUEST = GenerationRequest("m", "Hi")
ASKED = ask(CHAT, max_tokens=3)
each_post = pytest.mark.parametrize("path", BODIES)


@each_post
def test_bodies_that_are_not_json_objects_are_refused(server, path):
    deep = b'{"a":' * 100_000
    bodies = [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": "\xed\xa0\x80"}', deep]
    for content in bodies:
        answer = server.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, content
    answer = server.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415  # what a form of another site could send


def test_errors_say_what_is_allowed_but_name_no_python_classes(server):
    def message(body):
        return server.post(CHAT, json=body).json()["error"]["message"]

    assert message([]) == "The body should be a JSON object."
    expected = "tool_choice: Input should be 'none', 'auto', 'required' or 'any', or an object"
    assert message(ASKED | {"tool_choice": "sometimes"}) == expected
    assert message(ASKED | {"messages": [5]}) == "messages.0: Input should be an object"
    assert message(ASKED | {"tool_choice": {}}).endswith("Field required")


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_a_body_without_the_type_of_json_is_refused_only_from_browsers(server, headers):
    """litellm and `curl -d` do not send the type. A browser always sends an origin.

    A page of another site could send such a body without asking the server first (CORS).
    """
    content = json.dumps(ASKED).encode()
    assert server.post(CHAT, content=content, headers=headers).status_code == 200
    from_page = headers | {"origin": "http://127.0.0.1:8000"}
    assert server.post(CHAT, content=content, headers=from_page).status_code == 415


@each_post
def test_validation_stops_at_the_first_wrong_item(path):
    """Pydantic would report one error for each item, of which there may be millions."""
    wrong = [0.5] * 20_000
    for name in BODIES[path].model_fields:
        for value in (wrong, [wrong], [{"content": wrong}]):
            try:
                BODIES[path].model_validate({name: value})
            except ValidationError as error:
                assert error.error_count() < 40, name


def test_a_body_that_is_too_large_is_refused(server, monkeypatch):
    monkeypatch.setattr(body, "MAX_BYTES", 1000)
    announced = server.post(CHAT, json=ASKED | {"x": "y" * 2000})
    kind = {"content-type": "application/json"}
    chunked = server.post(CHAT, content=iter([b"y" * 600] * 3), headers=kind)
    assert announced.status_code == chunked.status_code == 413


def test_a_body_that_arrives_too_slowly_is_refused(target, monkeypatch):
    """The application is called directly, because the test client sends a body at once."""
    monkeypatch.setattr(body, "MAX_SECONDS", 0.01)
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

    anyio.run(ask, client(FakeEngine(target)).app)
    assert sent[0]["status"] == 408


def test_unknown_paths_and_methods_are_errors_but_any_name_is_the_model(server):
    assert server.get("/v2/x").status_code == 404
    assert server.get("/v1/messages/x").json()["type"] == "error"
    assert server.get(CHAT).status_code == 405
    assert server.get("/v1/models/fake").json()["id"] == "fake"
    assert server.get("/models/other/name").json()["id"] == "fake"  # it answers under any name
    assert server.post(CHAT, json=ask(CHAT, model="gpt")).json()["model"] == "fake"
    (model,) = server.get("/v1/models").json()["data"]
    assert model["object"] == "model" and model["type"] == "model" and model["created_at"]


async def test_a_full_queue_answers_429(target):
    handler = make_handler(FakeEngine(target, ["Hello"], reason=None), capacity=2)

    stream = await handler.start([GenerationRequest("m", "Hi", n=2)])
    with pytest.raises(RequestError) as refused:
        await handler.start([REQUEST])
    assert refused.value.status == 429 and refused.value.headers["Retry-After"] == "2"
    stream.close()
    (await handler.start([REQUEST])).close()  # the slots are free again


async def test_requests_to_a_server_that_stops_are_refused(target):
    handler = make_handler(FakeEngine(target, ["Hello"], reason=None))
    models = models_of(handler)
    endpoints = Endpoints(models, handler.metrics)

    stream = await handler.start([REQUEST])
    assert (await endpoints.ready(None)).status_code == 200
    models.drain()
    assert (await endpoints.ready(None)).status_code == 503
    with pytest.raises(RequestError) as refused:
        await models.use("m")
    assert refused.value.status == 503 and refused.value.headers["Retry-After"]
    handler.abort()
    with pytest.raises(RequestError) as refused:
        async for _ in stream.steps():
            pass
    assert refused.value.status == 503 and not handler.busy


def test_the_page_may_run_only_its_own_scripts(server):
    answer = server.get("/", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 200 and server.head("/").status_code == 200
    assert server.get("/").text == "Ollama is running"  # Ollama's clients check for this
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy


def test_metrics_count_tokens_requests_and_resources(target):
    with client(FakeEngine(target, cached=2)) as server:
        usage = server.post(CHAT, json=ASKED).json()["usage"]
        server.post(CHAT, json={})
        text = server.get("/metrics").text
    metrics = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.removeprefix("dflash_").rpartition(" ")
            metrics[name] = float(value)
    expected = {
        "generation_tokens_total": usage["completion_tokens"],
        "prompt_tokens_total": usage["prompt_tokens"],
        "cached_tokens_total": 2,
        'responses_total{status="400"}': 1,
        "time_to_first_token_seconds_count": 1,
        # The fake engine reports these.
        "requests_running": 2,
        "requests_waiting": 3,
        "prefix_cache_bytes": 5,
    }
    assert {name: metrics[name] for name in expected} == expected
    for name in ("process_cpu_seconds", "process_peak_bytes", "device_bytes"):
        assert metrics[name] > 0


def test_logs_contain_no_prompts_answers_or_control_characters(target, caplog):
    secret = "Xyzzy-plugh"
    hi = ask(MESSAGES, user(secret))
    with caplog.at_level(logging.DEBUG), client(FakeEngine(target, [secret])) as server:
        server.post(CHAT, json=hi)
        server.post(MESSAGES, json=hi | {"stream": True})
        server.post(CHAT, json=hi | {"n": secret})
        server.get("/v1/%0aFAKE%1b[31m")
    assert caplog.records and secret not in caplog.text
    assert all(
        "\n" not in record.getMessage() and "\x1b" not in record.getMessage()
        for record in caplog.records
    )


TEXT = st.text(max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CONTENT = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "x"])},
        optional={"text": JSON, "content": JSON, "input": JSON, "name": JSON},
    ),
    max_size=2,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": CONTENT},
        optional={"tool_calls": JSON, "name": JSON, "type": JSON, "reasoning_content": JSON},
    ),
    max_size=3,
)


@each_post
def test_no_body_makes_the_server_fail(server, path):
    names = st.sampled_from(sorted(BODIES[path].model_fields))
    plain = {"messages": HI, "prompt": "x", "input": "x", "max_tokens": 3, "model": "m"}

    @settings(max_examples=60)
    @given(st.dictionaries(names, JSON, max_size=4), st.none() | TURNS)
    def send(wrong, messages):
        content = plain | wrong
        if messages is not None:
            content |= {"messages": messages, "input": messages}
        text = json.dumps(content).encode()
        answer = server.post(path, content=text, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), answer.text

    send()

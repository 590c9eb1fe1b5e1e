"""The server on a socket: clients that disconnect, shutdown, and loading."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import pytest
from dialects import CHAT, MESSAGES, RESPONSES, ask
from serving import FakeEngine, frames, make_handler, post, running

from dflash_mlx.prompt import branch_points
from dflash_mlx.serve import server as server_module
from dflash_mlx.serve import sse
from dflash_mlx.serve.generation_request import GenerationRequest
from dflash_mlx.serve.messages import MessagesResponse
from dflash_mlx.serve.openai_chat import ChatResponse

pytestmark = pytest.mark.anyio

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(path=CHAT, **more):
    content = json.dumps(ask(path, **more)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def connect(server, content=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(content)
    await writer.drain()
    return reader, writer


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def first_line(server, content):
    """The first line of a response, after which the client disconnects."""
    reader, writer = await connect(server, content)
    async with asyncio.timeout(20):
        line = await reader.readline()
    writer.close()
    return line.decode()


@pytest.fixture
def endless(target):
    """An engine whose answers never end."""
    return FakeEngine(target, ["Hello"], reason=None)


@asynccontextmanager
async def answering(engine, **more):
    """A server that is answering a request, and the client's reader of the answer."""
    async with running(engine, **more) as server:
        reader, writer = await connect(server, request(stream=True))
        await until(lambda: server.handler.busy)
        yield server, reader
        writer.close()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_its_slot(endless, path, stream):
    async with running(endless) as server:
        _, writer = await connect(server, request(path, stream=stream))
        await until(lambda: server.handler.busy)
        writer.close()
        await until(lambda: not server.handler.busy)
        assert endless.jobs[0].cancelled


async def test_more_answers_than_the_limit_get_503(endless, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)

    async with running(endless) as server:
        busy = [await connect(server, request(stream=True)) for _ in range(3)]
        await until(lambda: len(server.server_state.tasks) == 3)
        assert (await first_line(server, request(stream=True))).startswith("HTTP/1.1 503")
        for _, writer in busy:
            writer.close()
        await until(lambda: not server.server_state.connections)
        assert (await first_line(server, HEALTH)).startswith("HTTP/1.1 200")


async def test_the_size_of_headers_is_limited(engine):
    async with running(engine) as server:
        assert " 400 " in await first_line(server, b"GET / HTTP/1.1\r\nX: " + b"y" * 2**17)
        assert " 200 " in await first_line(server, request(x="y" * 2**17))  # a body may be longer


async def test_a_request_that_starts_slowly_does_not_block_others(engine, monkeypatch):
    started = threading.Event()
    may_continue = threading.Event()
    submit = engine.submit

    def submit_slowly(*arguments, **settings):
        started.set()
        assert may_continue.wait(20)
        return submit(*arguments, **settings)

    monkeypatch.setattr(engine, "submit", submit_slowly)
    async with running(engine) as server:
        reader, writer = await connect(server, request())
        await until(started.is_set)
        assert " 200 " in await first_line(server, HEALTH)
        may_continue.set()
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_a_server_that_stops_lets_answers_run_for_a_while_and_then_says_why_they_end(endless):
    async with answering(endless) as (server, reader):
        server.stop()
        text = (await reader.read()).decode()
        assert "Hello" in text and "shutting down" in text
        await server.task
        with pytest.raises(OSError):
            await connect(server)


async def test_a_second_stop_ends_at_once(endless):
    async with answering(endless, drain_seconds=600) as (server, _):
        server.stop()
        server.stop()
        async with asyncio.timeout(20):
            await server.task
        assert endless.jobs[0].cancelled


async def test_while_the_model_loads_only_health_is_ok(engine):
    """Other paths ask clients to come back later."""
    async with running(engine, loaded=False) as server:
        assert " 200 " in await first_line(server, HEALTH)
        for path in ("/ready", "/", "/v1/models", MESSAGES):
            content = request(path)
            if path != MESSAGES:
                content = HEALTH.replace(b"/health", path.encode())
            reader, writer = await connect(server, content)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            writer.close()
            assert " 503 " in head and "retry-after: 2" in head


STEPS = ["Hel", "lo", " wor", "ld"]


@pytest.mark.parametrize(
    ("response_class", "argument", "other_pieces"),
    # Chat sends the role before the steps, and the usage with the end after them.
    [(ChatResponse, True, 2), (MessagesResponse, "r", 0)],
    ids=["chat", "messages"],
)
async def test_each_step_is_sent_in_one_piece(target, response_class, argument, other_pieces):
    """Even if a step has several events."""
    stream = await make_handler(FakeEngine(target, STEPS)).start([GenerationRequest("m", "Hi")])
    pieces = [piece async for piece in response_class(stream, argument).frames()]
    assert len(pieces) == len(STEPS) + other_pieces
    ids = {frame["id"] for frame in frames(b"".join(pieces).decode()) if "id" in frame}
    assert len(ids) == (1 if response_class is ChatResponse else 0)


async def test_a_client_that_stops_reading_is_disconnected(engine, monkeypatch):
    """The engine has finished its answer before, so it holds no slot while it does not read."""

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message.get("body"):
            await asyncio.Event().wait()

    handler = make_handler(engine)
    monkeypatch.setattr(sse, "WRITE_SECONDS", 0.01)
    response = ChatResponse(await handler.start([GenerationRequest("m", "Hi")]), False)
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    stream = asyncio.create_task(sse.EventStream(response)(scope, receive, send))
    await handler.idle.wait()
    await stream


def test_the_engine_is_told_where_prompts_of_a_chat_may_branch(engine):
    """A prefix cache keeps checkpoints there."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    post(engine, CHAT, {"messages": chat})
    prompt, _ = engine.submitted[0]
    expected = branch_points(engine.target, prompt=chat, ids=prompt, template={})
    assert expected and engine.branches == expected

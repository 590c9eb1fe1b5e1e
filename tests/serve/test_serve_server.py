"""The server on a socket: clients that leave, shutdown, and the time while the model loads."""

import asyncio
import json
import threading

import pytest
from serving import FakeEngine, running

from dflash_mlx.errors import ServerError
from dflash_mlx.serve import server as server_module
from dflash_mlx.serve.server import listen

pytestmark = pytest.mark.anyio

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(path="/v1/chat/completions", **more):
    body = {"messages": [{"role": "user", "content": "Hi"}], **more}
    content = json.dumps(body).encode()
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(target, path, stream):
    engine = FakeEngine(target, ["Hello"], reason=None)
    async with running(engine) as server:
        more = {"input": "Hi"} if path == "/v1/responses" else {"max_tokens": 9}
        _, writer = await connect(server, post(path, stream=stream, **more))
        await until(lambda: server.handler.busy)
        writer.close()
        await until(lambda: not server.handler.busy)
        assert engine.jobs[0].cancelled


async def test_more_answers_than_the_limit_get_503(target, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)

    async with running(FakeEngine(target, ["Hello"], reason=None)) as server:
        busy = [await connect(server, post(stream=True)) for _ in range(3)]
        await until(lambda: len(server.server_state.tasks) == 3)
        reader, writer = await connect(server, post(stream=True))
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        for _, one in [*busy, (reader, writer)]:
            one.close()
        await until(lambda: not server.server_state.connections)
        reader, writer = await connect(server, HEALTH)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_headers_are_bounded(target):
    async with running(FakeEngine(target)) as server:
        reader, writer = await connect(server, b"GET / HTTP/1.1\r\nX: " + b"y" * 2**17)
        assert b" 400 " in await reader.readline()
        writer.close()
        reader, writer = await connect(server, post(x="y" * 2**17))  # a body may be longer
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_request_that_starts_slowly_does_not_block_others(target):
    class Slow(FakeEngine):
        def submit(self, prompt, **settings):
            begun.set()
            assert go_on.wait(20)
            return super().submit(prompt, **settings)

    begun, go_on = threading.Event(), threading.Event()

    async with running(Slow(target)) as server:
        reader, writer = await connect(server, post())
        await until(begun.is_set)
        other, health = await connect(server, HEALTH)
        async with asyncio.timeout(20):
            assert (await other.readline()).startswith(b"HTTP/1.1 200")
        go_on.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        health.close()


async def test_a_server_that_stops_gives_answers_time_and_then_says_why(target):
    async with running(FakeEngine(target, ["Hello"], reason=None)) as server:
        reader, writer = await connect(server, post(stream=True))
        await until(lambda: server.handler.busy)
        server.stop()
        text = (await reader.read()).decode()
        assert "Hello" in text and "shutting down" in text
        await server.task
        writer.close()
        with pytest.raises(OSError):
            await connect(server)


async def test_a_second_stop_ends_at_once(target):
    engine = FakeEngine(target, ["Hello"], reason=None)
    async with running(engine, drain_seconds=600) as server:
        _, writer = await connect(server, post(stream=True))
        await until(lambda: server.handler.busy)
        server.stop()
        server.stop()
        async with asyncio.timeout(20):
            await server.task
        assert engine.jobs[0].cancelled
        writer.close()


def test_a_port_that_is_taken_or_a_host_of_another_machine():
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ServerError, match="--port"):
            listen("127.0.0.1", taken.getsockname()[1])
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(ServerError, match="--host"):
            listen(host, 0)


async def test_while_the_model_loads_the_server_says_so(target):
    async with running(FakeEngine(target), loaded=False) as server:
        heads = {}
        for path in ("/health", "/ready", "/", "/v1/models", "/v1/messages"):
            request = post(path) if path.endswith("messages") else HEALTH
            request = request.replace(b"/health", path.encode())
            reader, writer = await connect(server, request)
            heads[path] = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            writer.close()
        assert " 200 " in heads.pop("/health")
        for head in heads.values():
            assert " 503 " in head and "retry-after: 2" in head

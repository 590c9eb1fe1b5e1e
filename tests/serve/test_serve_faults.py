"""What goes wrong with connections: half heads, silence, those who leave, the server's own end."""

import asyncio
import json
import socket
import threading
from dataclasses import replace

import pytest
from serving import LIMITS, Says, a_desk, a_target, running

from dflash_mlx.errors import ServerError
from dflash_mlx.events import Event
from dflash_mlx.serve.ask import Ask
from dflash_mlx.serve.body import Bounds
from dflash_mlx.serve.run import listen


@pytest.fixture(scope="module")
def target():
    return a_target()


def post(path="/v1/chat/completions", **more):
    body = {"messages": [{"role": "user", "content": "Hi"}], **more}
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


SOON = replace(LIMITS, head_seconds=0.2)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def opened(server, content=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(content)
    await writer.drain()
    return reader, writer


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def gone(reader):
    """Whether the server closes a connection."""
    async with asyncio.timeout(20):
        try:
            while await reader.read(65536):
                pass
        except ConnectionError:
            pass
    return True


def test_half_heads_are_closed_and_hold_up_nobody(target):
    async def faults():
        async with running(Says(target), replace(SOON, connections=20)) as server:
            halves = [await opened(server, b"POST /v1/messages HT") for _ in range(60)]
            reader, writer = await opened(server, HEALTH)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert all([await gone(one) for one, _ in halves])
            await until(lambda: len(server.server_state.connections) <= 1)
            writer.close()
            for _, half in halves:
                half.close()

    asyncio.run(faults())


def test_in_a_crowd_the_longest_silent_goes_and_whoever_asks_is_answered(target):
    async def faults():
        limits = replace(LIMITS, connections=10)
        async with running(Says(target), limits) as server:
            crowd = await asyncio.gather(*(opened(server) for _ in range(100)))
            await until(lambda: sum(one.at_eof() for one, _ in crowd) == 90)
            assert not any(one.at_eof() for one, _ in crowd[90:])
            reader, writer = await opened(server, HEALTH)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            for one in (writer, *(writer for _, writer in crowd)):
                one.close()

    asyncio.run(faults())


def test_who_speaks_is_heard_in_a_crowd_that_says_nothing(target):
    """A question that comes with a crowd of the same moment is read before the crowd is shed."""

    async def faults():
        limits = replace(LIMITS, connections=40)
        async with running(Says(target), limits) as server:
            # All of them are there before the server takes the first one.
            crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
            asker = crowd[100]
            asker.sendall(HEALTH)
            asker.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(20):
                assert (await loop.sock_recv(asker, 100)).startswith(b"HTTP/1.1 200")
            for one in crowd:
                one.close()

    asyncio.run(faults())


class Talks(Says):
    """Says more than sockets hold."""

    def _events(self, stats):
        for _ in range(20):
            yield Event("x" * 2**20, [65], 0, 0, None, stats)


def test_a_client_that_reads_nothing_of_its_answer_is_closed(target):
    async def faults():
        limits = replace(LIMITS, unread_seconds=0.1)
        engine = Talks(target, reason=None)
        async with running(engine, limits) as server:
            _, writer = await opened(server, post(stream=True))
            writer.transport.pause_reading()
            await until(lambda: server.desk.busy)
            await until(lambda: not server.desk.busy)
            assert engine.jobs[0].cancelled
            writer.close()

    asyncio.run(faults())


def test_silent_connections_are_closed_when_their_time_is_over(target):
    async def faults():
        async with running(Says(target), SOON) as server:
            crowd = [await opened(server) for _ in range(3)]
            assert all([await gone(one) for one, _ in crowd])
            for _, writer in crowd:
                writer.close()

    asyncio.run(faults())


def test_a_half_head_may_be_the_second_of_a_connection(target):
    async def faults():
        async with running(Says(target), replace(SOON, head_seconds=2)) as server:
            reader, writer = await opened(server, HEALTH)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.write(b"GET /heal")
            assert await gone(reader)
            writer.close()

    asyncio.run(faults())


def test_a_head_has_an_end(target):
    async def faults():
        limits = replace(LIMITS, head_bytes=1000)
        async with running(Says(target), limits) as server:
            reader, writer = await opened(server, b"GET / HTTP/1.1\r\nX: " + b"y" * 5000)
            assert await gone(reader)
            writer.close()
            reader, writer = await opened(server, post(x="y" * 5000))  # a body may be longer
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(faults())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_frees_the_slot(target, path, stream):
    async def faults():
        engine = Says(target, ["Hello"], reason=None)
        async with running(engine) as server:
            body = post(path, stream=stream, max_tokens=9, input="Hi")
            if path == "/v1/responses":
                body = post(path, stream=stream, input="Hi")
            _, writer = await opened(server, body)
            await until(lambda: server.desk.busy)
            writer.close()
            await until(lambda: not server.desk.busy)
            assert engine.jobs[0].cancelled

    asyncio.run(faults())


def test_hundreds_who_leave_leave_nothing_behind(target):
    async def faults():
        engine = Says(target, ["Hello"], reason=None)
        async with running(engine) as server:
            for _ in range(10):
                clients = [await opened(server, post(stream=True)) for _ in range(20)]
                for _, writer in clients:
                    writer.close()
                await until(lambda: not server.desk.busy)
            await until(lambda: all(job.cancelled for job in engine.jobs))
            reader, writer = await opened(server, HEALTH)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()
            await until(lambda: not server.server_state.tasks and not server.desk.busy)
            assert all(job.cancelled for job in engine.jobs)

    asyncio.run(faults())


def test_what_is_slow_to_begin_holds_up_nobody(target):
    """A long prompt, a grammar: while one request is worked out, others are answered."""

    class Slow(Says):
        def submit(self, prompt, **settings):
            begun.set()
            assert go_on.wait(20)
            return super().submit(prompt, **settings)

    begun, go_on = threading.Event(), threading.Event()

    async def faults():
        async with running(Slow(target)) as server:
            reader, writer = await opened(server, post())
            await until(begun.is_set)
            other, health = await opened(server, HEALTH)
            async with asyncio.timeout(20):
                assert (await other.readline()).startswith(b"HTTP/1.1 200")
            go_on.set()
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            for one in (writer, health):
                one.close()

    asyncio.run(faults())


def test_who_is_given_up_before_it_began_leaves_nothing(target):
    async def faults():
        engine = Says(target, ["Hello"], reason=None)
        desk = a_desk(engine)
        asking = asyncio.create_task(desk.ask(Ask("m", "Hi")))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: all(job.cancelled for job in engine.jobs))
        desk.abandon()
        answering = await desk.ask(Ask("m", "Hi"))
        assert engine.jobs[-1].cancelled and not desk.busy and answering

    asyncio.run(faults())


def test_large_bodies_are_bounded_together_until_they_are_answered(target):
    async def faults():
        bounds = Bounds(together=1500, alone=500)
        large = post(stream=True, x="y" * 1500)

        async def told(content):
            reader, writer = await opened(server, content)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            return head, reader, writer

        async with running(Says(target, reason=None), bounds=bounds) as server:
            _, first = await opened(server, large[:-9])
            while "200" in (found := await told(large))[0]:  # until the first one is read
                found[2].close()
                await until(lambda: not server.desk.busy)
            assert " 503 " in found[0] and "retry-after: 2" in found[0]
            claude = post("/v1/messages", stream=True, max_tokens=9, x="y" * 1500)
            head, reader, writer = await told(claude)
            assert " 503 " in head and b"overloaded_error" in await reader.read(999)
            first.write(large[-9:])  # it is read, but not answered
            await until(lambda: server.desk.busy)
            assert " 503 " in (await told(large))[0]
            assert " 200 " in (await told(post(stream=True)))[0]
            first.close()
            await until(lambda: len(server.desk._answering) <= 1)
            while " 503 " in (await told(large))[0]:
                pass

    asyncio.run(faults())


def test_told_to_end_it_gives_answers_time_and_then_says_why(target):
    async def faults():
        async with running(Says(target, ["Hello"], reason=None)) as server:
            reader, writer = await opened(server, post(stream=True))
            await until(lambda: server.desk.busy)
            server.handle_exit(15, None)
            text = (await reader.read()).decode()
            assert "Hello" in text and "shutting down" in text
            await server.task
            writer.close()
            with pytest.raises(OSError):
                await opened(server)

    asyncio.run(faults())


def test_told_twice_it_ends_at_once(target):
    async def faults():
        limits = replace(LIMITS, drain_seconds=600)
        async with running(Says(target, ["Hello"], reason=None), limits) as server:
            reader, writer = await opened(server, post(stream=True))
            await until(lambda: server.desk.busy)
            server.handle_exit(15, None)
            server.handle_exit(15, None)
            assert await gone(reader)
            async with asyncio.timeout(20):
                await server.task
            writer.close()

    asyncio.run(faults())


def test_a_port_that_is_taken_or_a_host_that_is_not_ours():
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ServerError, match="--port"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ServerError, match="--host"):
        listen("192.0.2.1", 0)
    with pytest.raises(ServerError, match="--host"):
        listen("no such host", 0)


def test_while_the_model_loads_it_says_so(target):
    async def faults():
        async with running(Says(target), loaded=False) as server:
            told = {}
            for path in ("/health", "/ready", "/", "/v1/models", "/v1/messages"):
                request = post(path) if path.endswith("messages") else HEALTH
                request = request.replace(b"/health", path.encode())
                reader, writer = await opened(server, request)
                told[path] = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                writer.close()
            assert " 200 " in told["/health"]
            for path in set(told) - {"/health"}:
                assert " 503 " in told[path] and "retry-after: 2" in told[path]

    asyncio.run(faults())

"""What goes over the wire of a stream: frames in few pieces, pings where it is silent."""

import asyncio
import json

from serving import Says, a_desk, a_target, frames

from dflash_mlx.serve import chat_answers, messages_answers
from dflash_mlx.serve.ask import Ask
from dflash_mlx.serve.sse import COMMENT, Chunks, EventStream, frame


async def sent(stream):
    """The pieces in which a stream goes out."""
    pieces = []

    async def receive():
        await asyncio.sleep(3600)

    async def send(message):
        if message["type"] == "http.response.body":
            pieces.append(message["body"])

    await stream({"type": "http"}, receive, send)
    return pieces


def test_a_round_is_one_piece():
    """And none of them is a task: what the loop runs for a stream does not grow with its rounds."""
    rounds = ["Hel", "lo", " wor", "ld"]
    target = a_target()

    async def ask(make):
        before = len(asyncio.all_tasks())
        answering = await a_desk(Says(target, rounds)).ask(Ask("m", "Hi"))
        most = 0

        async def watched():
            nonlocal most
            async for one in make(answering):
                most = max(most, len(asyncio.all_tasks()) - before)
                yield one

        return await sent(EventStream(watched(), COMMENT, answering.leave)), most

    pieces, tasks = asyncio.run(ask(lambda one: chat_answers.stream(one, True)))
    assert len(pieces) == len(rounds) + 3  # the role, the usage with the end, and nothing
    told = frames(b"".join(pieces).decode())
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in told[:-1])
    assert text == "Hello world" and tasks <= 2
    assert {one["id"] for one in told} == {told[0]["id"]}
    pieces, tasks = asyncio.run(ask(lambda one: messages_answers.stream(one, "r")))
    assert len(pieces) == len(rounds) + 2 and tasks <= 2


def test_a_silent_stream_pings():
    left = []

    async def told():
        ping = asyncio.Event()

        async def silent():
            yield b"one"
            await ping.wait()
            yield b"two"

        stream = EventStream(silent(), COMMENT, lambda: left.append(True), seconds=0.001)
        asyncio.get_running_loop().call_later(0.1, ping.set)
        return await sent(stream)

    pieces = asyncio.run(told())
    assert pieces[0] == b"one" and pieces[-2:] == [b"two", b""] and left
    assert set(pieces[1:-2]) == {COMMENT}


def test_chunks_are_frames_of_the_whole_object():
    head, rest = {"id": "é", "n": 1.5}, {"choices": [{"text": '"\n'}]}
    both = Chunks(head).frame(rest)
    assert both == frame(head | rest) and both.endswith(b"\n\n")
    assert json.loads(both.removeprefix(b"data: ")) == head | rest

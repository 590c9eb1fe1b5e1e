"""Server-sent events: one piece per step."""

import asyncio

from serving import FakeEngine, frames, make_handler, make_target

from dflash_mlx.serve import chat, messages
from dflash_mlx.serve.request import GenerationRequest
from dflash_mlx.serve.sse import EventStream


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


def test_a_step_is_one_piece():
    steps = ["Hel", "lo", " wor", "ld"]

    async def ask(respond, more):
        handler = make_handler(FakeEngine(make_target(), steps))
        streams = await handler.start([GenerationRequest("m", "Hi")])
        return await sent(EventStream(respond(streams, more)))

    pieces = asyncio.run(ask(chat.ChatResponse, True))
    assert len(pieces) == len(steps) + 3  # the role, the usage with the end, and nothing
    chunks = frames(b"".join(pieces).decode())
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks[:-1])
    assert text == "Hello world"
    assert {one["id"] for one in chunks} == {chunks[0]["id"]}
    pieces = asyncio.run(ask(messages.MessagesResponse, "r"))
    assert len(pieces) == len(steps) + 1

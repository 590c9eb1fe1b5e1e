"""Server-sent events: one piece per step."""

import asyncio

import pytest
from serving import FakeEngine, frames, make_handler, post

from dflash_mlx.prompt import branch_points
from dflash_mlx.serve import sse
from dflash_mlx.serve.chat import ChatResponse
from dflash_mlx.serve.messages import MessagesResponse
from dflash_mlx.serve.request import GenerationRequest

pytestmark = pytest.mark.anyio

STEPS = ["Hel", "lo", " wor", "ld"]


@pytest.mark.parametrize(
    ("respond", "more", "others"),
    [(ChatResponse, True, 2), (MessagesResponse, "r", 0)],  # the role, and the usage with the end
    ids=["chat", "messages"],
)
async def test_a_step_is_one_piece(target, respond, more, others):
    stream = await make_handler(FakeEngine(target, STEPS)).start([GenerationRequest("m", "Hi")])
    found = [piece async for piece in respond(stream, more).frames()]
    assert len(found) == len(STEPS) + others
    ids = {one["id"] for one in frames(b"".join(found).decode()) if "id" in one}
    assert len(ids) == (respond is ChatResponse)


async def test_a_client_that_stops_reading_is_left(target, monkeypatch):
    """Its answer had ended for the engine before, and holds none of its slots."""

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        if message.get("body"):
            await asyncio.Event().wait()

    handler = make_handler(FakeEngine(target, STEPS))
    monkeypatch.setattr(sse, "WRITE_SECONDS", 0.01)
    response = ChatResponse(await handler.start([GenerationRequest("m", "Hi")]), False)
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    stream = asyncio.create_task(sse.EventStream(response)(scope, receive, send))
    await handler.idle.wait()
    await stream


def test_the_branches_of_a_chat_reach_the_engine(engine):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    post(engine, "/v1/chat/completions", {"messages": chat})
    prompt, _ = engine.submitted[0]
    assert engine.branches == branch_points(engine.target, chat, prompt, {}) != []

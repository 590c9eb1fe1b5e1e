"""Server-sent events: one piece per step."""

import asyncio

import pytest
from serving import FakeEngine, frames, make_handler

from dflash_mlx.serve.chat import ChatResponse
from dflash_mlx.serve.messages import MessagesResponse
from dflash_mlx.serve.request import GenerationRequest

STEPS = ["Hel", "lo", " wor", "ld"]


@pytest.mark.parametrize(
    ("respond", "more", "others"),
    [(ChatResponse, True, 2), (MessagesResponse, "r", 0)],  # the role, and the usage with the end
    ids=["chat", "messages"],
)
def test_a_step_is_one_piece(target, respond, more, others):
    async def pieces():
        streams = await make_handler(FakeEngine(target, STEPS)).start(
            [GenerationRequest("m", "Hi")]
        )
        return [piece async for piece in respond(streams, more).frames()]

    found = asyncio.run(pieces())
    assert len(found) == len(STEPS) + others
    ids = {one["id"] for one in frames(b"".join(found).decode()) if "id" in one}
    assert len(ids) == (respond is ChatResponse)

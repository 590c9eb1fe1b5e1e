"""Ollama's own client, from PyPI, over a fake engine."""

import asyncio
import json

import pytest
from demands import closed_object
from dialects import HI
from serving import FakeEngine, make_target, running

CITY = {"city": "Oslo"}
SCHEMA = closed_object(city={"type": "string"})
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = {"name": "weather", "arguments": CITY}


class AnsweringEngine(FakeEngine):
    """Answers a schema with JSON, calls the tool if there is one, and otherwise says hello."""

    def submit(self, prompt, **settings):
        self.steps = ["Hello", " world."]
        if "logits_processors" in settings:
            self.steps = [json.dumps(CITY)]
        elif '"name": "weather"' in self.target.tokenizer.decode(prompt):
            self.steps = [f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"]
        return super().submit(prompt, **settings)


def check_answers(client):
    assert client.chat("fake", HI).message.content == "Hello world."
    pieces = [chunk.message.content for chunk in client.chat("fake", HI, stream=True)]
    assert [piece for piece in pieces if piece] == ["Hello", " world."]
    [call] = client.chat("fake", HI, tools=[TOOL]).message.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("weather", CITY)
    assert json.loads(client.chat("fake", HI, format=SCHEMA).message.content) == CITY
    assert client.generate("fake", "Hi").response == "Hello world."
    assert [model.model for model in client.list().models] == ["fake"]
    assert client.show("fake").modelinfo["llama.context_length"] == 2**20


@pytest.mark.agents
def test_the_client_of_ollama():
    ollama = pytest.importorskip("ollama")

    async def serve_and_check():
        async with running(AnsweringEngine(make_target("json_tools"))) as server:
            client = ollama.Client(f"http://127.0.0.1:{server.port}")
            await asyncio.to_thread(check_answers, client)

    asyncio.run(serve_and_check())

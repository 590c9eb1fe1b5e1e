"""Real clients of Ollama's API, from PyPI (PYTHONPATH) and npm (NODE_PATH), over a fake engine."""

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, make_target, running

FOLDER, MODULES = Path(__file__).parent, Path(os.environ.get("NODE_PATH", ""))
CLIENTS = {  # name -> whether it is for node
    "ollama": False,
    "langchain_ollama": False,
    "litellm": False,
    "ollama for node": True,
    "ollama-ai-provider-v2 for node": True,
}
CITY = {"city": "Oslo"}
CALL = {"name": "weather", "arguments": CITY}


class Talkative(FakeEngine):
    """Answers a schema with JSON, calls the tool if there is one, and else says hello."""

    def submit(self, prompt, **settings):
        self.steps = ["Hello", " world."]
        if "logits_processors" in settings:
            self.steps = [json.dumps(CITY)]
        elif '"name": "weather"' in self.target.tokenizer.decode(prompt):
            self.steps = [f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"]
        return super().submit(prompt, **settings)


@pytest.mark.agents
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_ollama(client):
    name = client.split()[0]
    if not ((MODULES / name).is_dir() if CLIENTS[client] else find_spec(name)):
        pytest.skip(f"{name} is not installed")
    script = "ollama_clients.mjs" if CLIENTS[client] else "ollama_clients.py"
    program = "node" if CLIENTS[client] else sys.executable

    async def talk():
        async with running(Talkative(make_target(json_tools))) as server:
            command = [program, FOLDER / script, f"http://127.0.0.1:{server.port}", name]
            pipe = asyncio.subprocess.PIPE
            environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            process = await asyncio.create_subprocess_exec(
                *command, stdout=pipe, stderr=pipe, env=environment
            )
            async with asyncio.timeout(120):
                said, told = await process.communicate()
            assert process.returncode == 0, told.decode()
            return json.loads(said.splitlines()[-1])

    heard = asyncio.run(talk())
    assert heard["chat"] == "".join(heard["stream"]) == "Hello world."
    assert len([one for one in heard["stream"] if one]) == 2
    assert heard["call"] == ["weather", CITY] and json.loads(heard["schema"]) == CITY
    assert heard.get("generate", "Hello world.") == "Hello world."
    assert heard.get("models", ["fake"]) == ["fake"] and heard.get("context", 2**20) == 2**20

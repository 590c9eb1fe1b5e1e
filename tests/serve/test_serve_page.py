"""The page in a real browser: chat, race, stop, conversations, tabs, storage, dark, narrow."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from serving import FakeEngine, make_target, running

SCRIPT = Path(__file__).with_name("page.mjs")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MODULES = Path(os.environ.get("NODE_PATH", "")) / "playwright-core"


class Patient(FakeEngine):
    """Answers, unless it is told to wait."""

    def submit(self, prompt, **settings):
        waits = "Wait for ever" in self.target.tokenizer.decode(prompt)
        self.reason = None if waits else "stop"
        return super().submit(prompt, **settings)


@pytest.mark.browser
def test_the_page_in_a_browser(tmp_path):
    if CHROMIUM is None or not MODULES.is_dir() or shutil.which("node") is None:
        pytest.skip("needs Chromium, node, and npm's playwright-core below NODE_PATH")

    async def look():
        engine = Patient(make_target(), ["It", " is", " 8", "5."])
        async with running(engine) as server:
            command = ["node", SCRIPT, f"http://127.0.0.1:{server.port}/", CHROMIUM, tmp_path]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            async with asyncio.timeout(180):
                said, told = await process.communicate()
            assert process.returncode == 0, told.decode()
            return json.loads(said), engine

    seen, engine = asyncio.run(look())
    assert seen["errors"] == [] and seen["foreign"] == []
    assert seen["answer"] == "It is 85." and seen["rounds"] == 4 == seen["colors"]
    assert "tokens per step" in seen["speed"] and "the same text" in seen["race"]
    assert "block_size" not in engine.submitted[0][1] and engine.submitted[1][1]["block_size"] == 1
    assert seen["sending"] and engine.jobs[2].cancelled
    assert seen["conversations"] == 2 and seen["reloaded"][0] == 2
    assert seen["both"] == ["tab one asks", "tab two asks"] and seen["forked"] == 2
    assert "it is full" in seen["unkept"] and seen["still"] == "not kept"
    assert seen["damaged"] == "It is 85."
    assert seen["dark"] == "rgb(24, 24, 26)" and seen["width"] <= 380 and seen["menu"]

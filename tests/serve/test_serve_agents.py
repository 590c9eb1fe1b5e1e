"""The coding agents that people have, from npm, through `dflash-mlx launch`: two turns each.

The model is fake: it looks at an image, reads the prompt after it for `SECONDS`, writes a call of
the agent's shell for as long, and answers. Templates, APIs, sockets and agents are real.
"""

import asyncio
import base64
import json
import os
import shutil
import signal
import sys

import pytest
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, FakeJob, make_target, running

from dflash_mlx.cli.launch import PACKAGES, Agent

SECONDS = 60
SECRET, PICTURE = "4711", "picture.png"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
SHELLS = {  # of each agent: its name, and what it is to run
    "Bash": {"command": f"echo {SECRET}"},
    "exec_command": {"cmd": f"echo {SECRET}"},
    "bash": {"command": f"echo {SECRET}", "description": "Say a number"},
}
VIEWERS = {"Read": "file_path", "view_image": "path", "read": "filePath"}
CODEX = ["exec", "-cmodel_providers.dflash.stream_idle_timeout_ms=15000"]
COMMANDS = {  # of each agent: to begin, and to go on
    "claude": (["-p", "--allowedTools", "Bash,Read", "--"], ["-c", "-p"]),
    "codex": (
        [*CODEX, "--skip-git-repo-check"],
        [*CODEX, "resume", "--last", "--skip-git-repo-check"],
    ),
    "opencode": (["run"], ["run", "-c"]),
}


class SlowJob(FakeJob):
    """Begins after `SECONDS`, and takes as long for its text."""

    async def __aiter__(self):
        await asyncio.sleep(SECONDS)
        async for event in super().__aiter__():
            await asyncio.sleep(SECONDS / len(self.events))
            yield event


class Patience(FakeEngine):
    """Looks at the picture, calls the shell slowly, and says what came of it."""

    def submit(self, prompt, **settings):
        text = self.target.tokenizer.decode(prompt)
        turn = text.rpartition("say hello")[2]
        shell, viewer = (
            next((name for name in names if f'"name": "{name}"' in text), None)
            for names in (SHELLS, VIEWERS)
        )
        call = None
        if viewer and f"[{viewer} " not in turn:
            call = {"name": viewer, "arguments": {VIEWERS[viewer]: self.picture}}
        elif shell and SECRET not in turn:
            call = {"name": shell, "arguments": SHELLS[shell]}
        self.steps = ["Done: ", f"hello {SECRET}."]
        if call is not None:
            text = f"Let me see.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
            self.steps = [text[at : at + 4] for at in range(0, len(text), 4)]
        job = super().submit(prompt, **settings)
        if call is not None and call["name"] == shell:
            job = self.jobs[-1] = SlowJob(job.events)
        return job


async def run(agent, port, arguments, folder):
    """The exit code, the output and the messages of an agent."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dflash_mlx", "launch", agent, "--port", str(port), "--"),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(600):
            said, told = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # the agent, which launch has started
    return process.returncode, said.decode(), told.decode()


@pytest.mark.agents
@pytest.mark.parametrize("agent", COMMANDS)
def test_an_agent_ends_its_turns(agent, tmp_path):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed: npm install -g {PACKAGES[Agent(agent)]}")
    (tmp_path / PICTURE).write_bytes(PNG)

    async def turns():
        engine = Patience(make_target(json_tools))
        engine.picture = str(tmp_path / PICTURE)
        async with running(engine) as server:
            for arguments in COMMANDS[agent]:
                code, said, told = await run(
                    agent, server.port, [*arguments, "say hello"], tmp_path
                )
                assert code == 0, told
                assert f"Done: hello {SECRET}." in said, told
                # opencode sends no image to a model of which it knows nothing.
                assert "this model reads text only" in engine.prompt() or agent == "opencode"

    asyncio.run(turns())

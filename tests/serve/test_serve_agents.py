"""The coding agents that people have, from npm, through `dflash-mlx launch`: a turn with a tool.

The model is fake and always calls the agent's shell first. Templates, APIs, sockets and agents are
real.
"""

import asyncio
import json
import os
import shutil
import signal
import sys

import pytest
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, make_target, running

from dflash_mlx.cli.launch import PACKAGES, Agent

SECRET = "4711"
SHELLS = {  # of each agent: its name, and what it is to run
    "Bash": {"command": f"echo {SECRET}"},
    "exec_command": {"cmd": f"echo {SECRET}"},
    "bash": {"command": f"echo {SECRET}", "description": "Say a number"},
}
COMMANDS = {
    "claude": ["-p", "say hello", "--allowedTools", "Bash"],
    "codex": ["exec", "--skip-git-repo-check", "say hello"],
    "opencode": ["run", "say hello"],
}


class CallsItsShell(FakeEngine):
    """Runs a command, and says what came of it."""

    def submit(self, prompt, **settings):
        text = self.target.tokenizer.decode(prompt)
        shell = next((name for name in SHELLS if f'"name": "{name}"' in text), None)
        if shell is None or SECRET in text.rpartition("say hello")[2]:
            self.steps = ["Done: ", f"hello {SECRET}."]
        else:
            call = json.dumps({"name": shell, "arguments": SHELLS[shell]})
            self.steps = ["Let me see.\n<tool_", f"call>\n{call}", "\n</tool_call>"]
        return super().submit(prompt, **settings)


@pytest.mark.agents
@pytest.mark.parametrize("agent", COMMANDS)
def test_an_agent_calls_a_tool_and_ends_its_turn(agent, tmp_path):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed: npm install -g {PACKAGES[Agent(agent)]}")

    async def turn():
        engine = CallsItsShell(make_target(json_tools))
        async with running(engine) as server:
            command = [sys.executable, "-m", "dflash_mlx", "launch", agent]
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--port", str(server.port), "--", *COMMANDS[agent]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=tmp_path,
                env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(600):
                    said, told = await process.communicate()
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the agent, which launch has started
            return process.returncode, said.decode(), told.decode(), len(engine.submitted)

    code, said, told, asked = asyncio.run(turn())
    assert code == 0, told
    assert f"Done: hello {SECRET}." in said and asked >= 2, told

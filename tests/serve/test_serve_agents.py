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
from answers import written
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, FakeJob, make_target, running

from dflash_mlx.cli.launch import NPM_PACKAGES, Agent

pytestmark = pytest.mark.anyio

SECONDS = 20  # more than Codex waits for an event here; four of these are in a test
SECRET = "4711"
PICTURE = "picture.png"
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
COMMANDS = {  # of each agent: the arguments of a first turn, and of a later one
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


class SlowEngine(FakeEngine):
    """Looks at the picture, calls the shell slowly, and reports the result."""

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
            answer = f"Let me see.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
            self.steps = [answer[start : start + 4] for start in range(0, len(answer), 4)]
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
async def test_an_agent_completes_both_turns_with_a_slow_model(agent, tmp_path):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed: npm install -g {NPM_PACKAGES[Agent(agent)]}")
    (tmp_path / PICTURE).write_bytes(PNG)

    engine = SlowEngine(make_target(json_tools))
    engine.picture = str(tmp_path / PICTURE)
    async with running(engine) as server:
        for arguments in COMMANDS[agent]:
            code, said, told = await run(
                agent, port=server.port, arguments=[*arguments, "say hello"], folder=tmp_path
            )
            assert code == 0, told
            assert f"Done: hello {SECRET}." in said, told
            # Codex and opencode are told that the model sees no images.
            assert "this model reads text only" in engine.prompt() or agent != "claude"


TEXT = """\
\tdef f(x):
\t    return "<b>&amp;</b>" + '\\n'

    ```xml
    <parameter=path>
      </parameter>  \t
    </function>
    ```
\u00e9 \u5b57 null {"a": "b"} $HOME `x` \\
"""
OLD = "\t    return"
NEW = "\t    # </tool_call>\n\t    return"
EDITS = {  # of each agent: the calls that write the file and change it
    "claude": [
        ("Write", lambda path: {"file_path": path, "content": TEXT}),
        ("Edit", lambda path: {"file_path": path, "old_string": OLD, "new_string": NEW}),
    ],
    "codex": [
        ("exec_command", lambda path: {"cmd": _patch("Add", [f"+{line}" for line in LINES])}),
        ("exec_command", lambda path: {"cmd": _patch("Update", PATCH)}),
    ],
    "opencode": [
        ("write", lambda path: {"filePath": path, "content": TEXT}),
        ("edit", lambda path: {"filePath": path, "oldString": OLD, "newString": NEW}),
    ],
}
LINES = TEXT.splitlines()
PATCH = ["@@", f" {LINES[0]}", "+\t    # </tool_call>", f" {LINES[1]}"]
ALLOWED = {
    "claude": ["-p", "--allowedTools", "Write,Edit", "--"],
    "codex": ["exec", "--skip-git-repo-check", "-sdanger-full-access"],
    "opencode": ["run"],
}


def _patch(kind, lines):
    file = f"*** {kind} File: file.md"
    patch = ["*** Begin Patch", file, *lines, "*** End Patch"]
    return "\n".join(["apply_patch <<'THE_END'", *patch, "THE_END"])


class Editor(FakeEngine):
    """Makes the agent's edits, one after the other."""

    def submit(self, prompt, **settings):
        turn = self.target.tokenizer.decode(prompt).rpartition("say hello")[2]
        done = turn.count("<|im_start|>tool")
        has_tools = f'"name": "{self.edits[0][0]}"' in self.target.tokenizer.decode(prompt)
        self.steps = ["Done."]
        if has_tools and done < len(self.edits):
            name, arguments = self.edits[done]
            text = written(self.family, name, arguments(self.file))
            self.steps = [text[start : start + 5] for start in range(0, len(text), 5)]
        return super().submit(prompt, **settings)


@pytest.mark.agents
@pytest.mark.parametrize("agent", EDITS)
@pytest.mark.parametrize("family", ["json_tools", "qwen3_coder", "glm47", "minimax_m2", "gemma4"])
def test_an_agent_writes_the_file_that_was_meant(agent, family, tmp_path):
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed: npm install -g {NPM_PACKAGES[Agent(agent)]}")

    async def turn():
        engine = Editor(make_target(family))
        engine.edits = EDITS[agent]
        engine.family = family
        engine.file = str(tmp_path / "file.md")
        async with running(engine) as server:
            command = [*ALLOWED[agent], "say hello"]
            code, said, told = await run(
                agent, port=server.port, arguments=command, folder=tmp_path
            )
            assert code == 0 and "Done." in said, (said, told, engine.prompt()[-2000:])

    asyncio.run(turn())
    assert (tmp_path / "file.md").read_text() == TEXT.replace(OLD, NEW)

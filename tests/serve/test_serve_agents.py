"""Real coding agents from npm, started by `dflash-mlx launch`: two turns each.

Only the model is fake. It looks at an image, takes `SECONDS` to read the next prompt and as long to
write a call of the agent's shell, and then answers.
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

SECONDS = 20  # more than Codex waits for an event in these tests; each test takes four times this
SECRET = "4711"
PICTURE = "picture.png"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
SHELLS = {  # each agent's shell tool, and the arguments of its call
    "Bash": {"command": f"echo {SECRET}"},
    "exec_command": {"cmd": f"echo {SECRET}"},
    "bash": {"command": f"echo {SECRET}", "description": "Say a number"},
}
VIEWERS = {"Read": "file_path", "view_image": "path", "read": "filePath"}
CODEX = ["exec", "-cmodel_providers.dflash.stream_idle_timeout_ms=15000"]
COMMANDS = {  # each agent's arguments for the first turn, and for a later one
    "claude": (["-p", "--allowedTools", "Bash,Read", "--"], ["-c", "-p"]),
    "codex": (
        [*CODEX, "--skip-git-repo-check"],
        [*CODEX, "resume", "--last", "--skip-git-repo-check"],
    ),
    "opencode": (["run"], ["run", "-c"]),
}


class SlowJob(FakeJob):
    """An answer that begins after `SECONDS` and takes as long for its text."""

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

        def offered(tools):
            """The tool of these that the prompt offers, or None."""
            return next((name for name in tools if f'"name": "{name}"' in text), None)

        shell = offered(SHELLS)
        viewer = offered(VIEWERS)
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
    """Launch an agent; return its exit code, standard output and standard error."""
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
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the agent, which runs in its group
    return process.returncode, stdout.decode(), stderr.decode()


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
            code, stdout, stderr = await run(
                agent, port=server.port, arguments=[*arguments, "say hello"], folder=tmp_path
            )
            assert code == 0, stderr
            assert f"Done: hello {SECRET}." in stdout, stderr
            # Launch tells Codex and opencode that the model sees no images, so they send none.
            if agent == "claude":
                assert "this model reads text only" in engine.prompt()


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
EDITS = {  # each agent's calls that write the file and change it
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


class EditingEngine(FakeEngine):
    """Calls the tools for the agent's edits, one after the other."""

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
        engine = EditingEngine(make_target(family))
        engine.edits = EDITS[agent]
        engine.family = family
        engine.file = str(tmp_path / "file.md")
        async with running(engine) as server:
            command = [*ALLOWED[agent], "say hello"]
            code, stdout, stderr = await run(
                agent, port=server.port, arguments=command, folder=tmp_path
            )
            assert code == 0 and "Done." in stdout, (stdout, stderr, engine.prompt()[-2000:])

    asyncio.run(turn())
    assert (tmp_path / "file.md").read_text() == TEXT.replace(OLD, NEW)

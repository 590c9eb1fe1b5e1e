"""Commands started by mlx.launch, which runs the same command as every rank, on loopback.

The ranks' stdin is a pipe that is never closed, and all of them write to the launcher's output.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from program import HERE, PROGRAM, run

LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
QUESTION = "What is 3 plus 4?"
SECONDS = 300

pytestmark = pytest.mark.slow


def two_free_ports():
    """The first of two consecutive ports that nobody listens on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def launched(*arguments):
    """Run a command as two ranks, in a new process group that is killed at the end."""
    ring = ["--backend", "ring", "--starting-port", str(two_free_ports()), "-n", "2", "--"]
    ranks = subprocess.Popen(
        [LAUNCH, *ring, *PROGRAM, *arguments],
        text=True,
        cwd=HERE,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield ranks
    finally:
        with suppress(ProcessLookupError):  # if all have ended, as expected
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.communicate()


def test_only_rank_0_prints_the_answer_and_both_ranks_end():
    """Though stdin stays open."""
    command = ("generate", "--model", "tiny", "--no-policy", "-n", "6", QUESTION)
    with launched(*command) as ranks:
        assert ranks.wait(SECONDS) == 0
        text = ranks.stdout.read()
        errors = ranks.stderr.read()
    assert text == run(*command).stdout, errors
    assert errors.count("2 machines") == 1
    assert "exited with" not in errors and "error" not in errors


def test_a_server_on_two_ranks_answers_and_ctrl_c_ends_it():
    """Ctrl-C signals all processes of a terminal; all ranks end without an error."""
    with launched("serve", "--model", "tiny", "--no-policy", "--port", "0") as ranks:
        line = next(line for line in ranks.stderr if "http://" in line)
        url = re.search(r"http://\S+", line)[0]
        body = json.dumps({"prompt": QUESTION, "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer)["choices"][0]["text"]
        os.killpg(ranks.pid, signal.SIGINT)
        _, errors = ranks.communicate(timeout=SECONDS)
        with pytest.raises(ProcessLookupError):
            os.killpg(ranks.pid, 0)
    assert "exited with" not in errors and "error" not in errors


def test_a_rank_does_not_wait_for_a_prompt_on_stdin(monkeypatch):
    """Its stdin never ends, so a prompt has to be an argument."""
    monkeypatch.setenv("MLX_RANK", "0")
    for arguments in ((), ("-",), ("--file", "-")):
        result = run("generate", *arguments)
        assert result.returncode == 2, result.stderr

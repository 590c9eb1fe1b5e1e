"""Commands under a plain mlx.launch, which starts the same command as every rank, on loopback.

Its ranks' stdin is a pipe that it never closes, and all of them write to its own output.
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
    """The first of two neighbours that nobody listens on now."""
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
    """Two ranks of a command, in a process group of their own; none of them is left behind."""
    ring = ["--backend", "ring", "--starting-port", str(two_free_ports()), "-n", "2", "--"]
    options = {"text": True, "cwd": HERE, "start_new_session": True}
    options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ranks = subprocess.Popen([LAUNCH, *ring, *PROGRAM, *arguments], **options)
    try:
        yield ranks
    finally:
        with suppress(ProcessLookupError):  # as it should be
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.communicate()


def test_an_answer_is_given_once():
    """By rank 0, though stdin stays open; the other one says nothing, and both end well."""
    command = ("generate", "--model", "tiny", "--no-policy", "-n", "6", QUESTION)
    with launched(*command) as ranks:
        assert ranks.wait(SECONDS) == 0
        text = ranks.stdout.read()
        said = ranks.stderr.read()
    assert text == run(*command).stdout, said
    assert said.count("2 machines") == 1 and "exited with" not in said and "error" not in said


def test_a_server_answers_and_ctrl_c_ends_it():
    """The signal goes to all processes of the terminal: rank 0 ends in order, and so do others."""
    with launched("serve", "--model", "tiny", "--no-policy", "--port", "0") as ranks:
        line = next(line for line in ranks.stderr if "http://" in line)
        url = re.search(r"http://\S+", line)[0]
        body = json.dumps({"prompt": QUESTION, "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            assert json.load(answer)["choices"][0]["text"]
        os.killpg(ranks.pid, signal.SIGINT)
        _, said = ranks.communicate(timeout=SECONDS)
        with pytest.raises(ProcessLookupError):
            os.killpg(ranks.pid, 0)
    assert "exited with" not in said and "error" not in said


def test_stdin_that_never_ends_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("MLX_RANK", "0")
    for arguments in ((), ("-",), ("--file", "-")):
        done = run("generate", *arguments)
        assert done.returncode == 2, done.stderr

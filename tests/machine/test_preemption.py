"""On a Linux CPU, loading a model keeps MLX's threads from preempting the one that feeds them."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
# Loads the embedded pair in a process of one core, and decodes.
DECODE = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # not what pytest's process has
import mlx.core as mx, dflash_mlx as dm
mx.eval(mx.arange(3) + 1)  # starts a thread of MLX
BEFORE
target, drafter = dm.load("tiny")
AFTER

def preempted():
    status = [path.read_text() for path in Path("/proc/self/task").glob("*/status")]
    return sum(int(text.split("nonvoluntary_ctxt_switches:")[1].split()[0]) for text in status)

start = preempted()
dm.generate(target, drafter, "Hello", max_tokens=200)
print(preempted() - start, *{os.sched_getscheduler(int(t)) for t in os.listdir("/proc/self/task")})
"""


def decode(before: str = "", after: str = "") -> tuple[int, set[int]]:
    """How often a thread was preempted, and the policies of all threads."""
    script = DECODE.replace("BEFORE", before).replace("AFTER", after)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, *policies = map(int, done.stdout.split())
    return count, set(policies)


def test_threads_wait_for_their_turn():
    preempt = (
        "for task in os.listdir('/proc/self/task'):\n"
        "    os.sched_setscheduler(int(task), os.SCHED_OTHER, os.sched_param(0))"
    )
    usual, policies = decode(after=preempt)
    assert policies == {os.SCHED_OTHER}
    waiting, policies = decode()
    assert policies == {os.SCHED_BATCH}
    assert waiting < usual / 4


def test_a_policy_that_somebody_chose_stays():
    _, policies = decode("os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))")
    assert os.SCHED_IDLE in policies


def test_a_sandbox_may_refuse():
    refuse = "def refuse(*args): raise PermissionError\nos.sched_setscheduler = refuse"
    _, policies = decode(refuse)
    assert policies == {os.SCHED_OTHER}

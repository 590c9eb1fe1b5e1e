"""On a Linux CPU, loading a model makes MLX's threads batch jobs, which preempt no other thread."""

import os
import subprocess
import sys

import pytest

from dflash_mlx.machine import preemption

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
dm.generate(target, drafter, "Hello", max_tokens=200)
print(*{os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")})
"""


def policies(before: str = "") -> set[int]:
    """The policies of all threads of a process that runs `before`, then loads and decodes."""
    script = DECODE.replace("BEFORE", before)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(map(int, done.stdout.split()))


def test_all_threads_get_the_batch_policy():
    """How often threads preempt each other depends on what else runs, so it is not counted."""
    assert policies() == {os.SCHED_BATCH}


def test_a_policy_that_the_user_chose_is_kept():
    choose_idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    assert os.SCHED_IDLE in policies(choose_idle)


def test_a_container_without_proc_is_no_error(monkeypatch):
    """The threads cannot be listed there, and keep their policy."""

    def hidden(folder):
        raise FileNotFoundError(folder)

    monkeypatch.setattr(os, "listdir", hidden)
    preemption.preempt_nothing()


def test_a_sandbox_that_refuses_the_policy_is_no_error():
    refuse = "def refuse(*args): raise PermissionError\nos.sched_setscheduler = refuse"
    assert policies(refuse) == {os.SCHED_OTHER}

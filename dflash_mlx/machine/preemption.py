"""MLX's threads wait for the one that feeds them, on a CPU under Linux.

MLX queues a forward's operations, one by one, for a thread of its own. A thread that wakes up may
preempt another one on its core, so for each small operation Linux changes to MLX's thread and back.
On one core that is 0.44 of the time of the embedded pair's plain decoding, on two cores 0.30. A
thread of the policy SCHED_BATCH preempts no other one when it wakes up (sched(7)): the queue is
full when it begins. Its share of the processor is the same.
"""

from __future__ import annotations

import os
from contextlib import suppress


def preempt_nothing() -> None:
    """Let no thread of this process preempt others when it wakes up, nor those that it starts.

    Threads whose policy somebody has set keep it. A sandbox may refuse: then nothing changes.
    """
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return
    for thread in threads:
        with suppress(OSError):  # or the thread has ended
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))

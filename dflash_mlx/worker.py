"""A function in a process of its own, with bounds on time, memory and what it returns.

For what comes from anybody and may do anything: a chat template is a program, which may build
gigabytes or never end, and some regular expressions take minutes and let no other thread run.

This file is also the program: it starts at once, because it imports nothing but the function.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

ON_MAC = sys.platform == "darwin"
MEMORY = 2**29  # bytes that the process may have
STEP = 0.05  # seconds between looks at its memory


class WorkerLimitError(Exception):
    """A call takes more than it may: what, in words that follow a subject."""


class Worker:
    """Calls a function of bytes in a process, which it starts when it needs one.

    Args:
        function: its module and name, as "package.module:name".
        seconds: of a call.
    """

    def __init__(self, function: str, seconds: float) -> None:
        self._function, self.seconds = function, seconds
        self._lock = threading.Lock()
        self._end: Any = None  # ends the process; None before the first one

    def call(self, request: bytes, most: int) -> bytes:
        """The function's answer, of at most so many bytes. Raises `WorkerLimitError`."""
        with self._lock:
            if self._end is None or not self._end.alive or self._process.poll() is not None:
                self._start()
            try:
                self._socket.send_bytes(request)
                self._wait()
                return self._socket.recv_bytes(most)
            except (EOFError, OSError) as error:
                self._end()
                raise WorkerLimitError("takes too much memory or text.") from error

    def _start(self) -> None:
        self._socket, other = Pipe()
        command = [sys.executable, "-I", __file__, str(other.fileno()), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            [*command, self._function],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C is not for it
        )
        other.close()
        self._end = weakref.finalize(self, _kill, self._process)
        with suppress(EOFError):  # it has ended, which `call` notices
            self._socket.recv_bytes()  # it is ready: that time is not the function's

    def _wait(self) -> None:
        """Wait for an answer. Raises `OSError` if it takes too much memory."""
        end = time.monotonic() + self.seconds
        while not self._socket.poll(STEP):
            if time.monotonic() > end:
                self._end()
                raise WorkerLimitError(f"takes longer than {self.seconds:g} seconds.")
            if ON_MAC and memory_of(self._process.pid) > MEMORY:
                raise OSError("macOS limits no process's memory")


def memory_of(process: int) -> int:
    """Bytes of memory that a process has, 0 for none."""
    ps = ["ps", "-o", "rss=", "-p", str(process)]
    return 1024 * int(subprocess.run(ps, capture_output=True).stdout or 0)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def main() -> None:
    """Answer requests on the socket that the first argument names, until it is closed."""
    _, socket_number, path, function = sys.argv
    socket, sys.path[:] = Connection(int(socket_number)), json.loads(path)
    with suppress(ImportError, OSError, ValueError):  # macOS has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    module, _, name = function.partition(":")
    answer = getattr(import_module(module), name)
    with suppress(EOFError, ConnectionError):
        socket.send_bytes(b"ready")
        while True:
            socket.send_bytes(answer(socket.recv_bytes()))


if __name__ == "__main__":
    main()

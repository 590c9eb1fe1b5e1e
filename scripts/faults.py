"""Put a server through what goes wrong, and tell what it made of it; a JSON object a fault.

    python scripts/faults.py                     all faults, against a server of its own
    python scripts/faults.py crowd leavers       these
    python scripts/faults.py --connections 500   a smaller crowd, where files are few

It starts `dflash-mlx serve` with the embedded pair. Exit code 1 when a bound was broken: each
/health within 100 ms (--health-ms) while a crowd comes and is held and while bodies are read,
memory within 32 MB of what it was, nothing left open, the exit code of each end.
"""

from __future__ import annotations

import argparse
import atexit
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from statistics import median
from typing import Any

COMMAND = [sys.executable, "-m", "dflash_mlx", "serve", "--port", "0", "--no-policy"]
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MEGABYTES = 32  # that memory may have grown by
MOST = 256 + 16  # connections that stay of a crowd: the server's, and some that are just coming
CHAT = "/v1/chat/completions"
# An answer that is not over by itself before what is done to it: no token ends it, none is drafted.
LONG: dict[str, Any] = {
    "max_tokens": 400,
    "logit_bias": dict.fromkeys(range(3), -100),
    "draft": False,
}
SPAWN = get_context("spawn")


class Process:
    """A server of its own, and where it is."""

    def __init__(self, *options: str) -> None:
        command = [*COMMAND, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.kill)  # where a fault is too much for this script
        assert self.process.stderr is not None
        told = ""
        for line in self.process.stderr:
            told += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise SystemExit(told)
        # Nobody else reads what it says, and a full pipe would stop it.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def connect(self, content: bytes = b"") -> socket.socket:
        """A connection that has sent this."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        connection.sendall(content)
        return connection

    def get(self, path: str) -> str:
        """What is at a path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def health(self) -> float:
        """Milliseconds until it says how it is; infinite where it does not."""
        start = time.perf_counter()
        try:
            with self.connect(HEALTH) as connection:
                fine = connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            fine = False
        return 1e3 * (time.perf_counter() - start) if fine else float("inf")

    @property
    def open_answers(self) -> int:
        """How many are worked on or wait."""
        found = re.search(r"^dflash_open_answers (\S+)", self.get("/metrics"), re.MULTILINE)
        return int(float(found[1])) if found else -1

    @property
    def works(self) -> bool:
        """Whether its engine has something to do, be it for nobody."""
        return bool(json.loads(self.get("/health"))["seconds_since_round"])

    @property
    def megabytes(self) -> float:
        """Of memory, resident."""
        told = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, check=True
        )
        return int(told.stdout) / 1024

    def settled(self) -> bool:
        """Wait until nothing is open or worked on, and stays so; whether that came to be soon.

        What nobody reads would take longer, if it were gone on with.
        """
        end, calm = time.monotonic() + 10, 0
        while calm < 10 and time.monotonic() < end:
            calm = 0 if self.open_answers or self.works else calm + 1
            time.sleep(0.05)
        return calm == 10

    @property
    def is_there(self) -> bool:
        """Whether somebody listens at its port."""
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self, *signals: int) -> int:
        """Send these, and tell the exit code."""
        for sent in signals or (signal.SIGTERM,):
            self.process.send_signal(sent)
            time.sleep(0.2)
        return self.process.wait(660)


def post(body: dict[str, Any] | bytes, path: str = CHAT, length: int | None = None) -> bytes:
    """A request, all of it or as far as a fault has it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + content


def question(words: int = 0, number: int = 37, **more: Any) -> dict[str, Any]:
    """A question, after a number and so many words."""
    text = f"{number} " + "one two three four " * (words // 4) + f"What is {number} plus 48?"
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def status_of(connection: socket.socket) -> int:
    """That of the answer that comes; 0 where the connection is closed instead."""
    try:
        found = re.match(rb"HTTP/1.1 (\d+)", connection.recv(4096))
    except OSError:
        found = None
    return int(found[1]) if found else 0


def crowd(server: Process, args: argparse.Namespace) -> dict[str, Any]:
    """Thousands of connections that say nothing, then as many that say half a head."""
    found: dict[str, Any] = {}
    for name, content in (("silent", b""), ("half_heads", b"GET /heal")):
        before = server.megabytes
        coming: list[float] = []
        here, over, stayed = SPAWN.Event(), SPAWN.Event(), SPAWN.Value("i", -1)
        # By a process of its own: this one is to see what a client of the server sees.
        others = SPAWN.Process(
            target=come,
            args=(server.port, content, args.connections, here, over, stayed),
            daemon=True,
        )
        others.start()
        while not here.is_set() and others.is_alive():
            coming.append(server.health())
            time.sleep(0.01)
        held = [server.health() for _ in range(50)]
        over.set()
        others.join()
        grown = server.megabytes - before
        found[name] = {
            "while_coming_ms": {"median": round(median(coming), 1), "most": round(max(coming), 1)},
            "while_held_ms": {"median": round(median(held), 1), "most": round(max(held), 1)},
            "megabytes_grown": round(grown, 1),
            "asked": len(coming) + len(held),
            "stayed": stayed.value,
        }
        good = max(*coming, *held) <= args.health_ms and others.exitcode == 0
        found[name]["good"] = good and grown <= MEGABYTES and 0 <= stayed.value <= MOST
    return found | {"good": all(one["good"] for one in found.values())}


def come(port: int, content: bytes, count: int, here: Any, over: Any, stayed: Any) -> None:
    """As many connections, which stay until it is over, or until the server closes them."""
    connections = []
    for _ in range(count):
        connections.append(socket.create_connection(("127.0.0.1", port), timeout=120))
        with suppress(ConnectionError):  # pushed out already
            connections[-1].sendall(content)
    here.set()
    over.wait()
    stayed.value = sum(map(is_open, connections))


def is_open(connection: socket.socket) -> bool:
    """Whether the server has left a connection open on which it says nothing."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def bodies(server: Process, args: argparse.Namespace) -> dict[str, Any]:
    """Bodies that are too large, too deep, no text, too slow."""
    large = b'{"a": "' + b"x" * (64 << 20) + b'"}'
    chunked = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    cases = {
        "64 MB": (post(large), 413),
        "64 MB, untold": (chunked + b"%x\r\n" % len(large) + large, 413),
        "31 MB": (post(b'{"a": "' + b"x" * (31 << 20) + b'"}'), 400),
        "deep": (post(b"[" * 100_000), 400),
        "deeper than 64": (post(b'{"a":' * 200 + b"1" + b"}" * 200), 400),
        "many objects": (post(b'{"a": [' + b"[]," * 199_000 + b"[]]}"), 413),
        "many values": (post(b'{"messages": [' + b"1," * 1_900_000 + b"1]}"), 400),
        "no UTF-8": (post(b'{"a": "\xff\xfe"}'), 400),
        "slow": (post(b'{"a"', length=1000), 408),
    }
    for name in 8 * ["31 MB", "many objects", "many values"]:
        # Each of the threads that read bodies has memory of its own, which malloc may keep for it.
        with server.connect(cases[name][0]) as connection:
            status_of(connection)
    before = server.megabytes
    found: dict[str, Any] = {}
    for name, (content, expected) in cases.items():
        with server.connect() as connection:
            sending = threading.Thread(target=_send, args=(connection, content), daemon=True)
            sending.start()
            slowest = 0.0
            answer: list[int] = []
            reading = threading.Thread(target=_read, args=(connection, answer))
            reading.start()
            while reading.is_alive():
                slowest = max(slowest, server.health())
                reading.join(0.02)
        found[name] = {"status": answer[0], "health_ms": round(slowest, 1)}
        found[name]["good"] = answer[0] == expected and slowest <= args.health_ms
    grown = server.megabytes - before
    good = grown <= MEGABYTES and all(one["good"] for one in found.values())
    return found | {"megabytes_grown": round(grown, 1), "good": good}


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError:
        return  # the server had heard enough


def _read(connection: socket.socket, answer: list[int]) -> None:
    answer.append(status_of(connection))


def leavers(server: Process, args: argparse.Namespace) -> dict[str, Any]:
    """Clients that leave: in the queue, while their prompt is read, amid their answer."""
    # Whoever stays takes more than whoever leaves, and what MLX has had it keeps for the next one.
    for name in KINDS:
        leave(server, name, args.at_once, args.at_once, stays=True)
    before = server.megabytes
    found: dict[str, Any] = {}
    for name in KINDS:
        settled = leave(server, name, args.leavers, args.at_once)
        found[name] = {"left": args.leavers, "nothing_open": settled}
    answered = answers(server)
    grown = server.megabytes - before
    good = answered and grown <= MEGABYTES and all(one["nothing_open"] for one in found.values())
    return found | {"answered": answered, "megabytes_grown": round(grown, 1), "good": good}


def answers(server: Process) -> bool:
    """Whether it does; the step is over then in which those who left before had their last part."""
    with server.connect(post(question(max_tokens=8))) as connection:
        return status_of(connection) == 200


KINDS = {"decode": (0, True), "prefill": (300, False), "queue": (0, False)}


def leave(server: Process, kind: str, count: int, at_once: int, stays: bool = False) -> bool:
    """Ask and leave so many times, or hear the answer; whether nothing stays open."""
    words, waits = KINDS[kind]
    for start in range(0, count, at_once):
        bodies = (
            # Nothing of them was read before.
            question(words, number, stream=True, **({"max_tokens": 100} if stays else LONG))
            for number in range(start, min(start + at_once, count))
        )
        asked = [server.connect(post(body)) for body in bodies]
        for one in asked:
            if stays:
                said = b"..."
                while b"[DONE]" not in said and (more := one.recv(65536)):
                    said = said[-9:] + more
            elif waits:
                status_of(one)
            one.close()
    return server.settled()


def ends(server: Process, args: argparse.Namespace) -> dict[str, Any]:
    """SIGTERM amid an answer, with time to drain and without; twice; Ctrl-C."""
    long = ("--drain-seconds", "600")
    cases: dict[str, tuple[tuple[str, ...], list[int], bytes | None]] = {
        "drained": (long, [signal.SIGTERM], b"[DONE]"),
        "no time": (("--drain-seconds", "0"), [signal.SIGTERM], b"shutting down"),
        "twice": (long, [signal.SIGTERM, signal.SIGTERM], None),
        "Ctrl-C": (long, [signal.SIGINT], b"[DONE]"),
    }
    found: dict[str, Any] = {}
    for name, (options, signals, last) in cases.items():
        one = Process(*options)
        with one.connect(post(question(stream=True, **LONG))) as connection:
            said = connection.recv(4096)
            code = one.end(*signals)
            try:
                while more := connection.recv(65536):
                    said += more
            except ConnectionError:
                pass
        words = next((one for one in (b"[DONE]", b"shutting down") if one in said), None)
        good = code == 0 and words == last and not one.is_there
        found[name] = {"exit_code": code, "last_words": words and words.decode(), "good": good}
    return found | {"good": all(one["good"] for one in found.values())}


FAULTS: dict[str, Callable[[Process, argparse.Namespace], dict[str, Any]]] = {
    "crowd": crowd,
    "bodies": bodies,
    "leavers": leavers,
    "ends": ends,
}


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], help="all without any")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--leavers", type=int, default=1000, help="of each kind")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--health-ms", type=float, default=100)
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = args.connections + 200
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    server = Process("--prefix-cache", "0.01")
    good = True
    for name in args.faults or FAULTS:
        found = FAULTS[name](server, args)
        print(json.dumps({"fault": name, **found}), flush=True)
        good = good and found["good"]
    sys.exit(0 if server.end() == 0 and good else 1)


if __name__ == "__main__":
    main()

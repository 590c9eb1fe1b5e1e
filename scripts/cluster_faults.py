"""Hurts a server of two ranks on this machine, again and again, and sees that it comes back.

    python scripts/cluster_faults.py [TIMES [OPTION ...]]

Each time one of the ranks is killed or stopped, or the link between them takes nothing more: while
they load, while they read a prompt, or in a round. Whoever waits is to get an error within 30
seconds, `/health` is to answer 503, no process of before may be left, and the server that comes
back is to say what it said. Prints a line each time, and JSON at the end; exit code 1 for a miss.
The server is of the embedded pair; options of `serve` choose another, such as a pipeline.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from itertools import product
from typing import Any

from dflash_mlx.cluster.hosts import Host, Hosts
from dflash_mlx.cluster.ranks import Ranks
from dflash_mlx.cluster.supervisor import Supervisor

LIMIT, STALL = 30.0, 8.0
BACK = 300.0  # seconds for a server to load, on a machine that others use, too
KINDS, PHASES = ("kill", "stop", "full"), ("round", "prefill", "load")
QUESTION = {"messages": [{"role": "user", "content": "What is 47 plus 38?"}], "max_tokens": 16}
LONG = {"messages": [{"role": "user", "content": "Count to ten. " * 250}], "max_tokens": 4}
ENDLESS = {"prompt": "1, 2, 3,", "max_tokens": 1500, "stream": True}


class Link(threading.Thread):
    """Carries bytes between rank 0 and rank 1, until it is full."""

    def __init__(self, to: str) -> None:
        super().__init__(daemon=True)
        host, _, port = to.rpartition(":")
        self._to, self.full = (host, int(port)), threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        ours, _ = self._listening.accept()
        for _ in range(600):
            try:
                theirs = socket.create_connection(self._to)
                break
            except ConnectionRefusedError:
                time.sleep(0.1)  # the rank is not there yet, as this one is
        else:
            return
        for one, other in ((ours, theirs), (theirs, ours)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while content := one.recv(2**16):
                while self.full.is_set():
                    time.sleep(0.1)
                other.sendall(content)
        except OSError:
            pass
        for end in (one, other):
            end.close()


class Linked(Hosts):
    """Two ranks here, of which the first reaches the second over a `Link`."""

    links: list[Link] = []

    def launches(self) -> list[dict[str, Any]]:
        told = super().launches()
        ring = told[0]["files"]["MLX_HOSTFILE"]
        self.links.append(Link(ring[1][0]))
        told[0] = told[0] | {"files": {"MLX_HOSTFILE": [ring[0], [self.links[-1].address]]}}
        return told


@dataclass
class Outcome:
    """What came of a fault, in seconds after it; None for what did not come."""

    kind: str
    rank: int
    phase: str
    error: float | None = None
    told: str = ""
    unhealthy: float | None = None
    back: float | None = None
    left: int = 0
    same: bool = False

    @property
    def good(self) -> bool:
        in_time = [each is not None and each < LIMIT for each in (self.error, self.unhealthy)]
        return all(in_time) and self.back is not None and not self.left and self.same


class Faults(threading.Thread):
    """Hurts the server, from beside its supervisor."""

    def __init__(self, url: str, times: int) -> None:
        super().__init__(daemon=True)
        self._url, self._times = url, times
        self.outcomes: list[Outcome] = []

    def run(self) -> None:
        try:
            self._expected = self._wait_back(time.monotonic())[1]
            cases = list(product(KINDS, (1, 0), PHASES))
            for number in range(self._times):
                kind, rank, phase = cases[(number * 5) % len(cases)]
                done = self._hurt(Outcome(kind, rank, phase))
                self.outcomes.append(done)
                print("ok  " if done.good else "MISS", done, flush=True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _hurt(self, outcome: Outcome) -> Outcome:
        if outcome.phase == "load":  # of a server that comes back from another fault
            before = _pids()
            os.kill(before[1], signal.SIGKILL)
            while len(now := _pids()) < 2 or now == before:
                time.sleep(0.1)
            time.sleep(1.5)
        pids = _pids()
        hit = threading.Event()
        client = threading.Thread(target=self._client, args=(outcome, hit), daemon=True)
        clock = time.monotonic()
        client.start()
        hit.wait(60)
        clock = time.monotonic()
        if outcome.kind == "full":
            Linked.links[-1].full.set()
        else:
            what = signal.SIGKILL if outcome.kind == "kill" else signal.SIGSTOP
            os.kill(pids[outcome.rank], what)
        while self._get("/health") == 200 and time.monotonic() - clock < 2 * LIMIT:
            time.sleep(0.2)
        outcome.unhealthy = round(time.monotonic() - clock, 1)
        client.join(2 * LIMIT)
        outcome.error = None if outcome.error is None else round(outcome.error - clock, 1)
        while set(_pids().values()) & set(pids.values()) and time.monotonic() - clock < BACK:
            time.sleep(0.1)
        seconds, text = self._wait_back(clock)
        outcome.back, outcome.same = seconds, text == self._expected
        outcome.left = sum(_alive(pid) for pid in pids.values())
        return outcome

    def _client(self, outcome: Outcome, hit: threading.Event) -> None:
        """Ask for something that takes long, and note when an error comes."""
        path = "/v1/completions" if outcome.phase == "round" else "/v1/chat/completions"
        body = ENDLESS if outcome.phase == "round" else LONG
        if outcome.phase != "round":
            threading.Timer(0.5, hit.set).start()
        try:
            with self._post(path, body, 3 * LIMIT) as response:
                lines = []
                for line in response:
                    lines.append(line)
                    if len(lines) > 4:
                        hit.set()
                told = b"".join(lines[-3:])
            if b'"error"' in told or (outcome.phase == "round" and b"[DONE]" not in told):
                # An answer whose chunks break off is an error for clients, not for http.client.
                outcome.told = told.decode()[-120:] or "broken off"
                outcome.error = time.monotonic()
        except urllib.error.HTTPError as error:
            outcome.told = f"{error.code} {error.read()[:100]!r}"
            outcome.error = time.monotonic()
        except (OSError, HTTPException) as error:  # the connection ended with its process
            outcome.told, outcome.error = repr(error), time.monotonic()
        hit.set()

    def _post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        content = json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._url + path, content, head)
        return urllib.request.urlopen(asked, timeout=seconds)

    def _get(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self._url + path, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def _wait_back(self, clock: float) -> tuple[float | None, str]:
        while time.monotonic() - clock < BACK:
            if self._get("/ready") == 200:
                try:
                    with self._post("/v1/chat/completions", QUESTION, BACK) as response:
                        said = json.load(response)["choices"][0]["message"]["content"]
                    return round(time.monotonic() - clock, 1), said
                except (OSError, HTTPException):
                    pass
            time.sleep(0.3)
        return None, ""


def _pids() -> dict[int, int]:
    return {rank.number: rank.process.pid for rank in Watched.now}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Watched(Ranks):
    """The processes of now, for whoever wants to hurt them."""

    now: list[Any] = []

    def __init__(self, *of: Any) -> None:
        Watched.now = []
        super().__init__(*of)
        Watched.now = self.all


def main(times: int, options: list[str]) -> int:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    here = Host("127.0.0.1", ("127.0.0.1",))
    arguments = ["serve", "--no-policy", "--stall-seconds", str(STALL), *options]
    supervisor = Supervisor(
        Linked("ring", {}, (here, here)), arguments, print, listening, STALL, Watched
    )
    faults = Faults(url, times)
    faults.start()
    supervisor.run()
    good = sum(one.good for one in faults.outcomes)
    print(json.dumps({"times": times, "good": good, "all": [vars(o) for o in faults.outcomes]}))
    return 0 if good == times else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 20, sys.argv[2:]))

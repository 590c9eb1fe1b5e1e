"""A small server on the loopback that speaks as much of the hub's HTTP API as a download needs."""

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

PART = 100_000  # bytes


def commit_of(name: str) -> str:
    """The one revision of a repository; no two of them share it."""
    return hashlib.sha1(name.encode()).hexdigest()


class HubServer:
    """Repositories that are folders on this disk, and the ways in which a download can fail.

    Attributes:
        repositories: owner/name -> the folder with its files.
        gated: repositories that answer nobody.
        sizes: file name -> a size to claim instead of the true one.
        hold: while it is not set, files longer than `PART` end there.
        requests: (method, path, Range header) of every request, in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""
        self.hold = threading.Event()
        self.hold.set()

    def fetched(self) -> dict[str, int]:
        """How often the content of each file was asked for."""
        counts: dict[str, int] = defaultdict(int)
        for method, path, _ in self.requests:
            if method == "GET" and "/resolve/" in path:
                counts[path.rpartition("/")[2]] += 1
        return counts

    @contextmanager
    def running(self) -> Iterator["HubServer"]:
        """Serve while the block runs, on a free port."""
        handler = type("Handler", (_Handler,), {"hub": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.hold.set()
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.removeprefix("/api/models").removeprefix("/datasets").strip("/").split("/")
        name = "/".join(parts[:2])
        if name in self.hub.gated:
            self.refuse(403, "GatedRepo")
        elif name not in self.hub.repositories:
            self.refuse(404, "RepoNotFound")
        elif not path.startswith("/api/"):
            self.send_file(name, "/".join(parts[4:]))  # name/resolve/commit
        elif "tree" in parts:
            self.send_json([self.entry(file) for file in self.files(name)])
        else:
            files = [{"rfilename": file.name, "size": self.size(file)} for file in self.files(name)]
            self.send_json({"id": name, "modelId": name, "sha": commit_of(name), "siblings": files})

    def files(self, name: str) -> list[Path]:
        return sorted(file for file in self.hub.repositories[name].iterdir() if file.is_file())

    def size(self, file: Path) -> int:
        return self.hub.sizes.get(file.name, file.stat().st_size)

    def entry(self, file: Path) -> dict:
        oid = hashlib.sha1(file.read_bytes()).hexdigest()
        return {"type": "file", "path": file.name, "size": self.size(file), "oid": oid}

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, content) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, name: str, inside: str) -> None:
        file = self.hub.repositories[name] / inside
        if not file.is_file():
            return self.refuse(404, "EntryNotFound")
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit_of(name))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.wfile.write(content[:PART])
        self.hub.hold.wait()
        with suppress(OSError):  # nobody waits for the rest
            self.wfile.write(content[PART:])
        return None

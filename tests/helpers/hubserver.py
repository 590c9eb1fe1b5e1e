"""A small server on the loopback with those parts of the hub's HTTP API that downloads use."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from webserver import web_server

PART = 100_000  # bytes


def commit_of(name: str) -> str:
    """The only revision of a repository, unique to its name."""
    return _hash(name.encode())


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class HubServer:
    """Serves folders as repositories, with settings that make a download fail.

    Attributes:
        repositories: owner/name -> the folder with its files.
        gated: repositories that refuse all requests.
        sizes: file name -> a size to report instead of the true one.
        hold: while it is not set, downloads stop after `PART` bytes and wait.
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
        """How often the content of each file was requested, by its name."""
        paths = [path for method, path, _ in self.requests if method == "GET"]
        return Counter(path.rpartition("/")[2] for path in paths if "/resolve/" in path)

    @contextmanager
    def running(self) -> Iterator["HubServer"]:
        """Serve on a free port while the block runs."""
        with web_server(self.answer) as self.url:
            try:
                yield self
            finally:
                self.hold.set()

    def answer(self, request: Any) -> tuple[int, Iterable[bytes], dict[str, Any]]:
        """The status, content and headers that `web_server` sends."""
        path = urlsplit(request.path).path
        self.requests.append((request.command, path, request.headers.get("Range")))
        parts = path.removeprefix("/api/models").removeprefix("/datasets").strip("/").split("/")
        name = "/".join(parts[:2])
        api = path.startswith("/api/")
        file = self.repositories.get(name, Path()) / "/".join(parts[4:])  # name/resolve/commit
        refused = None
        if name in self.gated:
            refused = 403, "GatedRepo"
        elif name not in self.repositories:
            refused = 404, "RepoNotFound"
        elif not api and not file.is_file():
            refused = 404, "EntryNotFound"
        if refused is not None:
            status, code = refused
            return status, [], {"X-Error-Code": code, "X-Error-Message": code}
        if not api:
            content = file.read_bytes()
            headers = {"ETag": f'"{_hash(content)}"', "X-Repo-Commit": commit_of(name)}
            return 200, self._parts(content), headers | {"Content-Length": len(content)}
        files = sorted(listed for listed in self.repositories[name].iterdir() if listed.is_file())
        sizes = [(listed, self.sizes.get(listed.name, listed.stat().st_size)) for listed in files]
        body: Any = [
            {"type": "file", "path": listed.name, "size": size, "oid": _hash(listed.read_bytes())}
            for listed, size in sizes
        ]
        if "tree" not in parts:
            names = [{"rfilename": listed.name, "size": size} for listed, size in sizes]
            body = {"id": name, "modelId": name, "sha": commit_of(name), "siblings": names}
        return 200, [json.dumps(body).encode()], {"Content-Type": "application/json"}

    def _parts(self, content: bytes) -> Iterator[bytes]:
        yield content[:PART]
        self.hold.wait()
        yield content[PART:]

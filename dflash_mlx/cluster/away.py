"""What a server's clients are told while its ranks are started: 503, and to come again."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RETRY_SECONDS = 5
SAID = "The machines of this server are being started: try again in a few seconds."


class _Answer(BaseHTTPRequestHandler):
    timeout = 10

    def _answer(self) -> None:
        error = {"message": SAID, "type": "api_error", "code": "starting"}
        content = json.dumps({"type": "error", "error": error, "status": "starting"}).encode()
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Retry-After", str(RETRY_SECONDS))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_OPTIONS = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left."""


class Away:
    """Answers on a socket that others listen on at other times.

    Args:
        listening: bound; it stays open.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._server: _Server | None = None

    def answer(self) -> None:
        """From now on."""
        if self._server is not None:
            return
        server = _Server(self._listening.getsockname()[:2], _Answer, bind_and_activate=False)
        server.socket.close()
        server.socket = self._listening.dup()
        server.socket.listen()
        # Another process may take the connection that woke this one.
        server.socket.setblocking(False)
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """No more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

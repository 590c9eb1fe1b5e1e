"""A small HTTP server on the loopback."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def web_server(answer: Callable[[Any], Any]) -> Iterator[str]:
    """Serve on a free port while the block runs. Yields the URL.

    Args:
        answer: gives the status, the parts of the content and the headers for a request, which has
            a `command`, a `path`, `headers` and a `body`.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def respond(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, parts, headers = answer(self)
            if "Content-Length" not in headers:
                headers |= {"Content-Length": sum(map(len, parts))}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                for part in parts:
                    with suppress(OSError):  # the client has closed the connection
                        self.wfile.write(part)

        do_GET = do_HEAD = do_POST = respond

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

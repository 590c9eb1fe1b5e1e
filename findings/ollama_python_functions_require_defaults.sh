#!/usr/bin/env bash
# Expected: Ollama's Python client makes a tool of a Python function whose parameters with a default may be left out.
# Really: only types that allow None are left out of "required", with or without a default. `flag: bool = True` must be
#   given, and `text: str | None`, which Python requires, need not. list[int] loses its items, Literal its values, and
#   int | str becomes "type": "integer, string", one string, or "string, integer": the order changes between processes.
# Seen: ollama 0.6.3, Python 3.11 and 3.13, on 2026-11-28.
# Bites: tools given as functions: a model fills in what it need not, a server that compiles the schema to a grammar
#   cannot use "integer, string", and its cache of prompt prefixes misses after a restart of the client.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "ollama==0.6.3"
for seed in 0 1 2 3 4 5 6 7; do
    PYTHONHASHSEED=$seed "$folder/venv/bin/python" - > "$folder/seen" <<'PY'
import sys, threading, json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Literal
from ollama import Client
bodies = []
class Recorder(BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        answer = b'{"message": {"role": "assistant", "content": "ok"}, "done": true}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
def look(
    text: str | None, size: int | str, kind: Literal["a", "b"], ids: list[int], flag: bool = True
) -> str:
    """Look something up."""
server = HTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = Client(f"http://127.0.0.1:{server.server_port}")
client.chat("any", [{"role": "user", "content": "hi"}], tools=[look])
parameters = bodies[0]["tools"][0]["function"]["parameters"]
for name, schema in parameters["properties"].items():
    schema.pop("description", None)
size = parameters["properties"]["size"].pop("type")
print("required:", parameters["required"])
print("properties:", parameters["properties"])
expected = {
    "text": {"type": "string"},
    "size": {},
    "kind": {"type": "string"},
    "ids": {"type": "array"},
    "flag": {"type": "boolean"},
}
required = ["size", "kind", "ids", "flag"]
as_seen = parameters["properties"] == expected and parameters["required"] == required
print(size, file=sys.stderr)
sys.exit(0 if as_seen else "the client has changed")
PY
done 2> "$folder/types" || { cat "$folder/seen" "$folder/types"; exit 1; }
cat "$folder/seen"
echo "int | str in eight processes:"
sort "$folder/types" | uniq -c
[ "$(sort -u "$folder/types" | tr '\n' ';')" = "integer, string;string, integer;" ] || { echo "the client has changed"; exit 1; }

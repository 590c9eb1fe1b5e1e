#!/usr/bin/env bash
# Expected: a tool that a caller gives to Ollama's Python client as a dict, with a JSON schema, is sent as it is.
# Really: it passes through a model with few fields. A parameter keeps type, items, enum and description. Its anyOf,
#   const, $ref, minimum and default are dropped, as are the properties of a nested object and strict; $defs stays, unused.
# Seen: ollama 0.6.3, Python 3.11 and 3.13, on 2026-11-28.
# Bites: callers whose tools have nested objects: the model never reads which fields they have, and a server that forces
#   arguments by grammar allows anything there. The same tool sent by curl works.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "ollama==0.6.3"
"$folder/venv/bin/python" - <<'PY'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
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
server = HTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
given = {
    "list": {"type": "array", "items": {"type": "integer"}, "description": "kept"},
    "when": {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]},
    "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer", "minimum": 1, "default": 3},
    "unit": {"const": "km"},
    "place": {"$ref": "#/$defs/place"},
}
schema = {"type": "object", "properties": given, "$defs": {"place": {"type": "string"}}}
function = {"name": "book", "description": "Book it.", "parameters": schema, "strict": True}
tool = {"type": "function", "function": function}
client = Client(f"http://127.0.0.1:{server.server_port}")
client.chat("any", [{"role": "user", "content": "hi"}], tools=[tool])
sent = bodies[0]["tools"][0]["function"]
received = sent["parameters"]["properties"]
for name in given:
    print(f"{name}: {json.dumps(given[name])} -> {json.dumps(received[name])}")
kept = received["list"] == given["list"] and sent["parameters"].get("$defs") == schema["$defs"]
lost = [received[name] for name in ("when", "mode", "count", "unit", "place")]
expected = [{"type": "object"}, {}, {"type": "integer"}, {}, {}]
sys.exit(0 if kept and lost == expected and "strict" not in sent else "the client has changed")
PY

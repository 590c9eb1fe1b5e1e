#!/usr/bin/env bash
# Expected: LiteLLM sends OpenAI's frequency_penalty to an Ollama server as Ollama's option frequency_penalty.
# Really: it sends the number as repeat_penalty, which multiplies. OpenAI's 0 is off and 0.25 discourages repetition;
#   a repeat_penalty of 1 is off, and 0.25 strongly encourages it. An explicit 0, "off", becomes repeat_penalty 0.
# Seen: litellm 1.110.2, Python 3.11 and 3.13, on 2026-11-28.
# Bites: clients of OpenAI's API that reach an Ollama server (or one with its API) by LiteLLM: the milder the penalty that
#   they ask for, the more the model repeats itself.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "litellm==1.110.2"
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" - <<'PY'
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import litellm
bodies = []
class Recorder(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/api/chat":
            bodies.append(body)
        answer = b'{"model": "m", "message": {"role": "assistant", "content": "ok"}, "done": true}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def do_GET(self):
        self.send_response(404)
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = []
for penalty in (0.25, 0.0):
    litellm.completion(
        model="ollama_chat/any",
        api_base=f"http://127.0.0.1:{server.server_port}",
        messages=[{"role": "user", "content": "hi"}],
        frequency_penalty=penalty,
    )
    options = bodies[-1]["options"]
    seen.append(options)
    print(f"frequency_penalty={penalty} -> options {options}")
sys.exit(0 if seen == [{"repeat_penalty": 0.25}, {"repeat_penalty": 0.0}] else "LiteLLM has changed")
PY

#!/usr/bin/env bash
# Expected: huggingface_hub asks a server for the file that it was told to fetch, and for nothing else.
# Really: every process first asks GET /api/agent-harnesses, to find out which coding agent runs it, for up to 3 seconds. The answer
#   is kept for a day, but a mirror that does not have it (404) is asked again by each process. HF_HUB_DISABLE_TELEMETRY=1 stops it.
# Seen: huggingface_hub 2.4.0, Python 3.13, Linux, 2026-11-28.
# Bites: mirrors and air-gapped endpoints (HF_ENDPOINT) that drop unknown paths, and tests that count requests.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "huggingface_hub==2.4.0"
cat > "$folder/fetch.py" <<'PY'
from huggingface_hub import hf_hub_download
print("content:", open(hf_hub_download("somebody/model", "config.json")).read())
PY
"$folder/venv/bin/python" - "$folder" <<'PY'
import http.server, os, subprocess, sys, threading

folder = sys.argv[1]
paths = []

class Mirror(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        paths.append(f"{self.command} {self.path}")
        has_it = "config.json" in self.path
        self.send_response(200 if has_it else 404)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "2" if has_it else "0")
        self.end_headers()
        if has_it and self.command == "GET":
            self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
threading.Thread(target=server.serve_forever, daemon=True).start()
asked = 0
os.environ.pop("HF_HUB_DISABLE_TELEMETRY", None)
for number in range(2):
    home = {"HF_HOME": f"{folder}/home", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    subprocess.run([sys.executable, f"{folder}/fetch.py"], check=True, env={**os.environ, **home})
    print(f"process {number + 1} asked for {paths}")
    asked += "GET /api/agent-harnesses" in paths
    paths.clear()
server.shutdown()
sys.exit(0 if asked == 2 else f"asked by {asked} of 2 processes: huggingface_hub has changed")
PY

#!/usr/bin/env bash
# Expected: generation_config.json's eos_token_id ends a text in mlx-lm, whatever the number.
# Really: an id 0 counts as none, because mlx-lm tests it for truth. config.json's ids, or none, stay. [0] counts.
# Seen: mlx-lm 0.32.2, mlx 0.32.4 (CPU), Linux, 2026-11-28.
# Bites: vocabularies whose token 0 is <|endoftext|> (GPT-NeoX, Pythia, SmolLM) and whose config.json names another end.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx-lm==0.32.2" "mlx[cpu]==0.32.4"
"$folder/venv/bin/python" - "$folder" <<'PY'
import json, sys
from pathlib import Path
from mlx_lm.utils import load_config
folder = Path(sys.argv[1])
(folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "eos_token_id": 7}))
seen = {}
for ids in (0, [0], 5):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    seen[str(ids)] = load_config(folder)["eos_token_id"]
print("generation_config.json says -> mlx-lm takes:", seen)
sys.exit(0 if seen == {"0": 7, "[0]": [0], "5": 5} else "mlx-lm has changed")
PY

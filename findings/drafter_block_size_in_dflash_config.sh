#!/usr/bin/env bash
# Expected: readers of DFlash drafters take block_size from dflash_config, where z-lab's newer files have it, or from the root.
# Really: z-lab's own reader and mlx-dspark look in both; mlx-vlm looks at the root alone and takes 16 without a word, though it reads
# mask_token_id and target_layer_ids from dflash_config.
# Seen: mlx-vlm 0.7.10, dflash 0.1.0, mlx 0.32.4 (CPU), Linux, 2026-11-28.
# Bites: drafters trained for blocks of 7 or 8 that are compared between programs: their later slots are never right.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps "mlx-vlm==0.7.10" "dflash==0.1.0"
"$folder/venv/bin/python" - <<'PY'
import sys, types
from importlib.metadata import files
from pathlib import Path

def source(package, end):
    return Path(next(str(file.locate()) for file in files(package) if str(file).endswith(end)))

# mlx-vlm's config, run alone: the package itself would start its model zoo.
text = source("mlx-vlm", "drafters/qwen3_dflash/config.py").read_text()
text = text.replace("from ....models.base import BaseModelConfig", "class BaseModelConfig: pass")
module = types.ModuleType("config")
sys.modules["config"] = module
exec(compile(text, "config.py", "exec"), module.__dict__)
said = {"dflash_config": {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [1]}, "num_target_layers": 4}
found = module.DFlashConfig.from_dict(said)
print("mlx-vlm:", "block_size", found.block_size, "mask_token_id", found.mask_token_id)
theirs = source("dflash", "dflash/model_mlx.py").read_text()
line = next(line.strip() for line in theirs.splitlines() if line.strip().startswith("block_size=int("))
value = eval(line.removeprefix("block_size=").rstrip(","), {"dflash": said["dflash_config"], "cfg": said})
print("z-lab:", line, "->", value)
sys.exit(0 if (found.block_size, found.mask_token_id, value) == (16, 3, 8) else "a reader has changed")
PY

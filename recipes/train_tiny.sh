#!/bin/sh
# Remake the embedded pair from nothing: tokenizer, target, both drafters, held-out prompts, scores.
# Interrupted? Run it again: every stage resumes from its checkpoint.
#
#   recipes/train_tiny.sh [FOLDER]     (default build/tiny; checkpoints go to FOLDER/work)
#
# To ship the result, copy FOLDER's target, drafter, dflash2 and prompts.jsonl to dflash_mlx/tiny and
# put the printed tables into its README.md and docs/drafters.md.
set -eu
cd "$(dirname "$0")/.."
out="${1:-build/tiny}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
python="$PWD/.venv/bin/python"
if [ ! -x "$python" ]; then
    echo "train_tiny.sh: no .venv here: run 'make demo' or 'make test' first" >&2
    exit 1
fi
cd recipes
"$python" -m tiny_pair "$out" --work "$out/work"
"$python" -m tiny_pair "$out" --work "$out/work" --dflash2

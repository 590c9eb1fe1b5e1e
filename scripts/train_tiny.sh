#!/bin/sh
# Remake the embedded pair from nothing: tokenizer, target, drafter, held-out prompts, scores.
# Interrupted? Run it again: every stage resumes from its checkpoint.
#
#   scripts/train_tiny.sh [FOLDER]     (default build/tiny; checkpoints go to FOLDER/work)
#
# To ship the result, copy FOLDER/target, FOLDER/drafter and FOLDER/prompts.jsonl to dflash_mlx/tiny
# and put the printed table into its README.md.
set -eu
cd "$(dirname "$0")/.."
out="${1:-build/tiny}"
python=.venv/bin/python
if [ ! -x "$python" ]; then
    echo "train_tiny.sh: no .venv here: run 'make demo' or 'make test' first" >&2
    exit 1
fi
exec "$python" -m dflash_mlx.train "$out" --work "$out/work"

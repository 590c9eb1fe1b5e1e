#!/usr/bin/env bash
# Expected: the relative error of 4-bit quantization does not depend on the size of the weights, since each group has a
#   scale. So it is for affine and mxfp4.
# Really: mx.quantize(mode="nvfp4") stores scales as E4M3 and has no tensor-wide scale unless the caller passes
#   global_scale. Of normal weights with a deviation of 0.002, 95% become 0; at 0.001 all do.
# Seen: mlx 0.32.4 (CPU), Linux, 2026-11-28.
# Bites: conversions to nvfp4 of models with small weights (embeddings, the second matrix of a LoRA, muP), and figures of
#   nvfp4 from files that do have the second scale.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4"
"$folder/venv/bin/python" - <<'PY'
import sys
import mlx.core as mx
mx.random.seed(0)
normal = mx.random.normal((64, 512))
errors = {}
for mode in ("affine", "mxfp4", "nvfp4"):
    settings = {"mode": mode, "bits": 4}
    for deviation in (1.0, 0.02, 0.002, 0.001):
        weights = normal * deviation
        again = mx.dequantize(*mx.quantize(weights, **settings), **settings)
        difference = (again - weights).square().mean().sqrt() / deviation
        errors[mode, deviation] = difference.item()
        print(mode, deviation, f"relative error {difference.item():.2f}, zeros {(again == 0).mean().item():.2f}")
steady = all(errors[mode, 0.001] < 0.15 for mode in ("affine", "mxfp4")) and errors["nvfp4", 1.0] < 0.15
lost = errors["nvfp4", 0.002] > 0.9 and errors["nvfp4", 0.001] > 0.99
sys.exit(0 if steady and lost else "mlx has changed")
PY

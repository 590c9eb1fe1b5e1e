#!/usr/bin/env bash
# Expected: the mean of float16 values is finite if they are, as in NumPy, which adds them up in float32.
# Really: mx.mean rounds the sum to float16 before it divides. The mean of 100 values of 1000 is inf.
# Seen: mlx 0.32.4 (CPU), numpy 2.4.6, Linux, 2026-11-28.
# Bites: losses and statistics of hidden states of float16 models, whose largest channels are in the thousands. Cast to
#   float32 first; mx.fast.rms_norm does so by itself.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4" "numpy==2.4.6"
"$folder/venv/bin/python" - <<'PY'
import sys
import mlx.core as mx, numpy as np
large = np.full(100, 1000, dtype=np.float16)
rows = {
    "mean of 100 times 1000": (mx.mean(mx.array(large)), np.mean(large)),
    "mean of 20 times 1000": (mx.mean(mx.array(large[:20])), np.mean(large[:20])),
}
seen = {name: (ours.item(), float(theirs)) for name, (ours, theirs) in rows.items()}
for name, (first, second) in seen.items():
    print(f"{name}: MLX {first}, NumPy {second}")
normed = mx.fast.rms_norm(mx.array(large), None, 1e-6)
print("rms_norm of the same values:", normed[0].item())
expected = {
    "mean of 100 times 1000": (float("inf"), 1000.0),
    "mean of 20 times 1000": (1000.0, 1000.0),
}
holds = seen == expected and abs(normed[0].item() - 1) < 0.01
sys.exit(0 if holds else "MLX or NumPy has changed")
PY

#!/usr/bin/env bash
# Expected: mlx-lm rotates a short prompt of a LongRoPE model (Phi-3 and 4 mini) by its short factors, as transformers does.
# Really: SuScaledRoPE takes short_factor and never uses it; short and long texts are rotated by the long factors. Nothing is said.
# Seen: mlx-lm 0.32.2, mlx 0.32.4 (CPU), Linux, 2026-11-28.
# Bites: comparisons of short answers with transformers or llama.cpp at a small context.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx-lm==0.32.2" "mlx[cpu]==0.32.4"
"$folder/venv/bin/python" - <<'PY'
import sys
import mlx.core as mx
from mlx_lm.models.rope_utils import SuScaledRoPE
x = mx.random.normal((1, 1, 4, 8))
made = {"original_max_position_embeddings": 64, "max_position_embeddings": 512}
ropes = [SuScaledRoPE(8, short_factor=[s] * 4, long_factor=[4.0] * 4, **made) for s in (1.0, 2.0)]
same = mx.array_equal(ropes[0](x), ropes[1](x)).item()
print("4 tokens of 64: other short factors change the rotation:", not same)
sys.exit(0 if same else "mlx-lm has changed")
PY

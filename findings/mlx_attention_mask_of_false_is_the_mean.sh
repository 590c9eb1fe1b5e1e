#!/usr/bin/env bash
# Expected: a query that may attend to nothing gets the same result whether the mask is boolean or additive (0 and -inf).
# Really: with a boolean row of False, mx.fast.scaled_dot_product_attention returns the mean of all values, as if every
#   key had the same score. With an additive row of -inf it returns NaN.
# Seen: mlx 0.32.4 (CPU), Linux, 2026-11-28.
# Bites: batches with padded rows. A test that looks for NaN finds nothing, and masked values, also of padding, enter the
#   row's output, which later layers read if nothing else masks it.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4"
"$folder/venv/bin/python" - <<'PY'
import sys
import mlx.core as mx
queries = mx.random.normal((1, 1, 2, 32))
keys = mx.random.normal((1, 1, 3, 32))
values = mx.random.normal((1, 1, 3, 32))
allowed = mx.array([[False, False, False], [True, False, False]])
attend = mx.fast.scaled_dot_product_attention
boolean = attend(queries, keys, values, scale=1.0, mask=allowed)[0, 0]
added = mx.where(allowed, 0.0, -mx.inf)
additive = attend(queries, keys, values, scale=1.0, mask=added)[0, 0]
is_mean = mx.allclose(boolean[0], values[0, 0].mean(axis=0), atol=1e-5).item()
is_nan = mx.isnan(additive[0]).all().item()
same = mx.allclose(boolean[1], additive[1], atol=1e-5).item()
print("a row with one key: boolean and additive agree:", same)
print("a row with no key: boolean is the mean of all values:", is_mean, "| additive is NaN:", is_nan)
sys.exit(0 if same and is_mean and is_nan else "mlx has changed")
PY

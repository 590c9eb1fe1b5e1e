#!/usr/bin/env bash
# Expected: with one key, the first numbers of a longer draw are those of a shorter one, as in NumPy, and the first keys of
#   mx.random.split(key, 3) are those of mx.random.split(key, 2).
# Really: MLX pairs the first half of its counters with the second, so a number depends on how many are drawn. Two drawn
#   numbers share none with three, and three and four share the first and the third. split depends on its count as well.
# Seen: mlx 0.32.4 (CPU), Linux, 2026-11-28.
# Bites: speculative or batched sampling that draws the noise of all its rows at once: row 0 of a draw for sixteen rows is
#   not what one row alone would have drawn from the same key. Derive a key per row (position), and draw each by itself.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4" "numpy==2.4.6"
"$folder/venv/bin/python" - <<'PY'
import sys
import mlx.core as mx, numpy as np
key = mx.random.key(7)
drawn = {count: mx.random.uniform(shape=(count,), key=key).tolist() for count in (2, 3, 4, 16)}
for count, numbers in drawn.items():
    print(f"{count} numbers:", [round(number, 4) for number in numbers[:4]])
keys = [mx.random.split(key, count)[0].tolist() for count in (2, 3)]
print("first key of split into 2 and 3:", *keys)
logits = mx.zeros((16, 1000))
tokens = [mx.random.categorical(logits[:rows], key=key)[0].item() for rows in (1, 16)]
print("token of row 0 among 1 and 16 rows:", tokens)
long, short = np.random.default_rng(7).random(4), np.random.default_rng(7).random(3)
shares = [a == b for a, b in zip(drawn[3], drawn[4])]
seen = [drawn[2][0] == drawn[3][0], shares, keys[0] == keys[1], tokens[0] == tokens[1]]
assert long[:3].tolist() == short.tolist()  # NumPy's numbers do not depend on the count
sys.exit(0 if seen == [False, [True, False, True], False, False] else "mlx has changed")
PY

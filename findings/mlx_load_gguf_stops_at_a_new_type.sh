#!/usr/bin/env bash
# Expected: mx.load of a GGUF file raises an error for a tensor of a type that it does not know.
# Really: at an MXFP4 or ternary (TQ1_0) tensor it stops without a word. That tensor and all tensors behind it are
#   missing from the result. For Q5_0, which it knows but cannot convert, it raises RuntimeError as expected.
# Seen: mlx 0.32.4 (CPU), gguf 0.19.0, Linux, 2026-11-28.
# Bites: loaders that read GGUF files with mx.load, and set only the weights that they get (gpt-oss has MXFP4 tensors):
#   the rest keeps its random initialization.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4" "gguf==0.19.0"
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
import gguf, mlx.core as mx, numpy as np
rows = np.linspace(-3, 3, 512, dtype=np.float32).reshape(2, 256)
seen = {}
for name in ("F16", "MXFP4", "TQ1_0", "Q5_0"):
    kind = gguf.GGMLQuantizationType[name]
    path = f"{sys.argv[1]}/{name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", rows)
    if name == "F16":
        writer.add_tensor("second", rows.astype(np.float16))
    else:
        writer.add_tensor("second", gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.add_tensor("third", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [tensor.name for tensor in gguf.GGUFReader(path).tensors] == ["first", "second", "third"]
    try:
        seen[name] = sorted(mx.load(path))
    except RuntimeError:
        seen[name] = "RuntimeError"
for name, result in seen.items():
    print(f"first (F32), second ({name}), third (F32) -> mx.load: {result}")
whole = ["first", "second", "third"]
expected = {"F16": whole, "MXFP4": ["first"], "TQ1_0": ["first"], "Q5_0": "RuntimeError"}
sys.exit(0 if seen == expected else "mlx has changed")
PY

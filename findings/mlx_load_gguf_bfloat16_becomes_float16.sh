#!/usr/bin/env bash
# Expected: mx.load gives a BF16 tensor of a GGUF file as bfloat16, as it does for safetensors: MLX has that type.
# Really: it comes as float16. Values above 65504 become inf, and values below 3e-8 become 0, without a word.
# Seen: mlx 0.32.4 (CPU), gguf 0.19.0, Linux, 2026-11-28.
# Bites: BF16 GGUF files read with mx.load, and comparisons with the same model's safetensors, which differ in dtype.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4" "gguf==0.19.0"
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
import gguf, mlx.core as mx, numpy as np
values = [1.5, 2.0**17, 2.0**-30]  # all are exact in bfloat16
row = np.array([values + [0.0] * 29], dtype=np.float32)
kind = gguf.GGMLQuantizationType.BF16
path = f"{sys.argv[1]}/bf16.gguf"
writer = gguf.GGUFWriter(path, "llama")
writer.add_tensor("a", gguf.quants.quantize(row, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
[tensor] = gguf.GGUFReader(path).tensors
assert gguf.quants.dequantize(tensor.data, kind)[0, :3].tolist() == values
loaded = mx.load(path)["a"]
other = f"{sys.argv[1]}/bf16.safetensors"
mx.save_safetensors(other, {"a": mx.array(row).astype(mx.bfloat16)})
again = mx.load(other)["a"]
seen = [str(loaded.dtype), loaded[0, :3].tolist(), str(again.dtype), again[0, :3].tolist()]
print("written:", values, "| GGUF:", *seen[:2], "| safetensors:", *seen[2:])
expected = ["mlx.core.float16", [1.5, float("inf"), 0.0], "mlx.core.bfloat16", values]
sys.exit(0 if seen == expected else "mlx has changed")
PY

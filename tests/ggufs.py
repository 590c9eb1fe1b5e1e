"""GGUF files as llama.cpp's converter writes them, made by hand: its types in numpy."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tinymodels import CHAT_TEMPLATE, END, model_config, random_model, tokenizer

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
NAMES = {  # llama.cpp's name -> Hugging Face's
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Arrays = dict[str, np.ndarray]


def encode(weight: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """A matrix as bytes of a type, and what these bytes mean, in float32."""
    if kind == "F32":
        return weight.astype("<f4").tobytes(), weight.astype(np.float32)
    if kind == "F16":
        half = weight.astype("<f2")
        return half.tobytes(), half.astype(np.float32)
    blocks = weight.reshape(-1, 32).astype(np.float32)
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    peak = np.abs(blocks).max(axis=1)
    scale = {"Q4_0": peak / 7, "Q4_1": (high - low) / 15, "Q8_0": peak / 127}[kind]
    scale = np.maximum(scale, 1e-4).astype("<f2")
    wide = scale.astype(np.float32)[:, None]
    if kind == "Q8_0":
        codes = np.clip(np.round(blocks / wide), -128, 127)
        parts = [scale.view("u1").reshape(-1, 2), codes.astype("i1").view("u1")]
        return np.concatenate(parts, axis=1).tobytes(), (codes * wide).reshape(weight.shape)
    least = low.astype("<f2") if kind == "Q4_1" else None
    base = -8 * wide if least is None else least.astype(np.float32)[:, None]
    codes = np.clip(np.round((blocks - base) / wide), 0, 15)
    # The low half of a byte is weight i of a block, the high half is weight i + 16.
    packed = (codes[:, :16] + 16 * codes[:, 16:]).astype("u1")
    heads = [scale] if least is None else [scale, least]
    parts = [*(head.view("u1").reshape(-1, 2) for head in heads), packed]
    return np.concatenate(parts, axis=1).tobytes(), (codes * wide + base).reshape(weight.shape)


def text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(content: Any) -> bytes:
    """A metadata value with its type."""
    match content:
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<II", 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str():
            return struct.pack("<I", 8) + text(content)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(content)) + b"".join(map(text, content))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(content)}f", 9, 6, len(content), *content)
        case [*numbers]:
            return struct.pack(f"<IIQ{len(numbers)}i", 9, 5, len(numbers), *numbers)
    raise TypeError(content)


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Arrays, kinds: Mapping[str, str]
) -> Arrays:
    """Write a file (`kinds`: the types of matrices; vectors are F32); what its bytes mean."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(text(key) + value(content) for key, content in metadata.items())
    infos, data, meant = b"", b"", {}
    for name, array in tensors.items():
        kind = kinds.get(name, "F32") if array.ndim > 1 else "F32"
        content, meant[name] = encode(array, kind)
        shape = array.shape[::-1]
        infos += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", TYPES[kind], len(data))
        data += content + b"\0" * (-len(content) % 32)
    header += infos
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return meant


def vocabulary() -> dict[str, Any]:
    """The tiny tokenizer as metadata."""
    content = json.loads(tokenizer().backend_tokenizer.to_str())
    ids = tokenizer().get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == END else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ids[END],
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter permutes Llama's."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def gguf_of(family: str, seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], Arrays, Arrays]:
    """A random model: its metadata, its tensors by llama.cpp's names, and by Hugging Face's."""
    shape = {"model_type": family} | overrides
    config = model_config("qwen3" if family == "qwen3" else "llama", **shape)
    model = random_model(config, seed)
    weights = {
        name: np.array(array.astype(mx.float32)) for name, array in tree_flatten(model.parameters())
    }
    metadata = {
        "general.architecture": family,
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": config["head_dim"],
        f"{family}.attention.value_length": config["head_dim"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": config["rope_theta"],
        **vocabulary(),
    }
    names = {
        f"model.layers.{n}.{theirs}": f"blk.{n}.{ours}"
        for n in range(config["num_hidden_layers"])
        for ours, theirs in NAMES.items()
    }
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, weight in weights.items():
        stem, kind = name.rsplit(".", 1)
        own = names[stem]
        part = own.rpartition(".")[2]
        permuted = family == "llama" and part in heads
        tensors[f"{own}.{kind}"] = interleave(weight, heads[part]) if permuted else weight
    return metadata, tensors, weights

"""GGUF files as llama.cpp's converter writes them, made with the gguf package."""

import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from mlx.utils import tree_flatten
from tinymodels import CHAT_TEMPLATE, END, SHAPE, random_model, tokenizer

Arrays = dict[str, np.ndarray]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
ROWS = tomllib.loads((Path(__file__).parent / "ggufs.toml").read_text())


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows of q or k as llama.cpp's converter does it for Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def permuted(name: str, weight: np.ndarray) -> np.ndarray:
    """Permute q and k, and no other tensor."""
    kinds = {"q_proj": SIZES["num_attention_heads"], "k_proj": SIZES["num_key_value_heads"]}
    heads = kinds.get(name.split(".")[-2])
    return interleave(weight, heads) if heads else weight


def plus_one(name: str, weight: np.ndarray) -> np.ndarray:
    """Add 1 to norms, which Gemma stores minus 1."""
    return weight + 1 if name.endswith("norm.weight") else weight


def tiled(name: str, weight: np.ndarray) -> np.ndarray:
    """Reorder value heads as in Qwen 3.5's files: the first of each key head, then the second."""
    per_head = ("in_proj_b.weight", "in_proj_a.weight", "dt_bias", "A_log")
    size = 1 if name.endswith(per_head) else 32  # rows of a value head
    heads = np.arange(4 * size).reshape(2, 2, size)  # two value heads for each of two key heads
    order = heads.swapaxes(0, 1).reshape(-1)
    weight = -np.exp(weight) if name.endswith("A_log") else weight
    if "in_proj_qkv" in name or "conv1d" in name:  # 128 rows of queries and keys, then values
        return weight[np.concatenate([np.arange(128), 128 + order])].squeeze()
    if "linear_attn.out_proj" in name:
        return weight[:, order]
    return weight[order] if "linear_attn" in name and "norm" not in name else weight


def by_kind(name: str, weight: np.ndarray) -> np.ndarray:
    """Reorder Qwen3-Next's merged rows: all queries, keys, values and gates, not by key head."""
    if "in_proj_qkvz" in name:
        # A key head has 32 rows of queries, 32 of keys, 64 of values and 64 of gates.
        parts = np.split(weight.reshape(2, 192, -1), [32, 64, 128], axis=1)
        return np.concatenate([part.reshape(-1, weight.shape[-1]) for part in parts])
    return -np.exp(weight) if name.endswith("A_log") else weight.squeeze()


def mamba(name: str, weight: np.ndarray) -> np.ndarray:
    """Give Mamba's vectors two dimensions, and drop the convolution's dimension of size 1."""
    if name.endswith(("A_log", "mixer.D")):
        return (-np.exp(weight) if "A_log" in name else weight).reshape(-1, 1)
    return weight.reshape(2, -1) if name.endswith("mixer.norm.weight") else weight.squeeze()


# How the converter changes tensors, by architecture.
CHANGES = {
    **dict.fromkeys(("llama", "mixtral", "granite"), permuted),
    **dict.fromkeys(("gemma2", "gemma3"), plus_one),
    **dict.fromkeys(("qwen35", "qwen35moe"), tiled),
    "qwen3next": by_kind,
    "lfm2": lambda name, weight: weight.squeeze() if "conv.conv" in name else weight,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), mamba),
}
# Names of tensors in mlx-lm that differ from those in the checkpoints that are converted.
HUGGING_FACE = {
    "language_model.": "",
    "mixer.switch_mlp.fc1": "mlp.experts.up_proj",
    "mixer.switch_mlp.fc2": "mlp.experts.down_proj",
    "switch_glu.gate_proj": "gate_up_proj",
    "switch_glu.up_proj": "gate_up_proj",
    "switch_glu.": "",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "self_attn.embed_q": "self_attn.k_b_proj",
    "self_attn.unembed_out": "self_attn.v_b_proj",
    "block_sparse_moe.switch_mlp": "mlp.experts",
    "switch_mlp": "experts",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "mixer.dt_bias": "mixer.dt.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "self_attn.sinks": "self_attn.sinks.weight",
    "layer_scalar": "layer_scalar.weight",
}


def encode(weight: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as the bytes of a type, and the float32 values that these bytes stand for."""
    number = GGMLQuantizationType[kind]
    if kind == "F64":
        return weight.astype(np.float64), weight
    data = gguf.quantize(weight.astype(np.float32), number)
    return data, gguf.dequantize(data, number).reshape(weight.shape)


def random_blocks(kind: GGMLQuantizationType, count: int, seed: int = 0) -> np.ndarray:
    """Up to `count` blocks of random bits, those whose values are finite and below 1000."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks.reshape(1, -1), kind).reshape(count, -1)
    return blocks[(np.abs(values).max(axis=1) < 1000) & np.isfinite(values).all(axis=1)]


def _add(writer: gguf.GGUFWriter, key: str, content: Any) -> None:
    """Add a key as the converter does: whole numbers are unsigned unless they are in a list."""
    if isinstance(content, list):
        writer.add_array(key, content)
    elif type(content) is int:
        writer.add_uint32(key, content)
    else:
        writer.add_key_value(key, content, GGUFValueType.get_type(content))


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Arrays,
    kinds: Mapping[str, str],
    most_tensors: int = 0,
) -> Arrays:
    """Write a file, and return the float32 values that its bytes stand for.

    kinds: the types of matrices, by name; others and vectors are F32.
    most_tensors: the most tensors of a file, if it is split into several.
    """
    metadata = dict(metadata)
    architecture = metadata.pop("general.architecture")
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most_tensors)
    for key in sorted(metadata, key=lambda key: not key.startswith("general.")):
        content = metadata[key]
        _add(writer, key, content)
    stored = {}
    for name, array in tensors.items():
        kind = kinds.get(name, "F32") if array.ndim > 1 and array.shape[-1] % 32 == 0 else "F32"
        data, stored[name] = encode(array, kind)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


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


def without_constants(model: Any) -> Any:
    """A model with random norms, biases and routers: a constant would hide a dropped tensor."""
    random = np.random.default_rng(1)
    weights = [
        (name, array + mx.array(0.2 * random.normal(size=array.shape)).astype(array.dtype))
        for name, array in tree_flatten(model.parameters())
        if array.size > 1 and (array == array.reshape(-1)[0]).all().item()
    ]
    model.load_weights(weights, strict=False)
    return model


def gguf_of(name: str, seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], Arrays, Any]:
    """A random model of a row in ggufs.toml: metadata, tensors by GGUF's names, mlx-lm's model."""
    row = ROWS[name]
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer()))
    config = SHAPE | SIZES | sizes | {"tie_word_embeddings": True}
    config |= {"model_type": row["model"]} | row.get("config", {}) | overrides
    model = without_constants(random_model(config, seed))
    family = {"mixtral": "llama", "gemma4moe": "gemma4"}.get(name, name)
    layers = config["num_hidden_layers"]
    metadata = {
        "block_count": layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("global_head_dim", config["head_dim"]),
        "attention.value_length": config.get("global_head_dim", config["head_dim"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    } | row.get("keys", {})
    if "attention.layer_norm_epsilon" in metadata:
        del metadata["attention.layer_norm_rms_epsilon"]
    metadata = {f"{family}.{key}": content for key, content in metadata.items()}
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    names = gguf.get_tensor_name_map(architecture, layers)
    tensors = {}
    if family == "gemma4":  # divisors of frequencies: 4 of 16 pairs are rotated
        tensors["rope_freqs.weight"] = np.array([1.0] * 4 + [1e30] * 12, np.float32)
    for hub_name, array in tree_flatten(model.parameters()):
        if hub_name.endswith("lm_head.weight") and hasattr(model, "tie_word_embeddings"):
            continue
        changed = np.array(array.astype(mx.float32))
        changed = CHANGES[name](hub_name, changed) if name in CHANGES else changed
        for ours, hub in HUGGING_FACE.items():
            hub_name = hub_name.replace(ours, hub)
        if "mlp.experts" in hub_name:
            hub_name = hub_name.replace("backbone", "model")
        theirs = names.get_name(hub_name, (".weight", ".bias", ".scale"))
        if theirs in tensors:  # the experts' gates
            changed = np.concatenate([tensors[theirs], changed], axis=1)
        if "in_proj_qkvz" in hub_name:  # 256 rows of queries, keys and values, then the gates
            theirs = theirs.replace("ssm_in", "attn_qkv")
            tensors[theirs.replace("qkv", "gate")] = changed[256:]
            changed = changed[:256]
        tensors[theirs] = np.ascontiguousarray(changed)
    return {"general.architecture": family, **metadata, **vocabulary()}, tensors, model


def model_of(folder: Path) -> Any:
    """mlx-lm's model for a folder's config, without its weights."""
    config = json.loads((folder / "config.json").read_text())
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))

"""The DFlash drafter from its paper, in numpy and float64: slow, without a cache, on its own."""

import math

import numpy as np


def forward(config: dict, weights: dict, taps: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Hidden states [B, D] after the final norm.

    Args:
        config: resolved fields, with per-layer `windows` and `causal`.
        weights: checkpoint name -> array.
        taps: [T, K*D], the target's features of the whole text before the block.
        block: [B, D], embeddings of the anchor and the masks.
    """
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    eps, start = config["rms_norm_eps"], len(taps)
    context = rms_norm(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = block.astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = rms_norm(x, own["input_layernorm.weight"], eps)
        seen = visible(start, len(block), config["windows"][layer], config["causal"][layer])
        x = x + attention(config, own, normed, context, seen)
        normed = rms_norm(x, own["post_attention_layernorm.weight"], eps)
        gate = normed @ own["mlp.gate_proj.weight"].T
        up = normed @ own["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"], eps)


def visible(start: int, block: int, window: int | None, causal: bool) -> np.ndarray:
    """Which of the start + block positions each row of the block sees, one decision at a time."""
    seen = np.zeros((block, start + block), bool)
    for row in range(block):
        for key in range(start + block):
            query = start + row
            if key < start:
                seen[row, key] = window is None or query - key < window
            elif not causal:
                seen[row, key] = True  # the block itself stays visible, both ways
            else:
                seen[row, key] = key <= query and (window is None or query - key < window)
    return seen


def attention(
    config: dict, weights: dict, x: np.ndarray, context: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """Grouped-query attention of the block over context and block, [B, D]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = np.concatenate([context, x])
    start = len(context)
    eps = config["rms_norm_eps"]
    queries, keys = project(weights, "q_proj", x, heads), project(weights, "k_proj", rows, kv_heads)
    queries = rms_norm(queries, weights["self_attn.q_norm.weight"], eps)
    keys = rms_norm(keys, weights["self_attn.k_norm.weight"], eps)
    values = project(weights, "v_proj", rows, kv_heads)
    queries, keys = rope(config, queries, start), rope(config, keys, 0)
    out = np.empty_like(queries)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = queries[head] @ keys[shared].T / math.sqrt(config["head_dim"])
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[head] = scores / scores.sum(axis=1, keepdims=True) @ values[shared]
    out = out.transpose(1, 0, 2).reshape(len(x), -1)
    return linear(weights, "o_proj", out)


def project(weights: dict, name: str, x: np.ndarray, heads: int) -> np.ndarray:
    return linear(weights, name, x).reshape(len(x), heads, -1).transpose(1, 0, 2)


def linear(weights: dict, name: str, x: np.ndarray) -> np.ndarray:
    out = x @ weights[f"self_attn.{name}.weight"].T
    return out + weights.get(f"self_attn.{name}.bias", 0.0)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rope(config: dict, x: np.ndarray, start: int) -> np.ndarray:
    """Rotate x [H, L, head_dim], whose rows stand at positions start, start + 1, ..."""
    frequencies, magnitude = rope_frequencies(config)
    angles = np.outer(np.arange(start, start + x.shape[1]), frequencies)
    cos, sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def rope_frequencies(config: dict) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, and the factor on the rotated values.

    YaRN (arXiv 2309.00071): pairs that turn often keep their frequency, slow ones are interpolated.
    """
    dims, theta, scaling = config["head_dim"], config["rope_theta"], config["rope_scaling"]
    frequencies = theta ** -(np.arange(0, dims, 2) / dims)
    if scaling is None:
        return frequencies, 1.0
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor, 1.0

    def pair_that_turns(times: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dims * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), dims - 1)
    slow = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    return frequencies * (1 - slow) + frequencies / factor * slow, 0.1 * math.log(factor) + 1

"""Block drafters in numpy and float64, written from their papers: slow and without caches."""

import math

import numpy as np
from numpy_layers import attend, rms, rotate, sigmoid


def forward(config: dict, weights: dict, taps: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Hidden states [B, D] after the final norm.

    Args:
        config: resolved fields, with per-layer `windows` and `causal`.
        weights: checkpoint name -> array.
        taps: [T, K*Dt], the target's features of the whole text before the block.
        block: [B, D], embeddings of the anchor and the masks.
    """
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    eps = config["rms_norm_eps"]
    start = len(taps)
    if "hidden_dim_adapter.proj.weight" in weights:
        taps_of_layers = np.split(taps, len(config["target_layer_ids"]), axis=-1)
        adapter = weights["hidden_dim_adapter.proj.weight"]
        taps = np.concatenate([tap @ adapter.T for tap in taps_of_layers], axis=-1)
    context = rms(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = block.astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        named = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = rms(x, named["input_layernorm.weight"], eps)
        seen = visible(
            start, block=len(block), window=config["windows"][layer], causal=config["causal"][layer]
        )
        kernels = conv_kernels(config, weights=named, name="attention_conv", rows=normed)
        attended = attention(
            config, weights=named, x=convolve(normed, kernels, 0), context=context, seen=seen
        )
        x = x + convolve(attended, kernels, 1)
        normed = rms(x, named["post_attention_layernorm.weight"], eps)
        kernels = conv_kernels(config, weights=named, name="mlp_conv", rows=normed)
        rows = convolve(normed, kernels, 0)
        gate = rows @ named["mlp.gate_proj.weight"].T
        up = rows @ named["mlp.up_proj.weight"].T
        out = (gate * sigmoid(gate) * up) @ named["mlp.down_proj.weight"].T
        x = x + convolve(out, kernels, 1)
    return rms(x, weights["norm.weight"], eps)


def conv_kernels(config: dict, weights: dict, name: str, rows: np.ndarray) -> np.ndarray | None:
    """DFlash2's kernels [B, 2, K, D] for a sub-layer's input and output; None for DFlash."""
    if f"{name}.base_kernel" not in weights:
        return None
    base = weights[f"{name}.base_kernel"]
    dynamic = rows @ weights[f"{name}.kernel_projection.weight"].T
    dynamic = dynamic.reshape(len(rows), 2, base.shape[1], -1)
    return base + np.repeat(dynamic, config["conv_group_size"], axis=-1)


def convolve(rows: np.ndarray, kernels: np.ndarray | None, side: int) -> np.ndarray:
    """Convolve each row with the rows before it in the block. side: 0 for input, 1 for output."""
    if kernels is None:
        return rows
    out = np.zeros_like(rows)
    for row in range(len(rows)):
        for back in range(min(kernels.shape[2], row + 1)):
            out[row] += kernels[row, side, back] * rows[row - back]
    return out


def walk(
    config: dict, weights: dict, hidden: np.ndarray, logits: np.ndarray, anchor: int
) -> list[int]:
    """The chain after `anchor` that DFlash2's selector picks greedily, slot by slot."""
    selector = {
        name.removeprefix("candidate_selector."): np.asarray(value, np.float64)
        for name, value in weights.items()
        if name.startswith("candidate_selector.")
    }
    chain = [anchor]
    for state, row in zip(hidden @ selector["hidden_projection.weight"].T, logits, strict=True):
        candidates = np.argsort(-row)[: config["selector_top_k"]]
        query = selector["predecessor_codebook"][chain[-1]] * state
        scores = row[candidates] + selector["successor_codebook"][candidates] @ query
        chain.append(int(candidates[scores.argmax()]))
    return chain[1:]


def base_logits(config: dict, weights: dict, hidden: np.ndarray) -> np.ndarray:
    """The logits [B, DV] of the drafter's head, after multiplier, softcap and scale."""
    logits = hidden @ np.asarray(weights["lm_head.weight"], np.float64).T
    logits = logits * config["output_multiplier"]
    cap = config["final_logit_softcapping"]
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    return logits * config["logit_scale"]


def markov_walk(
    config: dict,
    weights: dict,
    hidden: np.ndarray,
    logits: np.ndarray,
    anchor: int,
    noise: np.ndarray | None = None,
    temperature: float = 1.0,
) -> tuple[list[int], np.ndarray]:
    """The tokens [L], as target ids, that DSpark picks one by one, and their logits [L, DV].

    The logits are `logits` [L, DV] with the Markov head's bias for the token before. `hidden`
    [L, D] are the states of the same rows. With `noise` [L, DV], the largest of logits /
    temperature + noise is picked.
    """
    named = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    w1 = named["markov_head.markov_w1.weight"]
    w2 = named["markov_head.markov_w2.weight"]
    state = np.zeros(w1.shape[1])
    previous = anchor
    tokens = []
    corrected = []
    for row, (h, base) in enumerate(zip(hidden, logits, strict=True)):
        e = w1[previous]
        inner = e
        if "markov_head.gate_proj.weight" in named:
            gate = affine(named, "markov_head.gate_proj", np.concatenate([h, e]))
            inner = sigmoid(gate) * e
        if "markov_head.joint_proj.weight" in named:
            joint = affine(named, "markov_head.joint_proj", np.concatenate([state, e, h]))
            gate, candidate, out = np.split(joint, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            inner = np.tanh(out)
        corrected.append(base + config["logit_scale"] * (w2 @ inner))
        scores = corrected[-1] if noise is None else corrected[-1] / temperature + noise[row]
        chosen = int(scores.argmax())
        offset = int(weights["d2t"][chosen]) if "d2t" in weights else 0
        previous = chosen + offset
        tokens.append(previous)
    return tokens, np.array(corrected)


def affine(weights: dict, name: str, x: np.ndarray) -> np.ndarray:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def visible(start: int, block: int, window: int | None, causal: bool) -> np.ndarray:
    """Which of the start + block positions each row of the block sees [block, start + block]."""
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
    """Grouped-query attention [B, D] of the block's rows to the context and the block."""
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    rows = np.concatenate([context, x])
    start = len(context)
    eps = config["rms_norm_eps"]
    queries = project(weights, name="q_proj", x=x, heads=heads)
    keys = project(weights, name="k_proj", x=rows, heads=kv_heads)
    queries = rms(queries, weights["self_attn.q_norm.weight"], eps)
    keys = rms(keys, weights["self_attn.k_norm.weight"], eps)
    values = project(weights, name="v_proj", x=rows, heads=kv_heads)
    frequencies, magnitude = rope_frequencies(config)
    rope = {
        "frequencies": frequencies,
        "pairs": not config.get("rope_neox", True),
        "magnitude": magnitude,
    }
    queries = rotate(queries, np.arange(start, start + len(x)), **rope)
    keys = rotate(keys, np.arange(len(rows)), **rope)
    sinks = weights.get("self_attn.attention_sink_bias")
    out = attend(
        queries, k=keys, v=values, seen=seen, scale=config["head_dim"] ** -0.5, sinks=sinks
    )
    return linear(weights, "o_proj", out)


def project(weights: dict, name: str, x: np.ndarray, heads: int) -> np.ndarray:
    return linear(weights, name, x).reshape(len(x), heads, -1)


def linear(weights: dict, name: str, x: np.ndarray) -> np.ndarray:
    out = x @ weights[f"self_attn.{name}.weight"].T
    return out + weights.get(f"self_attn.{name}.bias", 0.0)


def rope_frequencies(config: dict) -> tuple[np.ndarray, float]:
    """The frequency of each pair in radians per position, and the factor of rotated values.

    YaRN (arXiv 2309.00071): high frequencies are kept, low ones are interpolated.
    """
    dims = config["head_dim"]
    theta = config["rope_theta"]
    scaling = config["rope_scaling"]
    frequencies = theta ** -(np.arange(0, dims, 2) / dims)
    if scaling is None:
        return frequencies, 1.0
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequencies / factor, 1.0

    def pair_with_rotations(times: float) -> float:
        """The (fractional) index of the pair that rotates `times` times in the original context."""
        length = scaling["original_max_position_embeddings"]
        return dims * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with_rotations(scaling.get("beta_fast", 32))
    high = pair_with_rotations(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dims - 1)
    interpolated = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    magnitude = scaling.get("attention_factor", 0.1 * math.log(factor) + 1)
    scaled = frequencies * (1 - interpolated) + frequencies / factor * interpolated
    return scaled, magnitude

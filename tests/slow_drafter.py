"""DFlash and DFlash2 written a second time, slowly: numpy, float64, no cache, a row at a time.

It follows the papers' formulas and shares no code with the package; it reads a raw config, so the
resolver is not trusted either. Only plain spellings of the fields are understood here.
"""

import math

import numpy as np


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def frequencies(config):
    """Inverse frequencies [head_dim / 2] and the growth of queries and keys."""
    dims, scaling = config["head_dim"], config.get("rope_scaling") or {}
    inverse = np.array([config["rope_theta"] ** (-2 * i / dims) for i in range(dims // 2)])
    kind, factor = scaling.get("rope_type"), scaling.get("factor", 1.0)
    if kind == "linear":
        return inverse / factor, 1.0
    if kind != "yarn":
        return inverse, 1.0
    length = scaling["original_max_position_embeddings"]

    def dimension(turns):  # where a frequency makes this many turns over the original length
        return dims / 2 * math.log(length / (turns * 2 * math.pi)) / math.log(config["rope_theta"])

    low, high = dimension(32), dimension(1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    for i in range(dims // 2):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        inverse[i] = inverse[i] * (1 - slow) + inverse[i] / factor * slow
    return inverse, scaling.get("attention_factor", 0.1 * math.log(factor) + 1)


def rotate(heads, position, config):
    """Turn one row's heads [H, head_dim] to their position."""
    inverse, growth = frequencies(config)
    cos, sin = np.cos(position * inverse), np.sin(position * inverse)
    first, second = np.split(heads, 2, axis=-1)
    return growth * np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class SlowDrafter:
    """One drafter: `weights` by checkpoint name, `config` as a raw dict."""

    def __init__(self, weights, config):
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.config = config

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, name, x):
        return rms(x, self.weights[f"{name}.weight"])

    def hidden(self, context, block):
        """Hidden states [B, D] of block embeddings [B, D] after all context taps [S, K*D]."""
        features = self.norm("hidden_norm", self.linear("fc", context))
        x = np.asarray(block, np.float64)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            inputs = self.norm(f"{name}.input_layernorm", x)
            x = x + self.wrapped(
                f"{name}.attention_conv",
                inputs,
                lambda h, layer=layer: self.attention(layer, features, h),
            )
            inputs = self.norm(f"{name}.post_attention_layernorm", x)
            x = x + self.wrapped(
                f"{name}.mlp_conv", inputs, lambda h, name=name: self.mlp(f"{name}.mlp", h)
            )
        return self.norm("norm", x)

    def mlp(self, name, x):
        gate = self.linear(f"{name}.gate_proj", x)
        up = self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up)

    def wrapped(self, name, x, sublayer):
        """A sub-layer between its two convolutions, if the checkpoint has them."""
        if f"{name}.base_kernel" not in self.weights:
            return sublayer(x)
        base = self.weights[f"{name}.base_kernel"]  # [2, kernel, D]
        dynamic = self.linear(f"{name}.kernel_projection", x).reshape(len(x), 2, base.shape[1], -1)
        group = self.config["dflash_config"]["conv_group_size"]

        def convolve(rows, side):
            out = np.zeros_like(rows)
            for i in range(len(rows)):
                for back in range(base.shape[1]):
                    if i - back >= 0:
                        kernel = base[side, back] + np.repeat(dynamic[i, side, back], group)
                        out[i] += kernel * rows[i - back]
            return out

        return convolve(sublayer(convolve(x, 0)), 1)

    def attention(self, layer, features, x):
        name, config = f"layers.{layer}.self_attn", self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size, start = config["head_dim"], len(features)
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        sliding = kinds[layer] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        rows = np.concatenate([features, x])
        keys = self.linear(f"{name}.k_proj", rows).reshape(len(rows), kv_heads, size)
        keys = self.norm(f"{name}.k_norm", keys)
        keys = np.stack([rotate(key, position, config) for position, key in enumerate(keys)])
        values = self.linear(f"{name}.v_proj", rows).reshape(len(rows), kv_heads, size)
        queries = self.linear(f"{name}.q_proj", x).reshape(len(x), heads, size)
        queries = self.norm(f"{name}.q_norm", queries)
        outputs = []
        for i, row in enumerate(queries):
            position, row = start + i, rotate(row, start + i, config)
            seen = np.ones(len(rows), bool)
            for key in range(len(rows)):
                if causal and key > position:
                    seen[key] = False
                too_far = sliding and position - key >= config["sliding_window"]
                if too_far and (causal or key < start):
                    seen[key] = False
            for head in range(heads):
                group = head * kv_heads // heads
                scores = keys[seen, group] @ row[head] / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                outputs.append(weights @ values[seen, group] / weights.sum())
        return self.linear(f"{name}.o_proj", np.reshape(outputs, (len(x), heads * size)))

    def walk(self, hidden, logits, anchor):
        """The candidate selector's greedy chain after `anchor`, one slot after the other."""
        name, top = "candidate_selector", self.config["dflash_config"]["selector_top_k"]
        chain = [anchor]
        for state, row in zip(
            self.linear(f"{name}.hidden_projection", hidden), logits, strict=True
        ):
            candidates = np.argsort(-row)[:top]
            pull = self.weights[f"{name}.predecessor_codebook"][chain[-1]] * state
            scores = row[candidates] + self.weights[f"{name}.successor_codebook"][candidates] @ pull
            chain.append(int(candidates[scores.argmax()]))
        return chain[1:]

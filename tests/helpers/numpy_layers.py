"""What the drafters' references in numpy are made of, as papers have it: slow, without caches."""

from __future__ import annotations

from typing import Any

import numpy as np


def rms(x: Any, weight: Any, eps: float) -> Any:
    """Normed along the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    """Along the last axis."""
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rotate(
    x: Any, positions: Any, frequencies: Any, pairs: bool = False, magnitude: float = 1.0
) -> Any:
    """RoPE of the first dimensions of x [T, H, d] at positions [T], by halves or in pairs."""
    angle = np.asarray(positions)[:, None, None] * frequencies
    cos, sin = (magnitude * f(angle).astype(x.dtype) for f in (np.cos, np.sin))
    half = len(frequencies)
    out = x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if pairs
        else (slice(half), slice(half, 2 * half))
    )
    a = x[..., first]
    b = x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def attend(q: Any, k: Any, v: Any, seen: Any, scale: float, sinks: Any = None) -> Any:
    """Attention [T, H*d] of queries [T, H, d] to the keys [S, KV, d] that each has `seen` [T, S].

    `sinks` [H] are the scores of one more key, whose value is 0.
    """
    k, v = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(seen, np.einsum("thd,shd->hts", q, k) * scale, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return np.einsum("hts,shd->thd", weights / total, v).reshape(len(q), -1)

"""Layers in numpy for the references of drafters: slow, and without caches."""

from __future__ import annotations

from typing import Any

import numpy as np


def rms(x: Any, weight: Any, eps: float) -> Any:
    """RMS norm along the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    """Softmax along the last axis."""
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rotate(
    x: Any, positions: Any, frequencies: Any, pairs: bool = False, magnitude: float = 1.0
) -> Any:
    """RoPE of the first dimensions of x [T, H, d] at positions [T].

    A frequency rotates dimensions i and i + half together, or with `pairs` 2i and 2i + 1.
    """
    angle = np.asarray(positions)[:, None, None] * frequencies
    cos = magnitude * np.cos(angle).astype(x.dtype)
    sin = magnitude * np.sin(angle).astype(x.dtype)
    half = len(frequencies)
    out = x.copy()
    if pairs:
        first = slice(0, 2 * half, 2)
        second = slice(1, 2 * half, 2)
    else:
        first = slice(half)
        second = slice(half, 2 * half)
    a = x[..., first]
    b = x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def attend(q: Any, k: Any, v: Any, seen: Any, scale: float, sinks: Any = None) -> Any:
    """Attention [T, H*d] of queries [T, H, d] to keys [S, KV, d].

    `seen` [T, S] tells which keys a query sees. `sinks` [H] are the scores of one more key, whose
    value is 0.
    """
    group = q.shape[1] // k.shape[1]
    k = k.repeat(group, axis=1)
    v = v.repeat(group, axis=1)
    scores = np.where(seen, np.einsum("thd,shd->hts", q, k) * scale, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - most)
    return np.einsum("hts,shd->thd", weights / total, v).reshape(len(q), -1)

"""Train a tiny chat model from nothing: the target of the embedded pair.

It is mlx-lm's own Qwen3 module, so what is trained is what mlx-lm loads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from dflash_mlx.train.dataset import Arrays, Sample, bucket_length
from dflash_mlx.train.fit import Loss, Parameters

PROMPT_WEIGHT = 0.1  # of a prompt token's loss; an answer token's is 1


def new_model(config: dict[str, Any], seed: int) -> qwen3.Model:
    """A Qwen3 model with random weights from a seed.

    They are normal and scaled by fan-in, those that end a residual branch by the depth, too.
    """
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.random.seed(seed)
    depth = math.sqrt(2 * config["num_hidden_layers"])
    weights = []
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim == 2:
            scale = 0.02 if "embed" in name else weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= depth
            weight = mx.random.normal(weight.shape) * scale
        weights.append((name, weight))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def collate(samples: list[Sample], rng: Random) -> Arrays:
    """Token ids [N, L + 1] and the loss weights [N, L] of predicting ids[:, 1:]."""
    length = bucket_length(max(len(sample.tokens) for sample in samples))
    ids = np.zeros((len(samples), length + 1), np.int32)
    weights = np.zeros((len(samples), length), np.float32)
    for row, sample in enumerate(samples):
        count = len(sample.tokens)
        ids[row, :count] = sample.tokens
        weights[row, : count - 1] = PROMPT_WEIGHT
        for start, end in sample.answers:
            weights[row, start - 1 : end - 1] = 1.0
    return mx.array(ids), mx.array(weights)


def next_token_loss(model: nn.Module) -> Loss:
    """A loss function for `fit`, of a batch from `collate`.

    It returns the weighted mean cross entropy, and the share of the weight on right predictions.
    """

    def loss(parameters: Parameters, ids: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        model.update(parameters)
        logits = model(ids[:, :-1])
        labels = ids[:, 1:]
        total = weights.sum()
        entropy = (nn.losses.cross_entropy(logits, labels) * weights).sum() / total
        right = (mx.argmax(mx.stop_gradient(logits), axis=-1) == labels) * weights
        return entropy, right.sum() / total

    return loss


def save_model(model: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write the model as bf16 safetensors with its config, as mlx-lm's `load` expects them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.astype(mx.bfloat16) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

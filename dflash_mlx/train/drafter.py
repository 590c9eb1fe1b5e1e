"""Train a DFlash drafter for any loaded target, by the recipe of arXiv 2602.06036.

The target is frozen. Blocks start at random anchors, the last prompt token always among them
because decoding drafts from there first. The labels are the target's own teacher-forced choices;
a slot after the first choice that differs from the text has no meaning and no weight. The cross
entropy is weighted exp(-(k-1)/gamma), because a wrong slot costs all the slots after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..drafter.config import DraftConfig
from ..drafter.dflash2 import DFlash2
from ..drafter.dspark import network_for
from ..drafter.network import DFlash
from ..target import Target
from .batches import Arrays, BatchStream, bucket_length, group
from .blocks import draft_hidden
from .data import Sample
from .fit import FitSettings, Loss, Parameters, Progress, fit
from .optimizers import by_name

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's, by block size


@dataclass(frozen=True)
class DrafterSettings:
    """The recipe of one drafter.

    Attributes:
        steps: optimizer steps; a step is two micro-batches.
        tokens: tokens of a micro-batch, padding included.
        anchors: blocks per sequence.
        learning_rate, optimizer: the peak rate of "adamw" or "muon".
        gamma: decay of the slot weights; None is the paper's for the block size.
        seed: of the initial weights, the order of the data and the anchors.
        held_out: samples that are not trained on, for early stopping.
        save_every, validate_every, patience: see `FitSettings`.
    """

    steps: int
    tokens: int = 4096
    anchors: int = 8
    learning_rate: float = 6e-4
    optimizer: str = "adamw"
    gamma: float | None = None
    seed: int = 0
    held_out: int = 64
    save_every: int = 200
    validate_every: int = 0
    patience: int = 0


def default_gamma(block_size: int) -> float:
    """The decay of the slot weights: the paper's where it gives one, else block_size / 2."""
    return GAMMAS.get(block_size, block_size / 2)


def new_drafter(config: DraftConfig, seed: int) -> DFlash:
    """A drafter with normal weights scaled by fan-in, residual branches by depth as well."""
    drafter = network_for(config)(config)
    mx.random.seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    weights = []
    for name, weight in tree_flatten(drafter.parameters()):
        # The convolutions and the selector of a DFlash2 start with values of their own.
        if weight.ndim == 2 and not any(part in name for part in ("_conv.", "codebook")):
            scale = weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= depth
            weight = mx.random.normal(weight.shape) * scale
        weights.append((name, weight))
    drafter.load_weights(weights)
    mx.eval(drafter.parameters())
    return drafter


def slot_weights(choices: mx.array, tokens: mx.array, inside: mx.array, gamma: float) -> mx.array:
    """Loss weights [..., B-1] of a block's slots 1..B-1.

    Args:
        choices: the target's teacher-forced choice for each slot.
        tokens: the text's token at each slot.
        inside: whether the slot lies inside the answer.
        gamma: weights decay as exp(-(k-1)/gamma).
    """
    agrees = (choices == tokens).astype(mx.float32)
    reached = mx.cumprod(agrees, axis=-1)[..., :-1]
    reached = mx.concatenate([mx.ones_like(agrees[..., :1]), reached], axis=-1)
    return inside * reached * mx.exp(-mx.arange(agrees.shape[-1]) / gamma)


@dataclass(frozen=True)
class Anchors:
    """Makes batches for `draft_loss`: sequences with `count` anchors each."""

    count: int

    def __call__(self, samples: list[Sample], rng: Random) -> Arrays:
        """Token ids [N, S], anchors [N, A] and ends [N, A] of the anchors' answers.

        A sequence with too few tokens repeats its first anchor with end 0, which has no weight.
        """
        length = bucket_length(max(len(sample.tokens) for sample in samples))
        ids = np.zeros((len(samples), length), np.int32)
        anchors = np.zeros((2, len(samples), self.count), np.int32)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.tokens)] = sample.tokens
            first = rng.choice([span for span in sample.answers if span[1] > span[0]])
            places = [(a, end) for start, end in sample.answers for a in range(start, end - 1)]
            chosen = rng.sample(places, min(self.count - 1, len(places)))
            chosen = [(first[0] - 1, first[1]), *chosen]
            chosen += [(first[0] - 1, 0)] * (self.count - len(chosen))
            anchors[:, row] = np.array(chosen).T
        return mx.array(ids), mx.array(anchors[0]), mx.array(anchors[1])


def draft_loss(drafter: DFlash, target: Target, gamma: float) -> Loss:
    """The drafter's loss on a batch of `Anchors`, and its acceptance length tau.

    tau is teacher-forced: 1 + the number of slots right before the first wrong one, averaged over
    the blocks.
    """
    config = drafter.config

    def loss(
        parameters: Parameters, ids: mx.array, anchors: mx.array, ends: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Loss and tau over ids [N, L], blocks at anchors [N, A], answers that stop at `ends`."""
        drafter.update(parameters)
        (n, a), block = anchors.shape, config.block_size
        logits, taps = target.features(ids, config.target_layer_ids)
        choices = mx.argmax(logits, axis=-1)
        masks = mx.full((n, a, block - 1), config.mask_token_id, dtype=ids.dtype)
        tokens = mx.take_along_axis(ids, anchors, axis=1)[..., None]
        blocks = mx.concatenate([tokens, masks], axis=-1).reshape(n * a, block)
        embeddings = drafter.embed(blocks, target)
        hidden = draft_hidden(
            drafter,
            embeddings.astype(mx.float32),
            mx.stop_gradient(taps.astype(mx.float32)),
            anchors,
        )
        # The anchor's row predicts nothing; the head computes in the target's own precision.
        hidden = hidden[:, 1:]
        drafts = drafter.logits(hidden.astype(embeddings.dtype), target).astype(mx.float32)

        slots = anchors[..., None] + mx.arange(1, block)
        inside = slots < ends[..., None]
        flat = mx.minimum(slots, ids.shape[1] - 1).reshape(n, -1)
        text = mx.take_along_axis(ids, flat, axis=1).reshape(slots.shape)
        labels = mx.take_along_axis(choices, flat - 1, axis=1).reshape(slots.shape)
        weights = slot_weights(labels, text, inside, gamma)

        rows = labels.reshape(n * a, block - 1)
        entropy = nn.losses.cross_entropy(drafts, rows)
        chosen = mx.argmax(mx.stop_gradient(drafts), axis=-1)
        if isinstance(drafter, DFlash2):
            # Slots after the first wrong one have no weight, so the true predecessor is the text's.
            before = mx.concatenate([blocks[:, :1], text.reshape(rows.shape)[:, :-1]], axis=1)
            extra, chosen = selector_loss(drafter, hidden, drafts, before, rows)
            entropy = entropy + extra
        value = (entropy.reshape(weights.shape) * weights).sum() / mx.maximum(weights.sum(), 1e-6)
        right = chosen.reshape(labels.shape) == labels
        accepted = mx.cumprod(right & (weights > 0), axis=-1).sum(axis=-1)
        used = inside.any(axis=-1)
        return value, 1 + (accepted * used).sum() / mx.maximum(used.sum(), 1)

    return loss


def selector_loss(
    drafter: DFlash2, hidden: mx.array, logits: mx.array, before: mx.array, labels: mx.array
) -> tuple[mx.array, mx.array]:
    """The candidate selector's cross entropy over its top-k, given the true predecessors.

    Args:
        hidden, logits: of the slots, [N, L, D] and [N, L, V].
        before, labels: the token before each slot and the right one for it, [N, L].

    Returns:
        The entropies [N, L], 0 where the right token is no candidate, and the selector's choices.
    """
    selector = drafter.candidate_selector
    order = mx.argpartition(-mx.stop_gradient(logits), selector.top_k - 1, axis=-1)
    candidates = order[..., : selector.top_k]
    scores = mx.take_along_axis(logits, candidates, axis=-1)
    scores = scores + selector.scores(hidden, before[..., None], candidates)[..., 0, :]
    hit = candidates == labels[..., None]
    entropy = mx.logsumexp(scores, axis=-1) - (scores * hit).sum(axis=-1)
    best = mx.argmax(mx.stop_gradient(scores), axis=-1, keepdims=True)
    chosen = mx.take_along_axis(candidates, best, axis=-1)[..., 0]
    return mx.where(hit.any(axis=-1), entropy, 0), chosen


def train_drafter(
    target: Target,
    config: DraftConfig,
    samples: Callable[[int], Sequence[Sample]],
    settings: DrafterSettings,
    held_out: Sequence[Sample] = (),
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> DFlash:
    """Train a drafter for a target that stays as it is.

    Args:
        config: the drafter's shape; it must fit the target.
        samples: the training samples of epoch e (for a file, the same list for every epoch).
        held_out: samples for the validations that `settings` asks for.
        checkpoint: a file to save to, and to resume from when it exists.

    Raises: `IncompatibleDrafterError`, `SettingsError`, `WeightsError` (a foreign checkpoint).
    """
    config.check_fits(target.hidden_size, target.vocab_size, target.num_layers)
    drafter, collate = new_drafter(config, settings.seed), Anchors(settings.anchors)
    gamma = default_gamma(config.block_size) if settings.gamma is None else settings.gamma
    loss = draft_loss(drafter, target, gamma)
    parameters = fit(
        loss,
        drafter.trainable_parameters(),
        by_name(settings.optimizer, settings.learning_rate, settings.steps),
        lambda position: BatchStream(samples, collate, settings.tokens, settings.seed, position),
        FitSettings(
            steps=settings.steps,
            save_every=settings.save_every,
            validate_every=settings.validate_every if held_out else 0,
            patience=settings.patience,
        ),
        checkpoint,
        progress,
        mean_loss(loss, collate, held_out, settings),
    )
    drafter.update(parameters)
    return drafter


def mean_loss(
    loss: Loss, collate: Anchors, held_out: Sequence[Sample], settings: DrafterSettings
) -> Callable[[Parameters], float]:
    """Parameters -> the mean loss of the held-out samples, on the same anchors every time."""
    rng = Random(settings.seed)
    batches = [collate(batch, rng) for batch in group(held_out, settings.tokens, rng)]
    compiled = mx.compile(loss)

    def mean(parameters: Parameters) -> float:
        losses = [float(compiled(parameters, *arrays)[0]) for arrays in batches]
        return sum(losses) / len(losses)

    return mean


def save_drafter(drafter: DFlash, raw_config: dict[str, Any], folder: Path) -> None:
    """Write the drafter as bf16 safetensors with its config, in the published layout.

    With a "quantization" in the config (`group_size`, `bits`) the matrices are stored in so many
    bits; the drafter itself stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.astype(mx.bfloat16) for k, v in tree_flatten(drafter.parameters())}
    if "quantization" in raw_config:
        stored = type(drafter)(drafter.config)
        stored.load_weights(list(weights.items()))
        nn.quantize(stored, **raw_config["quantization"])
        weights = dict(tree_flatten(stored.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(raw_config, indent=1) + "\n")

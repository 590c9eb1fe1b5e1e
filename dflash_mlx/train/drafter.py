"""Train a DFlash drafter for any loaded target, with the recipe of arXiv 2602.06036.

The target is frozen. Blocks start at random anchors (the last committed token of a step), always
including the first token of an answer, where decoding drafts first. Labels are the target's
teacher-forced choices; slots after the first choice that differs from the text have no weight. The
loss is weighted exp(-(k-1)/gamma), because a wrong slot loses all slots after it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..drafter.config import DraftConfig
from ..drafter.dflash import DFlash
from ..drafter.networks import EAGLE3, LILICORR, network_for
from ..errors import SettingsError
from ..targets import Target
from .dataset import Arrays, BatchStream, Sample, bucket_length, group
from .features import Features, KeptFeatures, features, tap_scales
from .fit import Loss, Parameters, Progress, Validation, fit, make_optimizer
from .forward import draft_hidden
from .losses import LossWeights, SlotLoss, slot_weights

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's decays of slot weights, by block size
CROSS_ENTROPY = LossWeights()  # the paper's loss
# Parts that keep their own initialization: convolutions and selector of DFlash2.
OWN_START = ("_conv.", "codebook")


@dataclass(frozen=True)
class DrafterSettings:
    """The settings of `train_drafter`.

    Attributes:
        steps: optimizer steps; a step is two micro-batches.
        tokens: tokens of a micro-batch, with padding.
        anchors: blocks per sequence.
        learning_rate, optimizer: the peak rate of "adamw" or "muon".
        loss_weights: weights of the losses.
        seed: seeds the initial weights, the order of the data and the anchors.
        every: see `fit`.
    """

    steps: int
    tokens: int = 4096
    anchors: int = 8
    learning_rate: float = 6e-4
    optimizer: str = "adamw"
    loss_weights: LossWeights = CROSS_ENTROPY
    seed: int = 0
    every: int = 200


def new_drafter(config: DraftConfig, seed: int, parts: Container[str] = ()) -> DFlash:
    """A drafter with normal weights scaled by fan-in, and residual branches also by depth.

    `parts` as of `DFlash`.
    """
    mx.random.seed(seed)  # some parts initialize themselves
    drafter = network_for(config)(config, parts)
    mx.random.seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    weights = []
    for name, weight in tree_flatten(drafter.parameters()):
        if "markov_w2" in name:  # without effect; its gradient flows through the other matrix
            weight = mx.zeros_like(weight)
        elif weight.ndim == 2 and not any(part in name for part in OWN_START):
            scale = weight.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= depth
            weight = mx.random.normal(weight.shape) * scale
        weights.append((name, weight))
    drafter.load_weights(weights)
    mx.eval(drafter.parameters())
    return drafter


@dataclass(frozen=True)
class AnchorCollator:
    """Makes batches of `tokens` for `draft_loss`: sequences with `count` anchors each."""

    count: int
    tokens: int = 0
    kept: KeptFeatures | None = None

    def __call__(self, samples: list[Sample], rng: Random) -> Arrays:
        """Token ids [N, S], anchors [N, A], the ends [N, A] of their answers, kept features.

        The first anchor of a sequence is the first token of an answer with a token to draft, if
        there is one. Sequences with too few tokens repeat the first anchor with end 0 (no weight).
        """
        length = bucket_length(max(len(sample.tokens) for sample in samples), self.tokens)
        ids = np.zeros((len(samples), length), np.int32)
        anchors = np.zeros((2, len(samples), self.count), np.int32)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.tokens)] = sample.tokens
            spans = [span for span in sample.answers if span[1] > span[0]]
            first = rng.choice([span for span in spans if span[1] - span[0] > 1] or spans)
            places = [(a, end) for start, end in spans for a in range(start, end - 1)]
            others = [place for place in places if place != first]
            chosen = [first, *rng.sample(others, min(self.count - 1, len(others)))]
            chosen += [(first[0], 0)] * (self.count - len(chosen))
            anchors[:, row] = np.array(chosen).T
        kept = self.kept(samples, length) if self.kept else ()
        return mx.array(ids), mx.array(anchors[0]), mx.array(anchors[1]), *kept


def draft_loss(
    drafter: DFlash,
    target: Target,
    gamma: float,
    loss_weights: LossWeights = CROSS_ENTROPY,
    tokens: mx.array | None = None,
    scales: mx.array | None = None,
) -> Loss:
    """The drafter's loss and acceptance length tau on a batch of `AnchorCollator`.

    tau is teacher-forced: 1 + the number of correct slots before the first wrong one, averaged
    over blocks.

    Args:
        gamma: decay of the slot weights.
        loss_weights: weights of the losses.
        tokens: the tokens that the loss is restricted to; None is the whole vocabulary.
        scales: divisors of the taps [K*D], see `tap_scales`; None is 1.

    Returns:
        A function of (parameters, ids [N, S], anchors [N, A], ends [N, A], *kept features).
    """
    config = drafter.config
    cost = SlotLoss(drafter, target=target, loss_weights=loss_weights, tokens=tokens)

    def loss(
        parameters: Parameters, ids: mx.array, anchors: mx.array, ends: mx.array, *kept: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The loss and tau of a batch, both scalars."""
        drafter.update(parameters)
        block = config.block_size
        (n, a) = anchors.shape
        found = Features(*kept) if kept else features(target, ids, config.target_layer_ids)
        masks = mx.full((n, a, block - 1), config.mask_token_id, dtype=ids.dtype)
        first = mx.take_along_axis(ids, anchors, axis=1)[..., None]
        blocks = mx.concatenate([first, masks], axis=-1).reshape(n * a, block)
        embeddings = drafter.embed(blocks, target)
        taps = found.taps.astype(mx.float32)
        taps = taps if scales is None else taps / scales
        hidden = draft_hidden(
            drafter, embeddings=embeddings.astype(mx.float32), taps=taps, anchors=anchors
        )
        hidden = hidden[:, config.first_row :].flatten(0, 1)

        slots = anchors[..., None] + mx.arange(1, config.drafts + 1)
        inside = slots < ends[..., None]
        flat = mx.minimum(slots, ids.shape[1] - 1).reshape(n, -1)
        text = mx.take_along_axis(ids, flat, axis=1).reshape(slots.shape)
        labels = mx.take_along_axis(found.choices, flat - 1, axis=1).reshape(slots.shape)
        weights = slot_weights(labels, tokens=text, inside=inside, gamma=gamma)
        # Slots after a disagreement have no weight, so the true predecessor is the text's token.
        before = mx.concatenate([first, text[..., :-1]], axis=-1)
        heads = [
            mx.take_along_axis(array, (flat - 1)[..., None], axis=1).flatten(0, 1)
            for array in (found.tops, found.shares.astype(mx.float32))
        ]
        columns = [array.reshape(-1) for array in (labels, before, weights)]
        value, chosen = cost(hidden, *columns, *heads)
        value = value / mx.maximum(weights.sum(), 1e-6)
        right = chosen.reshape(labels.shape) == labels
        accepted = mx.cumprod(right & (weights > 0), axis=-1).sum(axis=-1)
        used = inside.any(axis=-1)
        return value, 1 + (accepted * used).sum() / mx.maximum(used.sum(), 1)

    return loss


def train_drafter(
    target: Target,
    config: DraftConfig,
    samples: Callable[[int], Sequence[Sample]],
    settings: DrafterSettings,
    held_out: Sequence[Sample] = (),
    checkpoint: Path | None = None,
    progress: Progress = lambda report: None,
    start: DFlash | None = None,
    kept: Path | None = None,
) -> DFlash:
    """Train a drafter for a frozen target.

    Args:
        config: the drafter's shape; it must fit the target.
        samples: the training samples of epoch e; a file has the same list for every epoch.
        held_out: samples for validation.
        checkpoint: a file to save to, and to resume from if it exists.
        start: the drafter whose weights it starts from; None is new ones, whose fusion weights are
            scaled by `tap_scales`.
        kept: a folder for `KeptFeatures`; None computes features anew in every step.

    Raises `IncompatibleDrafterError`, `SettingsError`, `WeightsError` (another checkpoint),
    `OutputError`.
    """
    parts = {} if start is None else dict(tree_flatten(start.parameters()))
    if config.draft_vocab_size < config.vocab_size and "lm_head.weight" not in parts:
        common = common_tokens(samples(0), config.draft_vocab_size)
        parts |= head_parts(target, common)
        if (after := "markov_head.markov_w2.weight") in parts:
            parts[after] = parts[after][common]
    drafter = new_drafter(config, settings.seed, parts)
    drafter.load_weights([*parts.items()], strict=False)
    drafter.set_dtype(mx.float32)  # 16 bits are too few for small steps
    drafter.check_fits(target)
    check_trainable(config)
    if "lm_head" in drafter:
        drafter.freeze(recurse=False, keys=["d2t"])
        drafter.lm_head.freeze()
    store = None if kept is None else KeptFeatures(target, config.target_layer_ids, kept)
    collate = AnchorCollator(settings.anchors, settings.tokens, store)
    gamma = GAMMAS.get(config.block_size, config.block_size / 2)
    # The loss knows the tokens that can be drafted, or those of the first epoch's answers.
    own = "lm_head" in drafter or ("embed_tokens" in drafter and config.tie_word_embeddings)
    tokens = drafter.token_ids() if own else common_tokens(samples(0))
    scales = tap_scales(target, layers=config.target_layer_ids, samples=samples(0), kept=store)
    if start is not None:
        drafter.fc.weight = mx.contiguous(drafter.fc.weight * scales)
    loss = draft_loss(
        drafter,
        target=target,
        gamma=gamma,
        loss_weights=settings.loss_weights,
        tokens=tokens,
        scales=scales,
    )
    parameters = fit(
        loss,
        parameters=drafter.trainable_parameters(),
        optimizer=make_optimizer(settings.optimizer, settings.learning_rate, settings.steps),
        batches=lambda position: BatchStream(
            samples, collate=collate, tokens=settings.tokens, seed=settings.seed, position=position
        ),
        steps=settings.steps,
        checkpoint=checkpoint,
        progress=progress,
        validate=held_out_metrics(loss, collate=collate, held_out=held_out, settings=settings)
        if held_out
        else None,
        every=settings.every,
    )
    drafter.update(parameters)
    drafter.fc.weight = drafter.fc.weight / scales
    return drafter


def check_trainable(config: DraftConfig) -> None:
    """Raise `SettingsError` for published parts that the training forward lacks."""
    parts = {
        "an EAGLE-3 network": config.kind == EAGLE3,
        "LiLiCorr's head": config.kind == LILICORR,
        "a recurrent Markov head": config.markov_head_type == "rnn",
        "a width adapter": config.target_hidden_size != config.hidden_size,
        "attention sinks": any(config.sinks),
    }
    if found := next((name for name, there in parts.items() if there), None):
        raise SettingsError(f"A drafter with {found} cannot be trained further here.")


def common_tokens(samples: Sequence[Sample], count: int | None = None) -> mx.array:
    """The ids of the tokens that the answers have most often, in order; None is all they have."""
    spans = (sample.tokens[a:b] for sample in samples for a, b in sample.answers)
    common = Counter(token for span in spans for token in span).most_common(count)
    return mx.array(sorted(token for token, _ in common))


def head_parts(target: Target, tokens: mx.array) -> dict[str, mx.array]:
    """The parameters of a head of its own that drafts these tokens, in order: the target's rows.

    The target's head has a row for every token, and in a small model with a large vocabulary most
    of the weights.
    """
    return {"lm_head.weight": target.head_rows(tokens), "d2t": tokens - mx.arange(len(tokens))}


def held_out_metrics(
    loss: Loss, collate: AnchorCollator, held_out: Sequence[Sample], settings: DrafterSettings
) -> Validation:
    """Parameters -> mean loss and tau of the held-out samples, always with the same anchors."""
    compiled = mx.compile(loss)

    def mean(parameters: Parameters) -> tuple[float, float]:
        rng = Random(settings.seed)
        sums = [0.0, 0.0]
        batches = 0
        for batch in group(held_out, settings.tokens, rng):
            found = compiled(parameters, *collate(batch, rng))
            sums = [total + float(value) for total, value in zip(sums, found, strict=True)]
            batches += 1
        return sums[0] / batches, sums[1] / batches

    return mean


def save_drafter(drafter: DFlash, raw_config: dict[str, Any], folder: Path) -> None:
    """Write the drafter as bf16 safetensors with its config, in the published layout.

    A "quantization" in the config (`group_size`, `bits`) quantizes the stored matrices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.astype(mx.bfloat16) if mx.issubdtype(weight.dtype, mx.floating) else weight
        for name, weight in tree_flatten(drafter.parameters())
    }
    if "quantization" in raw_config:
        stored = type(drafter)(drafter.config)
        stored.load_weights(list(weights.items()))
        nn.quantize(stored, **raw_config["quantization"])
        weights = dict(tree_flatten(stored.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(raw_config, indent=1) + "\n")

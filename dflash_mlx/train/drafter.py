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
# Parts of DFlash2 that initialize themselves: its convolutions and its selector.
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
    """Make a drafter with random weights, scaled by fan-in, and in residual branches by depth.

    Args:
        config: the shape of the drafter.
        seed: seeds the weights.
        parts: the names of tensors that it has, for `DFlash`.
    """
    mx.random.seed(seed)  # some parts initialize themselves
    drafter = network_for(config)(config, parts)
    mx.random.seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    weights = []
    for name, weight in tree_flatten(drafter.parameters()):
        if "markov_w2" in name:  # the head begins without effect
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

        The first anchor of a sequence is the first token of an answer, if possible of one that has
        another token to draft. Sequences with too few tokens repeat the first anchor with end 0,
        which has no weight.
        """
        length = bucket_length(max(len(sample.tokens) for sample in samples), self.tokens)
        ids = np.zeros((len(samples), length), np.int32)
        anchors = np.zeros((2, len(samples), self.count), np.int32)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.tokens)] = sample.tokens
            # An anchor is (position, end of its answer), so a span is its answer's first anchor.
            spans = [span for span in sample.answers if span[1] > span[0]]
            first = rng.choice([span for span in spans if span[1] - span[0] > 1] or spans)
            candidates = [
                (position, end) for start, end in spans for position in range(start, end - 1)
            ]
            remaining = [candidate for candidate in candidates if candidate != first]
            chosen = [first, *rng.sample(remaining, min(self.count - 1, len(remaining)))]
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
    """Make the function that computes a drafter's loss and acceptance length tau.

    tau is teacher-forced: 1 + the number of correct slots before the first wrong one, averaged
    over blocks.

    Args:
        drafter, target: the pair.
        gamma: the decay of the slot weights.
        loss_weights: the weights of the losses.
        tokens: the tokens that the loss is restricted to; None for the whole vocabulary.
        scales: the divisors [K*D] of the taps, from `tap_scales`; None for 1.

    Returns:
        A function of (parameters, ids [N, S], anchors [N, A], ends [N, A], *kept features).
    """
    config = drafter.config
    slot_loss = SlotLoss(drafter, target=target, loss_weights=loss_weights, tokens=tokens)

    def loss(
        parameters: Parameters, ids: mx.array, anchors: mx.array, ends: mx.array, *kept: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The loss and tau of a batch, both scalars."""
        drafter.update(parameters)
        if kept:
            target_features = Features(*kept)
        else:
            target_features = features(target, ids, config.target_layer_ids)
        anchor_tokens = mx.take_along_axis(ids, anchors, axis=1)[..., None]
        embeddings = drafter.embed(_masked_blocks(anchor_tokens, config), target)
        taps = target_features.taps.astype(mx.float32)
        taps = taps if scales is None else taps / scales
        hidden = draft_hidden(
            drafter, embeddings=embeddings.astype(mx.float32), taps=taps, anchors=anchors
        )
        hidden = hidden[:, config.first_row :].flatten(0, 1)

        slots = anchors[..., None] + mx.arange(1, config.drafts + 1)
        inside = slots < ends[..., None]
        positions = mx.minimum(slots, ids.shape[1] - 1).reshape(len(ids), -1)
        predicted_at = positions - 1  # the token before a slot predicts it
        text = mx.take_along_axis(ids, positions, axis=1).reshape(slots.shape)
        labels = mx.take_along_axis(target_features.choices, predicted_at, axis=1)
        labels = labels.reshape(slots.shape)
        weights = slot_weights(labels, tokens=text, inside=inside, gamma=gamma)
        # Slots after a disagreement have no weight, so the true predecessor is the text's token.
        before = mx.concatenate([anchor_tokens, text[..., :-1]], axis=-1)
        top_tokens, top_shares = [
            mx.take_along_axis(array, predicted_at[..., None], axis=1).flatten(0, 1)
            for array in (target_features.tops, target_features.shares.astype(mx.float32))
        ]
        total, chosen = slot_loss(
            hidden,
            labels=labels.reshape(-1),
            before=before.reshape(-1),
            weights=weights.reshape(-1),
            tops=top_tokens,
            shares=top_shares,
        )
        mean = total / mx.maximum(weights.sum(), 1e-6)
        right = chosen.reshape(labels.shape) == labels
        accepted = mx.cumprod(right & (weights > 0), axis=-1).sum(axis=-1)
        used = inside.any(axis=-1)
        return mean, 1 + (accepted * used).sum() / mx.maximum(used.sum(), 1)

    return loss


def _masked_blocks(anchor_tokens: mx.array, config: DraftConfig) -> mx.array:
    """Make the drafter's inputs [N*A, B]: each anchor's token [N, A, 1], then mask tokens."""
    sequences, anchors, _ = anchor_tokens.shape
    masks = mx.full(
        (sequences, anchors, config.block_size - 1),
        config.mask_token_id,
        dtype=anchor_tokens.dtype,
    )
    blocks = mx.concatenate([anchor_tokens, masks], axis=-1)
    return blocks.reshape(sequences * anchors, config.block_size)


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
        start: the drafter to start from; None for new weights, with fusion weights scaled by
            `tap_scales`.
        kept: a folder for `KeptFeatures`; None to compute the features in every step.

    Raises:
        WeightsError: the checkpoint has other parameters.
        IncompatibleDrafterError, SettingsError, OutputError.
    """
    drafter = _initial_drafter(
        target, config=config, seed=settings.seed, samples=samples(0), start=start
    )
    store = None if kept is None else KeptFeatures(target, config.target_layer_ids, kept)
    collate = AnchorCollator(settings.anchors, settings.tokens, store)
    gamma = GAMMAS.get(config.block_size, config.block_size / 2)
    # The loss is restricted to the tokens that the drafter's head can draft. If it uses the
    # target's head, it is restricted to the tokens of the first epoch's answers.
    ties_head = "embed_tokens" in drafter and config.tie_word_embeddings
    has_head = "lm_head" in drafter or ties_head
    tokens = drafter.token_ids() if has_head else common_tokens(samples(0))
    scales = tap_scales(target, layers=config.target_layer_ids, samples=samples(0), kept=store)
    if start is not None:  # its fusion weights are for taps that are not divided
        drafter.fc.weight = mx.contiguous(drafter.fc.weight * scales)
    loss = draft_loss(
        drafter,
        target=target,
        gamma=gamma,
        loss_weights=settings.loss_weights,
        tokens=tokens,
        scales=scales,
    )
    validate = None
    if held_out:
        validate = held_out_metrics(loss, collate=collate, held_out=held_out, settings=settings)

    def batches(position: tuple[int, int]) -> BatchStream:
        return BatchStream(
            samples, collate=collate, tokens=settings.tokens, seed=settings.seed, position=position
        )

    parameters = fit(
        loss,
        parameters=drafter.trainable_parameters(),
        optimizer=make_optimizer(settings.optimizer, settings.learning_rate, settings.steps),
        batches=batches,
        steps=settings.steps,
        checkpoint=checkpoint,
        progress=progress,
        validate=validate,
        every=settings.every,
    )
    drafter.update(parameters)
    drafter.fc.weight = drafter.fc.weight / scales
    return drafter


def _initial_drafter(
    target: Target,
    config: DraftConfig,
    seed: int,
    samples: Sequence[Sample],
    start: DFlash | None,
) -> DFlash:
    """Make the drafter that training starts with, in f32: `start`'s weights, others at random.

    A head of its own has the rows of the most common tokens in the samples' answers.

    Raises `IncompatibleDrafterError`, `SettingsError`.
    """
    parts = {} if start is None else dict(tree_flatten(start.parameters()))
    if config.draft_vocab_size < config.vocab_size and "lm_head.weight" not in parts:
        common = common_tokens(samples, config.draft_vocab_size)
        parts |= head_parts(target, common)
        markov_rows = "markov_head.markov_w2.weight"
        if markov_rows in parts:
            parts[markov_rows] = parts[markov_rows][common]
    drafter = new_drafter(config, seed, parts)
    drafter.load_weights(list(parts.items()), strict=False)
    drafter.set_dtype(mx.float32)  # small steps would be rounded away in 16 bits
    drafter.check_fits(target)
    check_trainable(config)
    if "lm_head" in drafter:
        drafter.freeze(recurse=False, keys=["d2t"])
        drafter.lm_head.freeze()
    return drafter


def check_trainable(config: DraftConfig) -> None:
    """Raise `SettingsError` if the training forward does not support a part of the drafter."""
    parts = {
        "an EAGLE-3 network": config.kind == EAGLE3,
        "LiLiCorr's head": config.kind == LILICORR,
        "a recurrent Markov head": config.markov_head_type == "rnn",
        "a width adapter": config.target_hidden_size != config.hidden_size,
        "attention sinks": any(config.sinks),
    }
    for name, has_part in parts.items():
        if has_part:
            raise SettingsError(f"A drafter with {name} cannot be trained further.")


def common_tokens(samples: Sequence[Sample], count: int | None = None) -> mx.array:
    """The sorted ids of the `count` most common tokens in the answers; None for all of them."""
    counter: Counter[int] = Counter()
    for sample in samples:
        for start, end in sample.answers:
            counter.update(sample.tokens[start:end])
    return mx.array(sorted(token for token, _ in counter.most_common(count)))


def head_parts(target: Target, tokens: mx.array) -> dict[str, mx.array]:
    """The parameters of a head that drafts only these tokens: their rows of the target's head.

    The target's head has a row for every token. In a small model with a large vocabulary, most of
    the weights are in it.

    Args:
        target: the target.
        tokens: sorted token ids.
    """
    return {"lm_head.weight": target.head_rows(tokens), "d2t": tokens - mx.arange(len(tokens))}


def held_out_metrics(
    loss: Loss, collate: AnchorCollator, held_out: Sequence[Sample], settings: DrafterSettings
) -> Validation:
    """Make a function that returns mean loss and tau on the held-out samples.

    The anchors are the same in every call.
    """
    compiled = mx.compile(loss)

    def mean(parameters: Parameters) -> tuple[float, float]:
        rng = Random(settings.seed)
        sums = [0.0, 0.0]
        batches = 0
        for batch in group(held_out, settings.tokens, rng):
            values = compiled(parameters, *collate(batch, rng))
            sums = [total + float(value) for total, value in zip(sums, values, strict=True)]
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

"""Train a DFlash drafter for any loaded target, by the recipe of arXiv 2602.06036.

The target is frozen. Blocks start at random anchors, an answer's first token always among them
because decoding drafts from there first. The labels are the target's own teacher-forced choices; a
slot after the first choice that differs from the text has no meaning and no weight. The cross
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
from ..drafter.dspark import network_for
from ..drafter.network import DFlash
from ..errors import SettingsError
from ..targets import Target
from .batches import Arrays, BatchStream, bucket_length, group
from .blocks import draft_hidden
from .data import Sample
from .features import Features, features
from .fit import FitSettings, Loss, Parameters, Progress, Validation, fit
from .levels import tap_levels
from .losses import Mix
from .optimizers import by_name
from .slots import Kept, SlotLoss, occurring, slot_weights
from .store import Collate, Store, Stored

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's, by block size
CHOICES = Mix()  # cross entropy with the target's choices, as the paper has it
# Parts that start with values of their own: convolutions and selector of a DFlash2.
OWN_START = ("_conv.", "codebook")


@dataclass(frozen=True)
class DrafterSettings:
    """The recipe of one drafter.

    Attributes:
        steps: optimizer steps; a step is two micro-batches.
        tokens: tokens of a micro-batch, padding included.
        anchors: blocks per sequence.
        learning_rate, optimizer: the peak rate of "adamw" or "muon".
        gamma: decay of the slot weights; None is the paper's for the block size.
        mix: what a slot's loss is made of.
        occurring: let the loss run over the tokens that occur in the answers of the first epoch,
            not over the whole vocabulary.
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
    mix: Mix = CHOICES
    occurring: bool = False
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
    mx.random.seed(seed)  # some parts draw their own first weights
    drafter = network_for(config)(config)
    mx.random.seed(seed)
    depth = math.sqrt(2 * config.num_hidden_layers)
    weights = []
    for name, weight in tree_flatten(drafter.parameters()):
        if "markov_w2" in name:  # no opinion yet, and a gradient through the other matrix
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
class Anchors:
    """Makes batches for `draft_loss`: sequences with `count` anchors each."""

    count: int

    def __call__(self, samples: list[Sample], rng: Random) -> Arrays:
        """Token ids [N, S], anchors [N, A] and ends [N, A] of the anchors' answers.

        The first anchor of a sequence begins an answer that has a token to draft, if one does. A
        sequence with too few tokens repeats its first anchor with end 0, which has no weight.
        """
        length = bucket_length(max(len(sample.tokens) for sample in samples))
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
        return mx.array(ids), mx.array(anchors[0]), mx.array(anchors[1])


def draft_loss(
    drafter: DFlash,
    target: Target,
    gamma: float,
    mix: Mix = CHOICES,
    kept: Kept | None = None,
    levels: mx.array | None = None,
) -> Loss:
    """The drafter's loss on a batch of `Anchors`, and its acceptance length tau.

    tau is teacher-forced: 1 + the number of slots right before the first wrong one, averaged over
    the blocks.

    Args:
        gamma: decay of the slots' weights.
        mix: what a slot's loss is made of.
        kept: the tokens that the loss runs over; None is the whole vocabulary.
        levels: what the taps are divided by [K*D], see `tap_levels`; None is 1.

    Returns:
        Takes (parameters, ids [N, S], anchors [N, A], ends [N, A] where their answers stop), and
        after them the `Features` of these ids, which it computes itself where they are not given.
    """
    config = drafter.config
    cost = SlotLoss(drafter, target, mix, kept)

    def loss(
        parameters: Parameters, ids: mx.array, anchors: mx.array, ends: mx.array, *known: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Loss [] and tau []; the arguments are those that `draft_loss` says."""
        drafter.update(parameters)
        (n, a), block = anchors.shape, config.block_size
        found = Features(*known) if known else features(target, ids, config.target_layer_ids)
        masks = mx.full((n, a, block - 1), config.mask_token_id, dtype=ids.dtype)
        tokens = mx.take_along_axis(ids, anchors, axis=1)[..., None]
        blocks = mx.concatenate([tokens, masks], axis=-1).reshape(n * a, block)
        embeddings = drafter.embed(blocks, target)
        taps = found.taps.astype(mx.float32)
        taps = taps if levels is None else taps / levels
        hidden = draft_hidden(drafter, embeddings.astype(mx.float32), taps, anchors)
        first = config.first_row  # 1 where the anchor's row predicts nothing
        hidden = hidden[:, first:].flatten(0, 1)

        slots = anchors[..., None] + mx.arange(1, block + 1 - first)
        inside = slots < ends[..., None]
        flat = mx.minimum(slots, ids.shape[1] - 1).reshape(n, -1)
        text = mx.take_along_axis(ids, flat, axis=1).reshape(slots.shape)
        labels = mx.take_along_axis(found.choices, flat - 1, axis=1).reshape(slots.shape)
        weights = slot_weights(labels, text, inside, gamma)
        # Slots after the first wrong one have no weight, so the true predecessor is the text's.
        before = mx.concatenate([tokens, text[..., :-1]], axis=-1)
        heads = [
            mx.take_along_axis(array, (flat - 1)[..., None], axis=1).flatten(0, 1)
            for array in (found.tops, found.shares)
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
    progress: Progress | None = None,
    drafter: DFlash | None = None,
    store: Store | None = None,
    fresh: bool = False,
) -> DFlash:
    """Train a drafter for a target that stays as it is.

    Args:
        config: the drafter's shape; it must fit the target.
        samples: the training samples of epoch e (for a file, the same list for every epoch).
        held_out: samples for the validations that `settings` asks for.
        checkpoint: a file to save to, and to resume from when it exists.
        drafter: what training starts from, in 32 bits from then on; None is a new one, of
            `settings.seed`.
        store: features of all samples and held-out ones; None computes them as they are needed.
        fresh: the drafter has learnt nothing yet, so its fusion may begin in the measure of
            `tap_levels` instead of the values' own.

    Raises: `IncompatibleDrafterError`, `SettingsError`, `WeightsError` (a foreign checkpoint),
        `OutputError`.
    """
    fresh = fresh or drafter is None
    drafter = drafter or new_drafter(config, settings.seed)
    drafter.set_dtype(mx.float32)  # a loaded one may be in 16 bits, too few for small steps
    drafter.check_fits(target)
    check_trainable(config)
    anchors = Anchors(settings.anchors)
    collate = anchors if store is None else Stored(anchors, store)
    gamma = default_gamma(config.block_size) if settings.gamma is None else settings.gamma
    kept = _kept(drafter, target, settings, samples(0))
    levels = tap_levels(target, config.target_layer_ids, samples(0), store)
    if not fresh:
        drafter.fc.weight = mx.contiguous(drafter.fc.weight * levels)
    loss = draft_loss(drafter, target, gamma, settings.mix, kept, levels)
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
        means(loss, collate, held_out, settings),
    )
    drafter.update(parameters)
    drafter.fc.weight = drafter.fc.weight / levels
    return drafter


def start_own_head(drafter: DFlash, target: Target, tokens: mx.array) -> None:
    """Give a drafter of some tokens [DV], ascending ids, the target's rows of the head for them."""
    drafter.lm_head.weight = target.head_rows(tokens).astype(mx.float32) * 1
    drafter.d2t = tokens.astype(mx.int64) - mx.arange(len(tokens))
    mx.eval(drafter.lm_head.weight, drafter.d2t)


def _kept(
    drafter: DFlash, target: Target, settings: DrafterSettings, samples: Sequence[Sample]
) -> Kept | None:
    """The tokens that the loss runs over; those that a drafter knows stay its own for good."""
    known = drafter.token_ids()
    if known is not None:
        drafter.freeze(keys="d2t", recurse=False)
        drafter.lm_head.freeze()
        return Kept.of(known, target.vocab_size)
    own = "lm_head" in drafter or ("embed_tokens" in drafter and drafter.config.tie_word_embeddings)
    # Of the target's head, some rows are enough.
    return occurring(samples, target.vocab_size) if settings.occurring and not own else None


def check_trainable(config: DraftConfig) -> None:
    """Raise `SettingsError` for published parts that the training forward does not have."""
    parts = {
        "a recurrent Markov head": config.markov is not None and config.markov.type == "rnn",
        "an adapter of widths": config.target_hidden_size != config.hidden_size,
        "attention sinks": any(config.sinks),
    }
    if found := next((name for name, there in parts.items() if there), None):
        raise SettingsError(f"A drafter with {found} cannot be trained further here.")


def means(
    loss: Loss, collate: Collate, held_out: Sequence[Sample], settings: DrafterSettings
) -> Validation:
    """Parameters -> the held-out samples' mean loss and tau, on the same anchors every time."""
    compiled = mx.compile(loss)

    def mean(parameters: Parameters) -> tuple[float, float]:
        rng, sums, batches = Random(settings.seed), [0.0, 0.0], 0
        for batch in group(held_out, settings.tokens, rng):
            found = compiled(parameters, *collate(batch, rng))
            sums = [total + float(value) for total, value in zip(sums, found, strict=True)]
            batches += 1
        return sums[0] / batches, sums[1] / batches

    return mean


def save_drafter(drafter: DFlash, raw_config: dict[str, Any], folder: Path) -> None:
    """Write the drafter as bf16 safetensors with its config, in the published layout.

    With a "quantization" in the config (`group_size`, `bits`) the matrices are stored in so many
    bits; the drafter itself stays as it is.
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

"""The measure in which a drafter learns to read taps: like the values' own, and out of it again."""

from dataclasses import replace
from random import Random

import mlx.core as mx
import numpy as np
import pytest
import tinymodels
from tinymodels import LINES

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.targets import Target
from dflash_mlx.train.dataset import Sample
from dflash_mlx.train.drafter import (
    AnchorCollator,
    DrafterSettings,
    draft_loss,
    new_drafter,
    train_drafter,
)
from dflash_mlx.train.features import FIRST, features, tap_scales
from dflash_mlx.train.fit import StepReport
from dflash_mlx.train.initial import draft_config

SETTINGS = DrafterSettings(steps=1, tokens=64, anchors=4, learning_rate=1e-9, optimizer="muon")


@pytest.fixture(scope="module")
def target() -> Target:
    """A target of whose hidden states one dimension is a thousand times as large."""
    found = tinymodels.target()
    embedding = found.model.model.embed_tokens
    embedding.weight = embedding.weight * mx.where(
        mx.arange(embedding.weight.shape[1]) == 3, 1e3, 1
    )
    return found


@pytest.fixture(scope="module")
def config(target) -> DraftConfig:
    return DraftConfig.from_dict(draft_config(target, "dspark", 4, 0, 1))


@pytest.fixture(scope="module")
def samples(target) -> list[Sample]:
    ids = [tuple(target.tokenizer.encode(line)) for line in LINES]
    return [Sample(tokens, ((1, len(tokens)),)) for tokens in ids]


def test_scales_are_root_mean_squares(target, config, samples):
    layers = config.target_layer_ids
    scales = np.array(tap_scales(target, layers, samples))
    values = []
    for sample in samples:
        taps = np.array(features(target, mx.array([sample.tokens]), layers).taps[0], np.float64)
        values.append(taps[min(FIRST, len(taps) - 1) :])
    expected = np.sqrt((np.concatenate(values) ** 2).mean(axis=0))
    np.testing.assert_allclose(scales, expected, rtol=1e-4)
    assert scales.max() > 20 * np.median(scales)


def test_a_drafter_that_knows_something_begins_as_it_is(target, config, samples):
    drafter = new_drafter(config, 5)
    before = np.array(drafter.fc.weight)
    train_drafter(target, config, lambda e: samples, SETTINGS, drafter=drafter)
    np.testing.assert_allclose(np.array(drafter.fc.weight), before, rtol=1e-3, atol=1e-6)


def test_a_fresh_one_begins_with_values_of_one_size_and_ends_in_their_own(target, config, samples):
    seen: list[StepReport] = []
    settings = replace(SETTINGS, validate_every=1)
    drafter = train_drafter(
        target, config, lambda e: samples, settings, samples[:1], progress=seen.append
    )
    columns = mx.sqrt(mx.square(drafter.fc.weight).mean(axis=0))
    scales = tap_scales(target, config.target_layer_ids, samples)
    assert (
        mx.abs(columns * scales - (columns * scales).mean()).max() < 0.5 * (columns * scales).mean()
    )
    # What is returned reads the taps themselves, and is worth what the validation said.
    arrays = AnchorCollator(settings.anchors)(samples[:1], Random(settings.seed))
    loss = draft_loss(drafter, target, config.block_size / 2)(drafter.parameters(), *arrays)[0]
    assert float(loss) == pytest.approx(seen[-1].held_out_loss, rel=1e-3)

"""The training loop: it lowers the loss, resumes bit for bit, and returns the best parameters."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
import tinymodels
from mlx.utils import tree_flatten
from tiny_pair.target import collate, new_model, next_token_loss
from tinymodels import LINES

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import SettingsError, WeightsError
from dflash_mlx.loop import generate
from dflash_mlx.targets import Target
from dflash_mlx.train.dataset import BatchStream, Sample
from dflash_mlx.train.drafter import (
    AnchorCollator,
    DrafterSettings,
    common_tokens,
    draft_loss,
    new_drafter,
    train_drafter,
)
from dflash_mlx.train.features import SINK_TOKENS, features, tap_scales
from dflash_mlx.train.fit import StepReport, fit, make_optimizer
from dflash_mlx.train.initial import draft_config

TARGET = tinymodels.model_config("qwen3", tie_word_embeddings=True)
RAW_DRAFTER = tinymodels.drafter_config(num_hidden_layers=1, block_size=4)
DRAFTER = DraftConfig.from_dict(RAW_DRAFTER)
DFLASH2 = replace(DRAFTER, conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=6)
DSPARK = DraftConfig.from_dict(
    RAW_DRAFTER
    | {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": 8,
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    }
)
SETTINGS = DrafterSettings(steps=8, tokens=64, anchors=3, learning_rate=3e-3, every=0)


@pytest.fixture(scope="module")
def target() -> Target:
    return tinymodels.target("llama")  # its head is tied


def sample_texts(epoch: int = 0) -> list[Sample]:
    """Sequences a model can learn at once: one repeated cycle of token ids."""
    cycle = [10, 11, 12, 13, 14] * 8
    return [Sample(tuple(cycle[i : i + 20 + i]), ((4, 20 + i),)) for i in range(6)]


def flat(parameters: Any) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in tree_flatten(parameters)}


def assert_bitwise_equal(first: Any, second: Any) -> None:
    first = flat(first)
    second = flat(second)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert np.array_equal(array, second[name]), name


def train_target(
    steps: int, optimizer: optim.Optimizer, checkpoint: Path | None = None, **settings: Any
) -> tuple[Any, list[StepReport]]:
    model = new_model(TARGET, seed=1)
    reports = []
    parameters = fit(
        next_token_loss(model),
        parameters=model.trainable_parameters(),
        optimizer=optimizer,
        batches=lambda position: BatchStream(
            sample_texts, collate=collate, tokens=64, seed=0, position=position
        ),
        steps=steps,
        checkpoint=checkpoint,
        progress=reports.append,
        **settings,
    )
    return parameters, reports


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_training_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, name):
    checkpoint = tmp_path / "checkpoint.safetensors"
    uninterrupted, _ = train_target(9, make_optimizer(name, 0.01, 9))
    train_target(5, make_optimizer(name, 0.01, 9), checkpoint, every=5)
    resumed, reports = train_target(9, make_optimizer(name, 0.01, 9), checkpoint)
    assert [report.step for report in reports] == [6, 7, 8, 9]
    assert_bitwise_equal(uninterrupted, resumed)


def test_an_unreadable_checkpoint_is_not_overwritten(tmp_path):
    checkpoint = tmp_path / "checkpoint.safetensors"
    checkpoint.symlink_to(checkpoint)
    with pytest.raises(OSError, match="Too many levels"):
        train_target(1, make_optimizer("adamw", 0.01, 1), checkpoint, every=1)
    assert checkpoint.is_symlink()


def test_a_checkpoint_of_another_model_is_refused(tmp_path, target):
    checkpoint = tmp_path / "checkpoint.safetensors"
    train_target(1, make_optimizer("adamw", 0.01, 1), checkpoint, every=1)
    with pytest.raises(WeightsError, match="another model"):
        train_drafter(
            target, config=DRAFTER, samples=sample_texts, settings=SETTINGS, checkpoint=checkpoint
        )


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", DFLASH2), ("qwen3", DRAFTER)],
    ids=["DFlash2, a tied head", "DFlash, a separate head"],
)
def test_training_lowers_the_loss_and_does_not_change_the_target(family, config):
    chosen = tinymodels.target(family)
    reports = []
    before = flat(chosen.model.parameters())
    settings = replace(SETTINGS, steps=25, learning_rate=1e-2)
    # Slots after the first disagreement with the target do not count, so learn the target's text.
    samples = generated_samples(chosen)
    train_drafter(
        chosen,
        config=config,
        samples=lambda epoch: samples,
        settings=settings,
        progress=reports.append,
    )
    losses = [report.loss for report in reports]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert_bitwise_equal(before, chosen.model.parameters())


def generated_samples(target: Target) -> list[Sample]:
    """Sequences that the target generated."""
    samples = []
    for prompt in ([5, 6, 7], [8, 9, 20]):
        tokens = generate(target, None, prompt, max_tokens=20).tokens
        samples.append(Sample((*prompt, *tokens), ((3, 3 + len(tokens)),)))
    return samples


def test_the_parameters_with_the_lowest_held_out_loss_are_returned(target):
    """The learning rate is so high that later steps make the loss worse."""
    reports = []
    settings = replace(SETTINGS, steps=12, learning_rate=5.0, every=1)
    drafter = train_drafter(
        target,
        config=DRAFTER,
        samples=sample_texts,
        settings=settings,
        held_out=sample_texts(),
        progress=reports.append,
    )
    losses = [report.held_out_loss for report in reports]
    best = losses.index(min(losses))
    assert best < len(losses) == 12
    collator = AnchorCollator(SETTINGS.anchors)
    arrays = collator(sample_texts(), Random(0))
    loss = draft_loss(drafter, target, 2.0)
    assert np.isfinite(float(loss(drafter.parameters(), *arrays)[0]))


def test_training_that_diverges_ends_with_an_error(target):
    reports = []
    settings = replace(SETTINGS, steps=50, learning_rate=1e30)
    with pytest.raises(SettingsError, match="loss of step [2-9] is nan. Lower --learning-rate"):
        train_drafter(
            target, config=DRAFTER, samples=sample_texts, settings=settings, progress=reports.append
        )
    assert reports and all(np.isfinite(report.loss) for report in reports)


def test_anchors_start_with_the_first_token_of_an_answer():
    samples = [Sample(tuple(range(30)), ((10, 14), (20, 30))), Sample((1, 2, 3), ((2, 3),))]
    firsts = set()
    for seed in range(20):
        ids, anchors, ends = AnchorCollator(6)(samples, Random(seed))
        assert ids.shape == (2, 32) and anchors.shape == ends.shape == (2, 6)
        firsts.add((anchors[0, 0].item(), ends[0, 0].item()))
        for anchor, end in zip(anchors[0].tolist(), ends[0].tolist(), strict=True):
            assert (10 <= anchor < 13 and end == 14) or (20 <= anchor < 29 and end == 30)
        assert len({*anchors[0].tolist()}) == 6
        # The second sample has a single answer token, so only one anchor.
        assert ends[1].tolist() == [3, 0, 0, 0, 0, 0]
    assert firsts == {(10, 14), (20, 30)}


@pytest.mark.parametrize("config", [DRAFTER, DFLASH2, DSPARK], ids=["DFlash", "DFlash2", "DSpark"])
def test_the_reported_tau_is_the_number_of_tokens_that_decoding_accepts(target, config):
    """With one anchor at the first token of an answer: tau is that of decoding's first step."""
    drafter = new_drafter(config, seed=4)
    if config is DSPARK:  # its new Markov head has no effect
        drafter.markov_head.markov_w2.weight = mx.random.normal((target.vocab_size, 8))
    [sample, _] = generated_samples(target)
    arrays = AnchorCollator(1)([sample], Random(0))
    tau = draft_loss(drafter, target, 2.0)(drafter.parameters(), *arrays)[1]
    result = generate(target, drafter, list(sample.tokens[:3]), max_tokens=20)
    assert float(tau) == 1 + result.stats.accepted_per_round[0]


# Taps of very different sizes

SLOW = DrafterSettings(steps=1, tokens=64, anchors=4, learning_rate=1e-9, optimizer="muon")


@pytest.fixture(scope="module")
def uneven_target() -> Target:
    """A target whose hidden states are a thousand times larger in one dimension."""
    model = tinymodels.target(max_position_embeddings=4096)  # not shared with other tests
    embedding = model.model.model.embed_tokens
    embedding.weight = embedding.weight * mx.where(
        mx.arange(embedding.weight.shape[1]) == 3, 1e3, 1
    )
    return model


@pytest.fixture(scope="module")
def uneven_config(uneven_target) -> DraftConfig:
    return DraftConfig.from_dict(
        draft_config(uneven_target, kind="dspark", block_size=4, mask_token=0, layers=1)
    )


@pytest.fixture(scope="module")
def uneven_samples(uneven_target) -> list[Sample]:
    ids = [tuple(uneven_target.tokenizer.encode(line)) for line in LINES]
    return [Sample(tokens, ((1, len(tokens)),)) for tokens in ids]


def test_tap_scales_are_root_mean_squares(uneven_target, uneven_config, uneven_samples):
    layers = uneven_config.target_layer_ids
    scales = np.array(tap_scales(uneven_target, layers, uneven_samples))
    values = []
    for sample in uneven_samples:
        taps = np.array(
            features(uneven_target, mx.array([sample.tokens]), layers).taps[0], np.float64
        )
        values.append(taps[min(SINK_TOKENS, len(taps) - 1) :])
    expected = np.sqrt((np.concatenate(values) ** 2).mean(axis=0))
    np.testing.assert_allclose(scales, expected, rtol=1e-4)
    assert scales.max() > 20 * np.median(scales)


def test_training_from_a_drafter_starts_with_its_weights_in_float32(
    uneven_target, uneven_config, uneven_samples
):
    drafter = new_drafter(uneven_config, 5)
    drafter.set_dtype(mx.bfloat16)  # as it is loaded on a GPU
    before = np.array(drafter.fc.weight.astype(mx.float32))
    after = train_drafter(
        uneven_target,
        config=uneven_config,
        samples=lambda epoch: uneven_samples,
        settings=SLOW,
        start=drafter,
    )
    assert {weight.dtype for _, weight in tree_flatten(after.parameters())} == {mx.float32}
    np.testing.assert_allclose(np.array(after.fc.weight), before, rtol=1e-3, atol=1e-6)


def test_a_new_drafter_is_trained_on_scaled_taps_and_returned_for_unscaled_ones(
    uneven_target, uneven_config, uneven_samples
):
    reports: list[StepReport] = []
    settings = replace(SLOW, every=1)
    held_out = uneven_samples[:1]
    drafter = train_drafter(
        uneven_target,
        config=uneven_config,
        samples=lambda epoch: uneven_samples,
        settings=settings,
        held_out=held_out,
        progress=reports.append,
    )
    columns = mx.sqrt(mx.square(drafter.fc.weight).mean(axis=0))
    columns *= tap_scales(uneven_target, uneven_config.target_layer_ids, uneven_samples)
    assert mx.abs(columns - columns.mean()).max() < 0.5 * columns.mean()
    # On unscaled taps, the returned drafter has the loss that the last report says.
    arrays = AnchorCollator(settings.anchors)(uneven_samples[:1], Random(settings.seed))
    tokens = common_tokens(uneven_samples)
    loss_of = draft_loss(drafter, uneven_target, uneven_config.block_size / 2, tokens=tokens)
    loss = loss_of(drafter.parameters(), *arrays)[0]
    assert float(loss) == pytest.approx(reports[-1].held_out_loss, rel=1e-3)

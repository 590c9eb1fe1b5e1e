"""Training losses: compared with numpy, and the same values and gradients computed in parts."""

from random import Random

import mlx.core as mx
import numpy as np
import pytest
import tinymodels
from mlx.utils import tree_flatten

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.targets import Target
from dflash_mlx.train import features as own_features
from dflash_mlx.train import losses
from dflash_mlx.train.dataset import Sample
from dflash_mlx.train.drafter import (
    AnchorCollator,
    draft_loss,
    new_drafter,
)
from dflash_mlx.train.features import features
from dflash_mlx.train.losses import LossWeights, summed

KINDS = {
    "DFlash": {},
    "DFlash2": {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
    },
    "DSpark": {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": 8,
        "enable_confidence_head": False,
        "sample_from_anchor": True,
    },
}
MIXES = [LossWeights(), LossWeights(0, 1), LossWeights(0.2, 0.5)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tinymodels.target()


def draft_config(kind: str = "DFlash", **more: object) -> DraftConfig:
    return DraftConfig.from_dict(tinymodels.drafter_config(block_size=4, **KINDS[kind], **more))


def samples(target: Target) -> list[Sample]:
    """Sequences of different lengths that the target generated."""
    samples = []
    for i, line in enumerate(tinymodels.LINES[:3]):
        prompt = target.tokenizer.encode(line)[: 4 + i]
        answer = tinymodels.greedy(target, prompt, 12 + 3 * i)
        samples.append(Sample((*prompt, *answer), ((len(prompt), len(prompt) + len(answer)),)))
    return samples


@pytest.mark.parametrize("loss_weights", MIXES)
def test_a_mix_is_the_weighted_sum_of_its_losses(loss_weights):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 9)).astype(np.float32)
    count = 3
    target_probs = rng.dirichlet(np.ones(9), 5)
    tops = np.argsort(-target_probs, axis=-1)[:, :count]
    shares = np.take_along_axis(target_probs, tops, axis=-1)
    labels = tops[:, 0]
    draft_probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    normalized = shares / shares.sum(axis=-1, keepdims=True)
    draft_probs_of_tops = np.take_along_axis(draft_probs, tops, axis=-1)
    cross_entropy = -np.log(draft_probs[range(5), labels])
    kl = (normalized * np.log(normalized / draft_probs_of_tops)).sum(axis=-1)
    expected = loss_weights.cross_entropy * cross_entropy + loss_weights.kl * kl
    loss = loss_weights.of(mx.array(logits), mx.array(labels), mx.array(tops), mx.array(shares))
    assert np.allclose(np.array(loss), expected, atol=1e-5)


def test_the_logits_of_all_slots_are_never_in_memory_together():
    """They are computed in parts of 256 KB; all together would take 8 MB."""
    mx.random.seed(0)
    count = 500
    width = 8
    vocabulary = 4_000
    bound = 2**18
    head = mx.random.normal((width, vocabulary))
    hidden = mx.random.normal((count, width))
    labels = mx.zeros((count,), mx.int32)
    mx.eval(head, hidden, labels)

    def part(_: dict, hidden: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
        logits = hidden @ head
        return LossWeights().of(logits, labels, labels[:, None], labels[:, None]).sum(), labels

    def loss(hidden: mx.array) -> mx.array:
        rows = bound // (4 * losses.LOGITS_AT_ONCE * vocabulary)
        return summed(part, trained={}, hidden=hidden, others=[labels], rows=rows)[0]

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.value_and_grad(loss)(hidden))
    assert mx.get_peak_memory() - before < 8 * bound < 4 * count * vocabulary


def loss_and_gradient(
    target: Target,
    kind: str,
    loss_weights: LossWeights,
    tokens: mx.array | None = None,
):
    """A drafter's loss, tau and gradient on a batch."""
    config = draft_config(kind)
    drafter = new_drafter(config, seed=2)
    if kind == "DFlash2":
        selector = drafter.candidate_selector
        selector.successor_codebook = mx.random.normal(selector.successor_codebook.shape)
    if kind == "DSpark":
        successors = drafter.markov_head.markov_w2
        successors.weight = mx.random.normal(successors.weight.shape)
    arrays = AnchorCollator(5)(samples(target), Random(0))
    loss = draft_loss(drafter, target=target, gamma=2.0, loss_weights=loss_weights, tokens=tokens)
    return mx.value_and_grad(loss)(drafter.trainable_parameters(), *arrays)


def assert_close(actual: object, expected: object) -> None:
    actual_arrays = dict(tree_flatten(actual))
    expected_arrays = dict(tree_flatten(expected))
    assert actual_arrays.keys() == expected_arrays.keys()
    for name, array in actual_arrays.items():
        assert mx.allclose(array, expected_arrays[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_the_same_in_parts_and_with_a_draft_vocabulary_of_all_tokens(
    target, kind, monkeypatch
):
    expected = loss_and_gradient(target, kind, MIXES[-1])
    all_tokens = mx.arange(target.vocab_size)
    actual = loss_and_gradient(target, kind=kind, loss_weights=MIXES[-1], tokens=all_tokens)
    assert_close(actual, expected)
    monkeypatch.setattr(losses, "BOUND", 4 * 4 * target.vocab_size * 7)  # seven slots at a time
    assert_close(loss_and_gradient(target, kind, MIXES[-1]), expected)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_features_computed_in_parts_are_those_computed_at_once(family, monkeypatch):
    target = tinymodels.target(family)
    mx.random.seed(0)
    tokens = mx.random.randint(0, target.vocab_size, (2, 21))
    monkeypatch.setattr(own_features, "TOP", 5)
    whole = features(target, tokens, [0, 2])
    # The bytes of float32 logits of two texts: eight tokens of each at a time.
    monkeypatch.setattr(own_features, "BOUND", 4 * target.vocab_size * 2 * 8)
    parts = features(target, tokens, [0, 2])
    logits, taps = target.features(tokens, [0, 2])
    p = np.array(mx.softmax(logits.astype(mx.float32), axis=-1))
    assert mx.array_equal(whole.taps, taps)
    assert np.array_equal(np.array(whole.choices), p.argmax(axis=-1))
    assert np.allclose(np.sort(np.array(whole.shares)), np.sort(p)[..., -5:], atol=1e-6)
    shares_of_tops = np.take_along_axis(p, np.array(whole.tops).astype(np.int64), axis=-1)
    assert np.allclose(shares_of_tops, np.array(whole.shares), atol=1e-6)
    assert mx.allclose(parts.taps, taps, atol=1e-4)
    assert mx.array_equal(parts.choices, whole.choices)

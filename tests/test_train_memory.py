"""What training takes: judged before anything is answered, and again when the answers are known."""

import json
from dataclasses import replace
from typing import Any

import pytest
import tinymodels
from tinymodels import LINES

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import NotEnoughMemoryError, SettingsError
from dflash_mlx.targets import Target
from dflash_mlx.train import answers, memory
from dflash_mlx.train.drafter import DrafterSettings
from dflash_mlx.train.initial import draft_config
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import TrainingPlan, train


@pytest.fixture(scope="module")
def target() -> Target:
    return tinymodels.target()


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in LINES * 2))
    return Recipe(
        data=path, steps=1, block_size=4, max_tokens=10, rows=4, anchors=16, tokens=256, layers=2
    )


def test_too_little_memory_is_told_before_anything_is_answered(
    tmp_path, target, recipe, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(memory, "memory_bytes", lambda: 10**6)
    with pytest.raises(NotEnoughMemoryError, match=r"lower --tokens \(256\), --anchors \(16\)"):
        train(target, out, recipe)
    assert not out.exists()


def test_answers_too_short_for_the_memory_stay_for_another_training(
    tmp_path, target, recipe, monkeypatch
):
    """How many sequences fill a batch is known when they are: then less can be asked for."""
    seen: list[Any] = []
    train(target, tmp_path / "free", recipe, listen=seen.append)
    [needed] = [event.memory_bytes for event in seen if isinstance(event, TrainingPlan)]
    monkeypatch.setattr(memory, "memory_bytes", lambda: needed - 1)
    out = tmp_path / "out"
    with pytest.raises(NotEnoughMemoryError, match="lower --tokens"):
        train(target, out, recipe)

    def answer(*_: Any, **__: Any) -> None:
        raise AssertionError("what was answered is answered again")

    monkeypatch.setattr(answers, "complete", answer)
    train(target, out, replace(recipe, tokens=64))
    with pytest.raises(SettingsError, match=r"other settings \(tokens\)"):  # there are steps now
        train(target, out, recipe)


def test_short_samples_take_more(target):
    """A batch has as many of them as fill it, and each has all its anchors."""
    config = DraftConfig.from_dict(draft_config(target, "dflash", 8, 1))
    settings = DrafterSettings(steps=1, tokens=1024, anchors=64)
    short, long, mixed = (
        memory.memory_needed(target, config, settings, lengths) - 2 * memory.BOUND
        for lengths in ([48], [1024], [1024, 48, 500])
    )
    assert short == mixed and short > 4 * long

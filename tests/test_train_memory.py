"""What training takes: judged before anything is answered, and again when the answers are known."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinymodels
from tinymodels import LINES

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import NotEnoughMemoryError, OutputError, SettingsError
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
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in LINES * 2))
    return Recipe(
        data=path, steps=1, block_size=4, max_tokens=10, rows=4, anchors=16, tokens=256, layers=2
    )


def test_too_little_memory_or_disk_is_told_before_anything_is_answered(
    tmp_path: Path, target: Target, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", memory.memory_bytes()
    monkeypatch.setattr(memory, "memory_bytes", lambda: 10**6)
    with pytest.raises(NotEnoughMemoryError, match=r"lower --tokens \(256\) or --anchors \(16\)"):
        train(target, out, recipe)
    monkeypatch.setattr(memory, "memory_bytes", lambda: real)
    usage = memory.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OutputError, match="make room, or choose another --out"):
        train(target, out, recipe)
    assert not out.exists()


@pytest.mark.filterwarnings("ignore:dflash-mlx. training needs")
def test_answers_too_short_for_the_memory_stay_for_another_training(
    tmp_path: Path, target: Target, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many sequences fill a batch is known when they are: then less can be asked for."""
    seen: list[Any] = []
    train(target, tmp_path / "free", recipe, listen=seen.append)
    [needed] = [event.estimate.memory for event in seen if isinstance(event, TrainingPlan)]
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


def test_memory_that_is_nearly_all_taken_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 10**9)
    for step, warned in ((7 * 10**8, False), (9 * 10**8, True)):
        found = memory.Estimate(target=0, drafter=0, step=step, checkpoint=0)
        with warnings.catch_warnings(record=True) as told:
            memory.check(found, tmp_path, 1024, 64)
        assert any("close other programs" in str(one.message) for one in told) == warned


def test_short_samples_take_more(target: Target) -> None:
    """A batch has as many of them as fill it, and each has all its anchors."""
    config = DraftConfig.from_dict(draft_config(target, "dflash", 8, 1))
    settings = DrafterSettings(steps=1, tokens=1024, anchors=64)
    short, long, mixed = (
        memory.estimate(target, config, settings, lengths).step - 2 * memory.BOUND
        for lengths in ([48], [1024], [1024, 48, 500])
    )
    assert short == mixed and short > 4 * long

"""`train` refuses what cannot be before it answers a prompt or writes a file."""

import json
from typing import Any

import pytest
import tinymodels
from program import run

from dflash_mlx.errors import DFlashError, IncompatibleDrafterError
from dflash_mlx.loading.load import load_drafter
from dflash_mlx.targets import Target
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.run import train


@pytest.fixture(scope="module")
def target() -> Target:
    return tinymodels.target()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "2", "--hours", "1"], "not both"),
        (["--keep-answers"], "needs --data"),
        (["--data", "x.jsonl"], "either a file"),
        (["--hours", "0"], "above 0"),
        (["--learning-rate", "0"], "above 0"),
        (["--seed", str(2**64)], "below 2**32"),
        (["--warm-start", "tiny", "--layers", "2"], "--warm-start"),
    ],
)
def test_mistakes_of_usage_are_told_first(tmp_path, options, message, monkeypatch):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded before the options are judged")

    monkeypatch.setattr("dflash_mlx.load_target", load)
    out = tmp_path / "out"
    done = run("train", "--synthesize", "2", "--out", out, *options, COLUMNS="200")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layers": 4}, "lower --layers"),
        ({"block_size": 5000}, "block_size"),
    ],
)
def test_shapes_are_judged_before_anything_is_answered(tmp_path, target, wrong, said):
    with pytest.raises(DFlashError, match=said):
        train(target, tmp_path / "out", Recipe(synthesize=2, **wrong))
    assert not (tmp_path / "out").exists()


def test_a_drafter_to_start_from_is_judged_before_anything_is_answered(tmp_path, target):
    folder = tinymodels.save_drafter(tmp_path / "warm", seed=3, block_size=4)
    raw = json.loads((folder / "config.json").read_text())
    warm = (load_drafter(str(folder)), raw | {"num_target_layers": 30})
    with pytest.raises(IncompatibleDrafterError):
        train(target, tmp_path / "out", Recipe(synthesize=2), warm)
    assert not (tmp_path / "out").exists()

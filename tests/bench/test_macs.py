"""Which models fit a Mac, and how fast they are predicted to be: against what others published."""

import json
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from program import run

from dflash_mlx.bench import macs
from dflash_mlx.bench.macs import known_models
from dflash_mlx.bench.roofline import model_of
from dflash_mlx.loading.registry import pairs
from dflash_mlx.machine.chips import chip_named
from dflash_mlx.machine.facts import working_set

CONFIGS = json.loads((Path(macs.__file__).parent / "configs.json").read_text())
GIB = 2**30


@pytest.fixture(scope="module")
def models():
    return {(one.pair.targets[0], one.bits): one for one in known_models()}


@pytest.mark.parametrize("name", [name for name, of in CONFIGS.items() if isinstance(of, dict)])
def test_shapes_have_as_many_parameters_as_the_name_says(name):
    [billions] = [one.billions for one in pairs() if one.targets[0].endswith(f"/{name}")]
    model = model_of(CONFIGS[name], Path("configs.json"), None)
    count = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    assert count / 1e9 == pytest.approx(billions, rel=0.06)


@pytest.mark.parametrize(
    "bits, plain", [(4, 14.7), (8, 8.2)]
)  # Qwen3.8-27B on an M4 Pro, as mlx-dspark measured it
def test_a_speed_that_others_measured(models, bits, plain):
    chip, known = chip_named("M4 Pro"), models["Qwen/Qwen3-8B", bits]
    found = models["Qwen/Qwen3.8-27B", bits].predict(chip)
    assert found["plain"] == pytest.approx(plain, rel=0.05) and found["drafted"] is None
    assert 1 < found["step_cost"] < 3  # they had 2.1 to 4.2 times the speed
    row = known.predict(chip)
    drafted = row["plain"] * known.pair.acceptance / row["step_cost"]
    assert row["drafted"] == pytest.approx(drafted)


def test_sizes_are_those_of_the_files(models):
    """As the hub shows them; beside them a drafter and 16,000 tokens of keys and values."""
    for name, bits, files in (
        ("openai/gpt-oss-20b", 4, 12.1),
        ("Qwen/Qwen3-8B", 4, 4.6),
        ("Qwen/Qwen3-30B-A3B", 4, 17.2),
    ):
        model = models[name, bits]
        weights = model.memory - model.drafter
        weights -= macs.CONTEXT / macs.READ * model.shapes.context
        assert weights / 1e9 == pytest.approx(files, rel=0.1)
    assert ("openai/gpt-oss-20b", 8) not in models  # it is quantized already


def test_the_working_set_is_what_macos_recommends():
    for memory, usable in ((8, 5.3), (16, 10.7), (32, 21.3), (64, 48)):
        assert working_set(memory * GIB) / GIB == pytest.approx(usable, abs=0.05)


def test_the_command(models):
    wrong = run("models", "NoSuch", "--chip", "M4")
    assert wrong.returncode == 2 and "NoSuch: no shapes of such a model" in wrong.stderr
    done = run("models", "--chip", "m4pro", "--memory", "24", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["prediction"] is True and content["bytes"] == 16 * GIB
    shown = {(row["target"], row["bits"]): row["gigabytes"] for row in content["models"]}
    assert shown == {
        key: pytest.approx(one.memory / 1e9)
        for key, one in models.items()
        if one.memory <= working_set(24 * GIB)
    }
    speeds = [row["plain"] for row in content["models"]]
    assert speeds == sorted(speeds, reverse=True) and len(speeds) > 5
    told = run("models", "27B", "--chip", "M2", "--memory", "8")
    assert "None of them fits" in told.stdout and "not measurements" in told.stderr
    assert run("models", "--memory", "48").returncode == 2  # this machine has no known chip
    assert run("models", "--chip", "M4", "--all").returncode == 2

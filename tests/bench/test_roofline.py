"""What is predicted: steps, against what others timed, and which models fit a Mac."""

import itertools
import json
from pathlib import Path

import families
import mlx.core as mx
import pytest
import tinymodels
from ggufs import gguf_of, write
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from program import run

from dflash_mlx.bench import macs, roofline
from dflash_mlx.bench.macs import known_models
from dflash_mlx.bench.roofline import Shapes, model_of, predict_steps, shapes_of, slot_probability
from dflash_mlx.errors import SettingsError
from dflash_mlx.kernels.costs import stock_seconds, tile_seconds
from dflash_mlx.kernels.shapes import Matrix
from dflash_mlx.loading.gguf import convert
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loading.registry import pairs
from dflash_mlx.machine.chips import chip_named, find_chip
from dflash_mlx.machine.facts import working_set

# T16/T1 of a 9B dense target, from the public bandwidths and estimated peaks: with a tile of 16
# rows in 4 and 8 bits, with MLX's tile of 32 rows in 4 and 8 bits.
PUBLISHED = {
    "M1": (1.95, 1.03, 3.4, 1.8),
    "M3 Pro": (1.7, 1.0, 3.0, 1.6),
    "M3 Max": (2.1, 1.1, 3.6, 1.9),
    "M4": (2.1, 1.1, 3.7, 1.95),
    **dict.fromkeys(("M1 Pro", "M1 Max", "M1 Ultra"), (2.9, 1.5, 5.0, 2.6)),
    **dict.fromkeys(("M2 Pro", "M2 Max", "M2 Ultra"), (2.2, 1.2, 3.8, 2.0)),
    **dict.fromkeys(("M4 Pro", "M4 Max"), (2.4, 1.25, 4.1, 2.2)),
    # MLX's tile there is timed in ml-explore/mlx#4171
    **dict.fromkeys(("M5", "M5 Pro"), (1.0, 1.0, 2.6, 1.37)),
    "M5 Max": (1.63, 1.0, 3.84, 2.03),
}
MAC = json.loads((Path(__file__).parents[1] / "data" / "mac_steps.json").read_text())
CONFIGS = json.loads((Path(roofline.__file__).parent / "configs.json").read_text())
NINE_BILLION = 9 * 2**30


def dense(bits: int) -> Shapes:
    """9B weights in one kind of matrix, with a half-precision scale and bias per 64 of them."""
    matrix = Matrix(12288, 4096, 12288 * 4096 * (2 * bits + 1) // 16, "affine", bits, 64)
    return Shapes([matrix] * (NINE_BILLION // (12288 * 4096)), 0, 0, 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_table_of_a_9b_target(name):
    chip, four, eight = chip_named(name), dense(4).matrices[0], dense(8).matrices[0]
    predicted = [
        seconds(chip, matrix, 16) / stock_seconds(chip, matrix, 1)
        for seconds in (tile_seconds, stock_seconds)
        for matrix in (four, eight)
    ]
    assert predicted == pytest.approx(PUBLISHED[name], rel=0.04)
    # The upper bound is the acceptance length 6 over T16/T1, with the kernels that run there.
    runs = predicted[2 if name.startswith("M5") else 0]
    assert predict_steps(dense(4), chip, 6)[15].speedup == pytest.approx(6 / runs)


@pytest.mark.parametrize(
    "step", MAC["steps"], ids=lambda step: "{model} {chip} {rows}".format(**step)
)
def test_steps_that_others_timed_on_macs(step):
    config = CONFIGS[step["model"]]
    model = model_of(config, Path("config.json"), Quantization.of(step["bits"]))
    chip, shapes = chip_named(step["chip"]), shapes_of(model, config, 1024)
    rest = chip.reading(shapes.other + shapes.context) + chip.launch * shapes.launches
    seconds = {"stock": stock_seconds, "tile": tile_seconds}[step["kernels"]]
    predicted = rest + sum(seconds(chip, matrix, step["rows"]) for matrix in shapes.matrices)
    assert 1e3 * predicted == pytest.approx(step["milliseconds"], rel=0.2)
    if step["rows"] == 1:
        assert predict_steps(shapes, chip, 4)[0].milliseconds == pytest.approx(1e3 * predicted)


@pytest.mark.parametrize("product", MAC["products"])
def test_products_that_others_timed_on_macs(product):
    columns, depth = product["columns"], product["depth"]
    matrix = Matrix(columns, depth, columns * depth * 9 // 16, "affine", 4, 64)
    seconds = {"stock": stock_seconds, "tile": tile_seconds}[product["kernels"]]
    predicted = seconds(chip_named(product["chip"]), matrix, product["rows"])
    assert 1e3 * predicted == pytest.approx(product["milliseconds"], rel=0.2)


def test_acceptance_at_every_width():
    for acceptance in (1, 2.5, 6, 15.9, 16):
        kept = sum(slot_probability(acceptance) ** slot for slot in range(16))
        assert kept == pytest.approx(acceptance)
    tokens = [one.tokens for one in predict_steps(dense(4), chip_named("M4"), 6)]
    assert tokens == sorted(tokens) and tokens[0] == 1 and tokens[-1] == pytest.approx(6)
    with pytest.raises(SettingsError, match="between 1 and 16"):
        slot_probability(17)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_5_moe", "gpt_oss", "kimi_k25"])
@pytest.mark.parametrize("bits", [None, 4])
def test_every_byte_of_a_model_is_counted(family, bits):
    """With all experts in use: all parameters but the embeddings, of which rows are looked up."""
    config = families.CONFIGS[family]
    model = families.random_model(family)
    model.set_dtype(mx.bfloat16)
    if quantization := Quantization.of(bits):
        quantization.apply(model)
    shapes = shapes_of(model, config, context=0)
    counted = sum(matrix.size * max(1, matrix.experts) for matrix in shapes.matrices)
    weights = tree_flatten(model.parameters())
    read = sum(value.nbytes for path, value in weights if "embed_tokens" not in path)
    assert counted + shapes.other == read and counted > shapes.other > 0
    for matrix in shapes.matrices:  # scales and biases are a small part
        assert 1 <= 8 * matrix.size / (matrix.columns * matrix.depth * matrix.bits) < 1.5
    # A model that is only a config has the same shapes, without a weight being computed.
    lazy = shapes_of(model_of(config, Path("config.json"), quantization), config, 0)
    assert list(lazy.matrices) == list(shapes.matrices)


def test_experts_in_use():
    """Against all ways in which two tokens can each choose two of four experts."""
    choices = list(itertools.combinations(range(4), 2))
    used = [len({*first, *second}) for first in choices for second in choices]
    matrix = Matrix(8, 8, 1, "float", 16, experts=4, top_k=2)
    assert matrix.active(1) == 2
    assert matrix.active(2) == pytest.approx(sum(used) / len(used))


def test_context_is_read_too():
    config = families.CONFIGS["qwen3"]
    model = families.random_model("qwen3")
    row = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    assert shapes_of(model, config, 1000).context == 1000 * row * config["num_hidden_layers"]
    # Two of four layers have a sliding window, which ends what they read.
    model, config = families.random_model("gpt_oss"), families.CONFIGS["gpt_oss"]
    near, far = (shapes_of(model, config, context).context for context in (1000, 2000))
    assert far - near == 2 * 1000 * row
    # Three of four layers have a state, which does not grow.
    model, config = families.random_model("qwen3_5"), families.CONFIGS["qwen3_5"]
    near, far = (shapes_of(model, config, context).context for context in (0, 1000))
    assert near == 3 * 2 * 4 * 4 * 32 * 32 and far - near == 1000 * row


def test_chips_are_found_by_the_names_people_and_devices_use():
    names = ("Apple M4 Max", "m4 max", "M4Max")
    assert {find_chip(name) for name in names} == {chip_named("M4 Max")}
    assert find_chip("AMD EPYC") is None
    with pytest.raises(SettingsError, match="M4 Max"):
        chip_named("M99")


@pytest.fixture
def any_size(monkeypatch):
    """Have the command predict tiny models, too."""
    monkeypatch.setattr(roofline, "LEAST_BYTES", 0)


def test_the_command(tmp_path, any_size):
    config = tinymodels.model_config("qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ("--model", tmp_path, "--chip", "M4 Max", "--target-bits", "4")
    done = run("roofline", *command, "--acceptance", "4", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["prediction"] is True and content["acceptance"] == 4
    assert [row["rows"] for row in content["steps"]] == list(range(1, 17))
    assert content["steps"][0]["speedup"] == 1

    shown = run("roofline", *command, "--acceptance", "4")
    assert "prediction, not a measurement" in shown.stderr and shown.stdout.count("\n") == 17
    shown = run("roofline", *command)
    assert "\n4 tokens per step of 16 rows (assumed: --acceptance)." in shown.stderr


def test_a_gguf_file_is_predicted_by_its_header(tmp_path, any_size, monkeypatch):
    """In its own bits, as it is on Metal; nothing is converted for it."""
    monkeypatch.setattr(convert, "cache_folder", lambda part: tmp_path / part)
    metadata, tensors, _ = gguf_of("llama")
    path = tmp_path / "model.gguf"
    write(path, metadata, tensors, dict.fromkeys(tensors, "Q8_0"))
    done = run("roofline", "--model", path, "--chip", "M4", "--acceptance", "4", "--json")
    assert done.returncode == 0, done.stderr
    read = load_model(convert.converted(path, unpacked=False))[0].parameters()
    stored = sum(value.nbytes for _, value in tree_flatten(read))  # its few vectors in float32
    assert json.loads(done.stdout)["weights_bytes"] == pytest.approx(stored, rel=0.01)


def test_the_recommended_width_is_the_fastest_one_of_note(any_size):
    content = json.loads(run("roofline", "--chip", "M1", "--json").stdout)
    speeds = {row["rows"]: row["tokens_per_second"] for row in content["steps"]}
    best = content["recommended_rows"]
    assert speeds[best] >= 0.99 * max(speeds.values())
    assert all(speed < 0.99 * max(speeds.values()) for row, speed in speeds.items() if row < best)
    row = content["steps"][best - 1]
    per_second = 1e3 * row["tokens"] / row["milliseconds"]
    assert row["tokens_per_second"] == pytest.approx(per_second)
    shown = run("roofline", "--chip", "M1").stderr
    assert f"Recommended: {best} row" in shown and "fits this" in shown


def test_acceptance_and_chip_have_defaults_where_something_is_known(
    tmp_path, monkeypatch, any_size
):
    folder = tmp_path / "Qwen3-8B-4bit"  # whose drafter's acceptance is published
    folder.mkdir()
    config = tinymodels.model_config("qwen3") | {"quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    shown = run("roofline", "--model", folder)
    assert shown.returncode == 2 and "M4 Max" in shown.stderr
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M3 Pro"})
    shown = run("roofline", "--model", folder)
    assert shown.returncode == 0 and "on M3 Pro" in shown.stderr and "6.49 tokens" in shown.stderr


def test_what_the_command_cannot_use_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = tinymodels.model_config("qwen3") | {"quantization": {"group_size": 32, "bits": 4}}
    (quantized / "config.json").write_text(json.dumps(config))
    for arguments, code, said in [
        (["--chip", "M99"], 2, "M99"),
        (["--model", tmp_path], 1, "mlx-lm cannot use it"),
        (["--model", tmp_path / "nothing"], 1, "No model"),
        (["--model", quantized, "--target-bits", "4"], 2, "quantized already"),
        (["--acceptance", "40"], 2, "between 1 and 16"),
        ([], 2, "below 100 MB"),
    ]:
        done = run("roofline", "--chip", "M4", "--acceptance", "4", *arguments)
        assert done.returncode == code and done.stderr.startswith("error: "), done.stderr
        assert said in done.stderr and done.stderr.count("\n") == 1


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


# Qwen3.8-27B on an M4 Pro, as mlx-dspark measured it
@pytest.mark.parametrize("bits, plain", [(4, 14.7), (8, 8.2)])
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


def test_the_command_about_macs(models, monkeypatch):
    monkeypatch.setattr(macs, "known_models", models.values)  # takes seconds
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

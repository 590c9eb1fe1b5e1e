"""The files of a benchmark run, reports that compare runs, and the z-lab protocol."""

import json
import re
from pathlib import Path
from random import Random
from unittest.mock import Mock

import jsonschema
import pytest
import tinymodels
from program import run

from dflash_mlx.bench import measure
from dflash_mlx.bench.datasets import BenchPrompt, choose_protocol_prompts
from dflash_mlx.bench.results import (
    MLX_LM,
    PLAIN,
    PromptRuns,
    describe_difference,
    read_run,
    run_content,
)
from dflash_mlx.cli.pair import Pair
from dflash_mlx.errors import DataError
from dflash_mlx.events import Result, Stats
from dflash_mlx.machine.blas import BlasInfo

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "bench.schema.json").read_text())
BLAS = BlasInfo("dflash-avx2", None, "made up")


def one_line_error(result) -> str:
    """The error of a command, after checking that it is its only output."""
    assert result.returncode == 1 and not result.stdout, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def use_random_pair(monkeypatch) -> None:
    """Let `bench` use a random pair, whatever its options, so that nothing is loaded."""
    pair = Pair(
        tinymodels.target(), drafter=tinymodels.random_drafter(), block_size=None, blas=BLAS
    )
    monkeypatch.setattr("dflash_mlx.cli.bench.open_pair", lambda *_, **__: pair)


@pytest.fixture
def random_pair(monkeypatch):
    use_random_pair(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of a run with two categories."""
    with pytest.MonkeyPatch.context() as patch:
        use_random_pair(patch)
        out = tmp_path_factory.mktemp("runs") / "deep" / "first"
        prompts = out.parents[1] / "prompts.jsonl"
        rows = [{"prompt": "what is 37 + 48?", "category": name} for name in ("sums", "more")]
        prompts.write_text("\n".join(map(json.dumps, rows)))
        result = run("bench", "--prompts", prompts, "-n", "12", "--repeats", "2", "--out", out)
        assert result.returncode == 0, result.stderr
        assert "sums" in result.stdout and "2/2" in result.stdout
        assert "peak memory" in result.stderr
        return out


def test_the_json_of_a_run_follows_the_schema_and_its_sums_are_consistent(folder):
    content = json.loads((folder / "bench.json").read_text())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(content, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | {"repeats": "2"}, SCHEMA)
    assert [row["category"] for row in content["categories"]] == ["sums", "more"]
    methods = content["overall"]["methods"]
    assert methods["DFlash"]["identical"] == methods["mlx-lm"]["identical"] == 2
    assert {"chip", "os", "blas", "mlx", "mlx-lm"} <= set(content["machine"])
    speeds = content["prompts"][0]["methods"]["DFlash"]["tokens_per_second"]
    assert len(speeds) == 2 and min(speeds) > 0
    steps = sum(prompt["methods"]["DFlash"]["steps"] for prompt in content["prompts"])
    accepted = methods["DFlash"]["accepted"]
    assert sum(accepted.values()) == steps
    # A step gives its accepted tokens and one more, and a prompt's prefill gives one.
    tokens = sum(int(kept) * count for kept, count in accepted.items()) + steps
    assert tokens + len(content["prompts"]) == content["overall"]["output_tokens"] == 24


def test_a_run_prints_its_longest_duration_and_the_figures_of_each_prompt(folder, random_pair):
    prompts = folder.parents[1] / "prompts.jsonl"
    result = run("bench", "--prompts", prompts, "-n", "12", "--repeats", "2")
    planned = r"^2 prompts, 2 runs of 3 methods each: at most \d+ seconds?\.$"
    assert re.search(planned, result.stderr, re.M)
    figures = r"plain \S+ tok/s · DFlash \S+ tok/s, \S+ plain, \d\.\d tokens per step · mlx-lm"
    for category in ("sums", "more"):
        assert re.search(f"^{category}: {figures}", result.stderr, re.M)
    assert "Ended early" not in result.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_ended_by_ctrl_c_keeps_the_prompts_it_has_measured(
    options, folder, random_pair, tmp_path, monkeypatch
):
    """Here one of two. They are in the file even before, in case of a crash."""
    original_measure_all = measure.measure_all
    contents = []

    def measure_one(*arguments, **settings):
        measured = original_measure_all(*arguments, **settings)
        yield next(measured)
        contents.append(read_run(tmp_path / "run"))
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_all", measure_one)
    prompts = folder.parents[1] / "prompts.jsonl"
    out = tmp_path / "run"
    result = run("bench", "--prompts", prompts, "-n", "12", "--out", out, *options)
    assert result.returncode == 130
    assert "sums" in result.stdout and "more" not in result.stdout
    contents.append(read_run(out))
    for content in contents:
        jsonschema.validate(content, SCHEMA)
        assert len(content["prompts"]) == 1 and content["planned_prompts"] == 2
    report = run("report", out)
    assert "Ended early, after 1 of 2 prompts." in report.stderr


def test_a_run_ended_by_ctrl_c_before_its_first_prompt_writes_nothing(
    folder, random_pair, tmp_path, monkeypatch
):
    monkeypatch.setattr(measure, "measure_all", Mock(side_effect=KeyboardInterrupt))
    prompts = folder.parents[1] / "prompts.jsonl"
    result = run("bench", "--prompts", prompts, "--out", tmp_path / "none")
    assert result.returncode == 130 and not result.stdout
    assert not (tmp_path / "none").exists()


def test_differences_are_described_with_their_token_and_logit_gap(folder):
    content = read_run(folder)
    difference = {"category": "sums", "prompt": "a\nb", "method": "DFlash", "token": 4, "plain": 1}
    content["differences"] = [
        difference | {"other": 2, "logit_gap": 0.012},
        difference | {"other": None, "logit_gap": None},
    ]
    jsonschema.validate(content, SCHEMA)
    text = "\n".join(map(describe_difference, content["differences"]))
    assert "DFlash, from token 5 on (logit gap 0.012): a b" in text and "(one ended)" in text


@pytest.mark.parametrize(
    "lines, message",
    [
        ('{"prompt": "fine"}\n{"prompt":', "line 2: not valid JSON"),
        ('{"prompt": "fine"}\n\n{"prompt": ""}', 'line 3: messages need a "role"'),
        (json.dumps({"prompt": "x" * 100_000}), "line 1: The prompt has"),
    ],
)
def test_an_invalid_prompt_is_an_error_and_nothing_is_written(
    lines, message, random_pair, tmp_path
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(lines)
    out = tmp_path / "new"
    assert message in one_line_error(run("bench", "--prompts", prompts, "--out", out))
    assert not out.exists()


def test_a_run_is_never_overwritten(folder, random_pair):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert "holds a run already" in one_line_error(run("bench", "--out", folder))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_an_error(random_pair, tmp_path):
    (tmp_path / "file").write_text("in the way")
    long = tmp_path / ("a" * 300)
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run"), long):
        assert "cannot be written" in one_line_error(run("bench", "--out", out))
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_report_compares_runs_of_two_machines(folder, tmp_path):
    other = read_run(folder)
    other["machine"]["chip"] = "Apple M5 Max"
    other["overall"]["methods"]["DFlash"]["speedup"]["median"] = 4.375
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "bench.json").write_text(json.dumps(other))
    result = run("report", folder, tmp_path / "second" / "bench.json")
    assert result.returncode == 0
    assert "4.38x?" in result.stdout and result.stdout.count("sums") == 2
    assert "Apple M5 Max" in result.stderr and str(folder) in result.stdout
    content = json.loads(run("report", folder, tmp_path / "second", "--json").stdout)
    assert list(content["runs"]) == [str(folder), str(tmp_path / "second")]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"format": "dflash-mlx bench"}'])
def test_the_error_for_an_invalid_run_names_its_file(content, tmp_path):
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    with pytest.raises(DataError, match="bench.json: "):
        read_run(tmp_path)
    assert "bench.json" in one_line_error(run("report", tmp_path))


def test_the_acceptance_length_is_also_measured_without_an_adapter(random_pair, tmp_path):
    """So a user sees how much worse the drafter is for a fine-tuned model."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 37 + 48?"}')
    options = ["--prompts", tmp_path / "prompts.jsonl", "-n", "12", "--adapter", "mine"]
    result = run("bench", *options, "--out", tmp_path / "out")
    assert re.search(r"[\d.]+ tokens per step with the adapter, [\d.]+ without", result.stderr)
    jsonschema.validate(read_run(tmp_path / "out"), SCHEMA)


def prompt(number: int, category: str = "a") -> BenchPrompt:
    return BenchPrompt(category, ({"role": "user", "content": str(number)},))


def answer(tokens: int, seconds: float, rounds: int) -> Result:
    output_tokens = 1 + tokens if tokens else 0  # the prefill gives one
    stats = Stats(output_tokens=output_tokens, decode_seconds=seconds, rounds=rounds)
    return Result("", tokens=[0] * tokens, finish_reason="length", stats=stats)


def protocol_figures(measured):
    return run_content({"protocol": "zlab"}, measured)["protocol_figures"]


def test_up_to_128_prompts_keep_their_order_and_more_are_drawn_as_z_lab_does():
    few = [prompt(i) for i in range(128)]
    assert choose_protocol_prompts(few) == few
    many = [prompt(i) for i in range(300)]
    order = list(range(300))
    Random(42).shuffle(order)
    assert [int(p.question) for p in choose_protocol_prompts(many)] == order[:128]
    assert many == [prompt(i) for i in range(300)]


def test_every_answer_has_the_same_weight_in_the_protocols_means():
    """Whatever its length: means of seconds per token, and of acceptance lengths."""
    measured = [
        PromptRuns(prompt(0), {PLAIN: [answer(10, 1.0, 10)], "DFlash": [answer(10, 0.2, 2)]}),
        PromptRuns(prompt(1), {PLAIN: [answer(90, 3.0, 90)], "DFlash": [answer(90, 3.0, 45)]}),
    ]
    category = protocol_figures(measured)["a"]
    plain = (0.1 + 1 / 30) / 2
    drafted = (0.02 + 1 / 30) / 2
    assert category["speedup"] == pytest.approx(plain / drafted)
    assert category["acceptance_length"] == pytest.approx((5 + 2) / 2)
    assert category["answers"] == 2 and category["over_mlx_lm"] is None
    slower = {MLX_LM: [answer(10, 2.0, 10)], "DFlash": [answer(10, 0.5, 4)]}
    [category] = protocol_figures([PromptRuns(prompt(2, "b"), slower)]).values()
    assert category["over_mlx_lm"] == pytest.approx(4) and category["speedup"] is None
    empty = {PLAIN: [answer(0, 0, 0)], "DFlash": [answer(0, 0, 0)]}
    category = protocol_figures([PromptRuns(prompt(0), empty)])["a"]
    assert category["speedup"] is None and category["acceptance_length"] is None


def test_the_command_measures_by_a_protocol(tmp_path):
    rows = [json.dumps({"question": f"What is {i} plus 4?"}) for i in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    options = ["bench", "--suite", "gsm8k", "--data", tmp_path, "--protocol", "zlab"]
    result = run(*options, "--limit", "2", "-n", "8", "--json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    protocol = content["protocol_figures"]["gsm8k"]
    assert content["max_tokens"] == 8 and content["repeats"] == 1 and protocol["answers"] == 2
    assert protocol["acceptance_length"] >= 1 and protocol["speedup"] > 0
    assert run("bench", "--suite", "gsm8k", "--data", tmp_path / "no").returncode == 1

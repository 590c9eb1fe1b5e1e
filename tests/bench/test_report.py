"""A run's files, runs side by side, and measuring as a paper does."""

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
HERE = BlasInfo("dflash-avx2", None, "made up")


def one_line_error(done) -> str:
    assert done.returncode == 1 and not done.stdout, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture
def tiny(monkeypatch):
    """A random pair instead of the one that the options ask for, so that nothing is loaded."""
    pair = Pair(
        tinymodels.target(), drafter=tinymodels.random_drafter(), block_size=None, blas=HERE
    )
    monkeypatch.setattr("dflash_mlx.cli.bench.open_pair", lambda *_, **__: pair)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A measured run with two categories."""
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(
            tinymodels.target(), drafter=tinymodels.random_drafter(), block_size=None, blas=HERE
        )
        patch.setattr("dflash_mlx.cli.bench.open_pair", lambda *_, **__: pair)
        out = tmp_path_factory.mktemp("runs") / "deep" / "first"
        prompts = out.parents[1] / "prompts.jsonl"
        rows = [{"prompt": "what is 37 + 48?", "category": name} for name in ("sums", "more")]
        prompts.write_text("\n".join(map(json.dumps, rows)))
        done = run("bench", "--prompts", prompts, "-n", "12", "--repeats", "2", "--out", out)
        assert done.returncode == 0, done.stderr
        assert "sums" in done.stdout and "2/2" in done.stdout and "peak memory" in done.stderr
        return out


def test_the_json_is_what_the_schema_says(folder):
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
    tokens = sum(int(kept) * count for kept, count in accepted.items()) + steps
    assert tokens + len(content["prompts"]) == content["overall"]["output_tokens"] == 24


def test_a_run_says_how_long_it_takes_and_shows_each_prompt(folder, tiny):
    prompts = folder.parents[1] / "prompts.jsonl"
    done = run("bench", "--prompts", prompts, "-n", "12", "--repeats", "2")
    planned = r"^2 prompts, 2 runs of 3 methods each: at most \d+ seconds?\.$"
    assert re.search(planned, done.stderr, re.M)
    figures = r"plain \S+ tok/s · DFlash \S+ tok/s, \S+ plain, \d\.\d tokens per step · mlx-lm"
    for category in ("sums", "more"):
        assert re.search(f"^{category}: {figures}", done.stderr, re.M)
    assert "Ended early" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_that_is_ended_keeps_what_it_has(options, folder, tiny, tmp_path, monkeypatch):
    """By Ctrl-C after the first of two prompts; the file is there before, as after a crash."""
    whole = measure.measure_all
    files = []

    def until_ctrl_c(*arguments, **settings):
        measured = whole(*arguments, **settings)
        yield next(measured)
        files.append(read_run(tmp_path / "run"))
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure_all", until_ctrl_c)
    prompts = folder.parents[1] / "prompts.jsonl"
    arguments = "--prompts", prompts, "-n", "12", "--out", tmp_path / "run", *options
    done = run("bench", *arguments)
    assert done.returncode == 130
    assert "sums" in done.stdout and "more" not in done.stdout
    for content in (read_run(tmp_path / "run"), *files):
        jsonschema.validate(content, SCHEMA)
        assert len(content["prompts"]) == 1 and content["planned_prompts"] == 2
    told = run("report", tmp_path / "run")
    assert "Ended early, after 1 of 2 prompts." in told.stderr

    monkeypatch.setattr(measure, "measure_all", Mock(side_effect=KeyboardInterrupt))
    nothing = run("bench", "--prompts", prompts, "--out", tmp_path / "none")
    assert nothing.returncode == 130 and not nothing.stdout and not (tmp_path / "none").exists()


def test_differences_are_told(folder):
    content = read_run(folder)
    place = {"category": "sums", "prompt": "a\nb", "method": "DFlash", "token": 4, "plain": 1}
    content["differences"] = [
        place | {"other": 2, "logit_gap": 0.012},
        place | {"other": None, "logit_gap": None},
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
def test_a_bad_prompt_leaves_nothing_behind(lines, message, tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(lines)
    out = tmp_path / "new"
    assert message in one_line_error(run("bench", "--prompts", prompts, "--out", out))
    assert not out.exists()


def test_a_run_is_never_written_over(folder, tiny):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert "holds a run already" in one_line_error(run("bench", "--out", folder))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
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
    done = run("report", folder, tmp_path / "second" / "bench.json")
    assert done.returncode == 0 and "4.38x?" in done.stdout and done.stdout.count("sums") == 2
    assert "Apple M5 Max" in done.stderr and str(folder) in done.stdout
    content = json.loads(run("report", folder, tmp_path / "second", "--json").stdout)
    assert list(content["runs"]) == [str(folder), str(tmp_path / "second")]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"format": "dflash-mlx bench"}'])
def test_an_invalid_run_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    with pytest.raises(DataError, match="bench.json: "):
        read_run(tmp_path)
    assert "bench.json" in one_line_error(run("report", tmp_path))


def test_what_an_adapter_costs_is_told(tiny, tmp_path):
    """The drafter's acceptance length is also measured on the model without the adapter."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 37 + 48?"}')
    asked = "--prompts", tmp_path / "prompts.jsonl", "-n", "12", "--adapter", "mine"
    done = run("bench", *asked, "--out", tmp_path / "out")
    assert re.search(r"[\d.]+ tokens per step with the adapter, [\d.]+ without", done.stderr)
    jsonschema.validate(read_run(tmp_path / "out"), SCHEMA)


def prompt(number: int, category: str = "a") -> BenchPrompt:
    return BenchPrompt(category, ({"role": "user", "content": str(number)},))


def answer(tokens: int, seconds: float, rounds: int) -> Result:
    stats = Stats(output_tokens=tokens and 1 + tokens, decode_seconds=seconds, rounds=rounds)
    return Result("", tokens=[0] * tokens, finish_reason="length", stats=stats)


def figures(measured):
    return run_content({"protocol": "zlab"}, measured)["protocol_figures"]


def test_few_prompts_keep_their_order_and_many_are_drawn_as_z_lab_draws():
    few = [prompt(i) for i in range(128)]
    assert choose_protocol_prompts(few) == few
    many = [prompt(i) for i in range(300)]
    order = list(range(300))
    Random(42).shuffle(order)
    assert [int(p.question) for p in choose_protocol_prompts(many)] == order[:128]
    assert many == [prompt(i) for i in range(300)]


def test_means_are_those_of_answers_however_long_they_are():
    measured = [
        PromptRuns(prompt(0), {PLAIN: [answer(10, 1.0, 10)], "DFlash": [answer(10, 0.2, 2)]}),
        PromptRuns(prompt(1), {PLAIN: [answer(90, 3.0, 90)], "DFlash": [answer(90, 3.0, 45)]}),
    ]
    category = figures(measured)["a"]
    plain = (0.1 + 1 / 30) / 2
    drafted = (0.02 + 1 / 30) / 2
    assert category["speedup"] == pytest.approx(plain / drafted)
    assert category["acceptance_length"] == pytest.approx((5 + 2) / 2)
    assert category["answers"] == 2 and category["over_mlx_lm"] is None
    slower = {MLX_LM: [answer(10, 2.0, 10)], "DFlash": [answer(10, 0.5, 4)]}
    [category] = figures([PromptRuns(prompt(2, "b"), slower)]).values()
    assert category["over_mlx_lm"] == pytest.approx(4) and category["speedup"] is None
    nothing = {PLAIN: [answer(0, 0, 0)], "DFlash": [answer(0, 0, 0)]}
    category = figures([PromptRuns(prompt(0), nothing)])["a"]
    assert category["speedup"] is None and category["acceptance_length"] is None


def test_the_command_measures_by_a_protocol(tmp_path):
    rows = [json.dumps({"question": f"What is {i} plus 4?"}) for i in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    options = ["bench", "--suite", "gsm8k", "--data", tmp_path, "--protocol", "zlab"]
    done = run(*options, "--limit", "2", "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    protocol = content["protocol_figures"]["gsm8k"]
    assert content["max_tokens"] == 8 and content["repeats"] == 1 and protocol["answers"] == 2
    assert protocol["acceptance_length"] >= 1 and protocol["speedup"] > 0
    assert run("bench", "--suite", "gsm8k", "--data", tmp_path / "no").returncode == 1

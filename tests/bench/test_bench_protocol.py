"""Measuring as a paper does: its prompts, its means; suites from a folder of one's own."""

import json
from random import Random

import pytest
from program import run

from dflash_mlx.bench.datasets import (
    BenchPrompt,
    choose_protocol_prompts,
    local_files,
    suite_prompts,
)
from dflash_mlx.bench.results import MLX_LM, PLAIN, PromptRuns, run_content
from dflash_mlx.errors import DataError
from dflash_mlx.events import Result, Stats
from dflash_mlx.loading.hub import Hub

NOBODY = Hub(offline=True)


def prompt(number: int, category: str = "a") -> BenchPrompt:
    return BenchPrompt(category, ({"role": "user", "content": str(number)},))


def answer(tokens: int, seconds: float, rounds: int) -> Result:
    stats = Stats(output_tokens=tokens and 1 + tokens, decode_seconds=seconds, rounds=rounds)
    return Result("", [0] * tokens, "length", stats)


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
    found = figures(measured)["a"]
    plain, drafted = (0.1 + 1 / 30) / 2, (0.02 + 1 / 30) / 2
    assert found["speedup"] == pytest.approx(plain / drafted)
    assert found["acceptance_length"] == pytest.approx((5 + 2) / 2)
    assert found["answers"] == 2 and found["over_mlx_lm"] is None
    slower = {MLX_LM: [answer(10, 2.0, 10)], "DFlash": [answer(10, 0.5, 4)]}
    [found] = figures([PromptRuns(prompt(2, "b"), slower)]).values()
    assert found["over_mlx_lm"] == pytest.approx(4) and found["speedup"] is None
    nothing = {PLAIN: [answer(0, 0, 0)], "DFlash": [answer(0, 0, 0)]}
    found = figures([PromptRuns(prompt(0), nothing)])["a"]
    assert found["speedup"] is None and found["acceptance_length"] is None


@pytest.mark.parametrize(
    ("suite", "file", "row"),
    [
        ("gsm8k", "gsm8k_test.jsonl", {"question": "How\u2028many?"}),
        ("mt-bench", "mt_bench.jsonl", {"turns": ["How\u2028many?", "And now?"]}),
        ("mbpp", "mbpp.jsonl", {"text": "How\u2028many?", "task_id": 2}),
        ("math500", "test.jsonl", {"problem": "How\u2028many?"}),
        ("arena-hard-v2", "arena-hard-v2.jsonl", {"prompt": "How\u2028many?"}),
    ],
)
def test_suites_are_read_from_a_folder(tmp_path, suite, file, row):
    # A line separator inside of a text is no end of a line.
    line = json.dumps(row, ensure_ascii=False)
    (tmp_path / file).write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    found = suite_prompts(suite, NOBODY, tmp_path)
    assert len(found) == 2 and found[0].question.startswith("How\u2028many?")
    assert found[0].then == (("And now?",) if suite == "mt-bench" else ())


def test_published_files_go_first_and_missing_ones_are_named(tmp_path):
    with pytest.raises(DataError, match="neither test.jsonl nor livecodebench.jsonl"):
        local_files("livecodebench", tmp_path)
    for name in ("livecodebench.jsonl", "test.jsonl", "test3.jsonl"):
        (tmp_path / name).write_text("{}")
    found = [path.name for path in local_files("livecodebench", tmp_path)]
    assert found == ["test.jsonl", "test3.jsonl"]


def test_a_column_of_neither_name_is_named(tmp_path):
    (tmp_path / "mbpp.jsonl").write_text('{"question": "?"}')
    with pytest.raises(DataError, match="'prompt' or 'text'"):
        suite_prompts("mbpp", NOBODY, tmp_path)


def test_the_command_measures_by_a_protocol(tmp_path):
    rows = [json.dumps({"question": f"What is {i} plus 4?"}) for i in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    options = ["bench", "--suite", "gsm8k", "--data", tmp_path, "--protocol", "zlab"]
    done = run(*options, "--limit", "2", "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    found = content["protocol_figures"]["gsm8k"]
    assert content["max_tokens"] == 8 and content["repeats"] == 1 and found["answers"] == 2
    assert found["acceptance_length"] >= 1 and found["speedup"] > 0
    for wrong in (["--repeats", "2"], ["--prompts", tmp_path / "gsm8k.jsonl"]):
        refused = run("bench", "--protocol", "zlab", *wrong)
        assert refused.returncode == 2 and "--protocol" in refused.stderr
    assert run("bench", "--suite", "gsm8k", "--data", tmp_path / "no").returncode == 1

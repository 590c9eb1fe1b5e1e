"""The benchmark's parts: files of prompts, the order of runs, differences, and summaries."""

import json

import pytest
import tinymodels
from oracle import Oracle

from dflash_mlx.bench.datasets import BenchPrompt, read_prompts
from dflash_mlx.bench.measure import Comparison, measure_all, next_logits, run_mlx_lm
from dflash_mlx.bench.results import Difference, PromptRuns, run_content
from dflash_mlx.errors import DataError
from dflash_mlx.events import Result, Stats
from dflash_mlx.loop import generate
from dflash_mlx.policy.draft_policy import DraftPolicy

PROMPT = [5, 40, 80, 13]
METHODS = ["plain", "DFlash", "mlx-lm"]
SUM_PROMPT = BenchPrompt("sums", ({"role": "user", "content": "what is 37 + 48?"},), "85")


def result(tokens: list[int], seconds: float = 1.0, text: str = "") -> Result:
    """A result of two steps, of which the first accepted no draft."""
    stats = Stats(output_tokens=len(tokens), rounds=2, decode_seconds=seconds)
    stats.accepted_per_round = [0, len(tokens) - 3]
    return Result(text, tokens=tokens, finish_reason="length", stats=stats)


def comparison_of(plain: list[Result], drafted: list[Result]) -> Comparison:
    """A comparison with given results, without running anything."""
    return Comparison(tinymodels.target(), None, PROMPT, runs={"plain": plain, "drafted": drafted})


INVALID_ROWS = [
    [],
    {},
    {"prompt": ""},
    {"prompt": 3},
    {"prompt": "a", "messages": []},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": ["hi"]},
    {"prompt": "a", "category": 1},
    {"prompt": "a", "answer": 1},
]


def test_a_file_of_prompts_is_read(tmp_path):
    """Empty lines are skipped, and a line separator in a text does not end a line."""
    chat = [{"role": "user", "content": "a\u2028b"}]
    rows = [{"prompt": "hi"}, {"messages": chat, "category": "chat", "answer": "yo"}]
    file = tmp_path / "prompts.jsonl"
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text(lines + "\n", encoding="utf-8")
    assert read_prompts(file) == [
        BenchPrompt("prompts", ({"role": "user", "content": "hi"},)),
        BenchPrompt("chat", tuple(chat), "yo"),
    ]


@pytest.mark.parametrize("line", ["{", *map(json.dumps, INVALID_ROWS)])
def test_the_error_for_an_invalid_line_names_file_and_line(line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(DataError, match="^[^\n]*prompts.jsonl, line 2: [^\n]*$"):
        read_prompts(file)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"\n\n"])
def test_the_error_for_a_missing_empty_or_binary_file_names_it(content, tmp_path):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match="prompts.jsonl: "):
        read_prompts(file)


@pytest.mark.parametrize("p", [0, 0.5, 1])
def test_a_comparison_runs_plain_drafted_and_mlx_lms_decoding(p):
    target = tinymodels.target()
    answer = tinymodels.greedy(target, PROMPT, 24)
    comparison = Comparison(
        target, drafter=None, prompt=PROMPT, settings={"max_tokens": 24}, drafting={"block_size": 8}
    )
    for _ in range(3):
        comparison.drafter = Oracle(PROMPT, answer=answer, vocab_size=target.vocab_size, p=p)
        comparison.run("plain", "Oracle")
    comparison.run("mlx-lm")
    speeds = sorted(run.stats.tokens_per_second for run in comparison.runs["plain"])
    assert comparison.speed("plain") == speeds[1]
    assert [run.tokens for run in comparison.runs["Oracle"]] == [answer] * 3
    assert comparison.first_difference is None and comparison.speedup > 0
    assert comparison.differences() == {"plain": None, "Oracle": None, "mlx-lm": None}
    for runs in comparison.runs.values():
        assert all(run.stats.tokens_per_second > 0 < run.stats.peak_bytes for run in runs)
        assert all(0 < run.stats.first_token_seconds for run in runs)


def test_the_order_of_methods_is_reversed_in_every_second_repeat(monkeypatch):
    order = []
    monkeypatch.setattr(Comparison, "_run", lambda self, method: order.append(method))
    comparison = Comparison(tinymodels.target(), None, PROMPT)
    for _ in range(3):
        comparison.run("plain", "drafted")
    assert order == ["plain", "drafted", "drafted", "plain", "plain", "drafted"]
    order.clear()
    comparison.runs.clear()
    comparison.run_all()
    comparison.trees = {"tree_budget": 8}
    comparison.run_all()
    first_repeat = ["plain", "drafted", "mlx-lm"]
    second_repeat = ["mlx-lm", "DDTree", "drafted", "plain"]  # with trees as well
    assert order == first_repeat + second_repeat


def test_a_difference_has_its_position_tokens_and_logit_gap():
    """One run has another token than the plain run, and one ends earlier."""
    target = tinymodels.target()
    answer = tinymodels.greedy(target, PROMPT, 6)
    wrong = [*answer[:4], (answer[4] + 1) % target.vocab_size, answer[5]]
    comparison = comparison_of([result(answer)], [result(answer), result(wrong)])
    comparison.runs["mlx-lm"] = [result(answer[:3])]
    differences = comparison.differences()
    logits = next_logits(target, [*PROMPT, *answer[:4]])
    gap = logits[answer[4]].item() - logits[wrong[4]].item()
    assert gap > 0 and differences["plain"] is None
    assert differences["drafted"] == Difference(
        4, plain=answer[4], other=wrong[4], logit_gap=pytest.approx(gap)
    )
    assert differences["mlx-lm"] == Difference(3, plain=answer[3], other=None, logit_gap=None)
    assert comparison.first_difference == 3
    comparison.settings = {"temperature": 1.0, "seed": 0}
    assert "mlx-lm" not in comparison.differences()


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_mlx_lms_decoding_gives_max_tokens_tokens(max_tokens):
    target = tinymodels.target()
    run = run_mlx_lm(target, PROMPT, {"max_tokens": max_tokens})
    assert run.tokens == tinymodels.greedy(target, PROMPT, max_tokens)


def test_every_turn_of_every_prompt_is_measured_with_every_method():
    two_turns = BenchPrompt("sums", SUM_PROMPT.messages, then=("and 1 more?",))
    pair = tinymodels.target(), tinymodels.random_drafter()
    drafting = {"block_size": 4}
    single, first, second = measure_all(
        *pair, [SUM_PROMPT, two_turns], 2, {"max_tokens": 10}, drafting=drafting
    )
    assert {name: len(runs) for name, runs in single.runs.items()} == dict.fromkeys(METHODS, 2)
    assert single.differences == dict.fromkeys(METHODS)
    contents = [message["content"] for message in second.prompt.messages]
    assert contents == [first.prompt.question, first.runs["plain"][0].text, "and 1 more?"]


@pytest.mark.parametrize("method", ["drafting", "trees"])
def test_repeats_of_a_prompt_start_with_the_policy_as_it_was_before_the_prompt(method):
    """Otherwise later repeats would be drafted by a policy that has already seen the answer."""
    estimates = []  # what the policy knows at the start of each run

    class RecordingPolicy(DraftPolicy):
        def estimates_at(self, temperature):
            estimates.append(sum(super().estimates_at(0.0).path_probs))
            return super().estimates_at(temperature)

    pair = tinymodels.target(), tinymodels.random_drafter()
    policy = RecordingPolicy(8, trees=method == "trees")
    drafting = {method: {"policy": policy}}
    list(measure_all(*pair, [SUM_PROMPT, SUM_PROMPT], 2, {"max_tokens": 16}, **drafting))
    initial = sum(DraftPolicy(8).estimates_at(0.0).path_probs)
    _warm_up, *first_prompt = estimates[:3]
    second_prompt = estimates[3:]
    assert first_prompt == [initial, initial]
    assert second_prompt == [second_prompt[0]] * 2
    assert second_prompt[0] < initial, "the policy has learned nothing from the first prompt"


def test_sampled_runs_are_compared_with_plain_decoding_only():
    """mlx-lm samples with another generator, so its text differs."""
    settings = {"max_tokens": 10, "temperature": 1.0, "seed": 3}
    pair = tinymodels.target(), tinymodels.random_drafter()
    [measured] = measure_all(*pair, [SUM_PROMPT], 1, settings, trees={"tree_budget": 8})
    assert measured.differences == {"plain": None, "DFlash": None, "DDTree": None}
    assert max(measured.runs["DDTree"][0].stats.widths) == 8
    plain = generate(pair[0], None, list(SUM_PROMPT.messages), **settings)
    assert measured.runs["DFlash"][0].tokens == plain.tokens
    assert measured.runs["mlx-lm"][0].tokens != tinymodels.greedy(pair[0], PROMPT, 10)


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_measured():
    long = BenchPrompt("sums", ({"role": "user", "content": "x" * 100_000},), source="a.jsonl, 7")
    measured = measure_all(
        tinymodels.target(),
        drafter=None,
        prompts=[SUM_PROMPT, long],
        repeats=1,
        settings={"max_tokens": 4},
    )
    with pytest.raises(DataError, match="^a.jsonl, 7: .* tokens"):
        next(measured)


def measured_as(prompt, drafted: Result, **differences) -> PromptRuns:
    """A prompt whose plain run took three seconds."""
    runs = {"plain": [result([1] * 6, 3.0)], "DFlash": [drafted]}
    return PromptRuns(prompt, runs, dict.fromkeys(runs) | differences)


def test_categories_and_the_overall_row_summarize_their_prompts():
    right = result([1] * 6, 1.0, " 85\n")
    wrong = result([1] * 5 + [2], 1.0, "86")
    difference = Difference(5, plain=1, other=2, logit_gap=0.25)
    measured = [
        measured_as(SUM_PROMPT, right),
        measured_as(BenchPrompt("tales", SUM_PROMPT.messages), right),
        measured_as(SUM_PROMPT, wrong, DFlash=difference),
    ]
    content = run_content({}, measured)
    sums, tales = content["categories"]
    assert (sums["category"], sums["prompts"]) == ("sums", 2)
    assert sums["methods"]["DFlash"]["identical"] == 1
    assert (sums["exact"], sums["with_answer"]) == (1, 2)
    assert (tales["exact"], tales["with_answer"]) == (None, 0)
    overall = content["overall"]
    drafted = overall["methods"]["DFlash"]
    assert drafted["acceptance_length"] == 2.5 and drafted["accepted"] == {0: 3, 3: 3}
    assert drafted["speedup"] == dict.fromkeys(("low", "median", "high"), 3.0)
    assert overall["output_tokens"] == 18 and drafted["identical"] == 2
    assert content["differences"] == [
        {
            "category": "sums",
            "prompt": "what is 37 + 48?",
            "method": "DFlash",
            "token": 5,
            "plain": 1,
            "other": 2,
            "logit_gap": 0.25,
        }
    ]

"""The benchmark's parts: prompts, turns, verdicts, sums, and the bare forwards of a round."""

import json

import pytest
import tinymodels
from oracle import Oracle

from dflash_mlx.bench.datasets import BenchPrompt, limit_per_category, read_prompts
from dflash_mlx.bench.measure import Comparison, first_difference, run_mlx_lm, warm_up
from dflash_mlx.bench.overhead import raw_forwards
from dflash_mlx.bench.report import Measured, by_category, differences, measure, summarize
from dflash_mlx.drafter.network import DFlash
from dflash_mlx.errors import DataError
from dflash_mlx.events import Result, Stats
from dflash_mlx.loop import generate

PROMPT = [5, 40, 80, 13]
ASKED = BenchPrompt("sums", ({"role": "user", "content": "what is 37 + 48?"},), "85")


def result(tokens: list[int], seconds: float = 1.0, text: str = "") -> Result:
    stats = Stats(output_tokens=len(tokens), rounds=2, decode_seconds=seconds)
    return Result(text, tokens, "length", stats)


def compared(plain: list[Result], drafted: list[Result]) -> Comparison:
    """A comparison whose runs are made up."""
    made_up = Comparison(tinymodels.target(), None, PROMPT)
    made_up.plain, made_up.drafted = plain, drafted
    return made_up


def test_prompts_of_a_file(tmp_path):
    chat = [{"role": "user", "content": "a\u2028b"}]
    rows = [{"prompt": "hi"}, {"messages": chat, "category": "chat", "answer": "yo"}]
    file = tmp_path / "prompts.jsonl"
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text(lines + "\n", encoding="utf-8")
    assert read_prompts(file) == [
        BenchPrompt("prompts", ({"role": "user", "content": "hi"},)),
        BenchPrompt("chat", tuple(chat), "yo"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": "a", "messages": []}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": ["hi"]}',
        '{"prompt": "a", "category": 1}',
        '{"prompt": "a", "answer": 1}',
    ],
)
def test_a_bad_line_is_named(line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(DataError, match="prompts.jsonl, line 2: ") as error:
        read_prompts(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"\n\n"])
def test_a_bad_file_is_named(content, tmp_path):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match="prompts.jsonl: "):
        read_prompts(file)


def test_the_limit_counts_by_category():
    prompts = [BenchPrompt(category, ()) for category in "abaab"]
    assert [p.category for p in limit_per_category(prompts, 2)] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    "runs, place",
    [
        ([], None),
        ([[1, 2, 3]], None),
        ([[1, 2, 3], [1, 0, 3]], 1),
        ([[1, 2]], 2),
        ([[1, 2, 3, 4]], 3),
        ([[]], 0),
    ],
)
def test_first_difference(runs, place):
    assert first_difference(runs, [1, 2, 3]) == place


@pytest.mark.parametrize("p", [0, 0.5, 1])
def test_drafted_runs_are_compared_with_plain_and_mlx_lm(p):
    target = tinymodels.target()
    answer = tinymodels.greedy(target, PROMPT, 40)
    comparison = Comparison(target, None, PROMPT, max_tokens=40, block_size=8)
    for _ in range(3):
        comparison.drafter = Oracle(PROMPT, answer, target.vocab_size, p)
        comparison.run_pair()
    comparison.run_mlx_lm()
    assert [run.tokens for run in comparison.drafted] == [answer] * 3
    assert comparison.first_difference is None
    assert comparison.first_difference_mlx_lm is None
    assert comparison.plain_speed > 0 and comparison.drafted_speed > 0
    assert comparison.mlx_lm_speed and comparison.mlx_lm_speed > 0


def test_pairs_change_their_order():
    order = []

    class Listed(Comparison):
        def run_plain(self):
            order.append("plain")
            self.plain.append(result([1]))

        def run_drafted(self):
            order.append("drafted")

    comparison = Listed(tinymodels.target(), None, PROMPT)
    for _ in range(3):
        comparison.run_pair()
    assert order == ["plain", "drafted", "drafted", "plain", "plain", "drafted"]


def test_a_wrong_token_in_any_run_shows():
    right, wrong = result([1, 2, 3]), result([1, 9, 3])
    assert compared([right, right], [right, right]).first_difference is None
    assert compared([right, right], [right, wrong]).first_difference == 1
    assert compared([right, wrong], [right, right]).first_difference == 1


def test_speeds_are_medians():
    plain = [result([1] * 4, seconds) for seconds in (1, 2, 100)]
    drafted = [result([1] * 4, seconds) for seconds in (0.5, 1, 50)]
    assert compared(plain, drafted).plain_speed == 2
    assert compared(plain, drafted).speedup == 2


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_mlx_lm_runs_as_far_as_asked(max_tokens):
    target = tinymodels.target()
    run = run_mlx_lm(target, PROMPT, max_tokens)
    assert run.tokens == tinymodels.greedy(target, PROMPT, max_tokens)


def test_mlx_lm_keeps_the_token_that_ends_the_text():
    target = tinymodels.target()
    answer = tinymodels.greedy(target, PROMPT, 12)
    ending = tinymodels.ending_at(target, answer[5])
    expected = answer[: answer.index(answer[5]) + 1]
    assert run_mlx_lm(ending, PROMPT, 12).tokens == expected
    assert generate(ending, None, PROMPT, max_tokens=12).tokens == expected


class Listening(DFlash):
    """A network that writes down the shapes it was called with."""

    def __call__(self, block_embeddings, taps, cache):
        self.calls.append((block_embeddings.shape[1], taps.shape[1], cache[0].offset))
        return super().__call__(block_embeddings, taps, cache)


def test_bare_forwards_repeat_the_rounds_shapes():
    target = tinymodels.target()
    drafter = tinymodels.random_drafter()
    drafter.__class__ = Listening
    drafter.calls = []
    drafted = generate(target, drafter, PROMPT, max_tokens=20, block_size=6)
    real, drafter.calls = drafter.calls, []
    raw = raw_forwards(target, drafter, PROMPT, drafted, 20)
    assert drafter.calls == real
    assert raw.rounds == drafted.stats.rounds
    assert raw.draft_seconds > 0 and raw.verify_seconds > 0
    whole = raw.draft_seconds + raw.verify_seconds + raw.rounds * 0.25
    assert raw.overhead(whole) == pytest.approx(0.25)


def test_warm_up_leaves_no_trace():
    target, drafter = tinymodels.target(), tinymodels.random_drafter()
    before = generate(target, drafter, PROMPT, max_tokens=8).tokens
    warm_up(target, drafter, 4)
    warm_up(target, None)
    assert generate(target, drafter, PROMPT, max_tokens=8).tokens == before


def test_measure_a_prompt():
    measured = measure(tinymodels.target(), tinymodels.random_drafter(), ASKED, 10, 4, repeats=2)
    runs = measured.runs
    assert [len(runs.plain), len(runs.drafted), len(runs.mlx_lm)] == [2, 2, 2]
    assert runs.first_difference is None and runs.first_difference_mlx_lm is None
    assert measured.exact is False and measured.overhead_seconds is not None


def test_rows_sum_up_their_prompts():
    right, wrong = result([1] * 6, 1.0, " 85\n"), result([1] * 5 + [2], 1.0, "86")
    slow = [result([1] * 6, 3.0)]
    measured = [
        Measured(ASKED, compared(slow, [right]), 0.002),
        Measured(BenchPrompt("tales", ASKED.messages), compared(slow, [right]), 0.004),
        Measured(ASKED, compared(slow, [wrong]), 0.006),
    ]
    sums, tales = by_category(measured)
    assert (sums.category, sums.prompts, sums.identical) == ("sums", 2, 1)
    assert (sums.exact, sums.with_answer, tales.exact, tales.with_answer) == (1, 2, None, 0)
    whole = summarize("all", measured)
    assert whole.acceptance_length == 3.0 and whole.output_tokens == 18
    assert whole.speedup == pytest.approx(3.0)
    assert whole.overhead_ms_per_round == pytest.approx(4.0)
    assert whole.mlx_lm_tokens_per_second is None and whole.identical_to_mlx_lm is None
    assert differences(measured) == [{"category": "sums", "prompt": "what is 37 + 48?", "token": 5}]

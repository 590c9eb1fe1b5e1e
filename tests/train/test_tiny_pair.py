"""The embedded pair is what its model card promises: small, identical, quick, and right."""

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest
from pair_worker import PER_CATEGORY, read_prompts

import dflash_mlx as dm
from dflash_mlx.loop import generate

TINY = Path(str(files("dflash_mlx").joinpath("tiny")))
WORKER = Path(__file__).parents[1] / "helpers" / "pair_worker.py"
CATEGORIES = {"arithmetic", "counting", "units", "code", "story", "qa", "chat"}
PROBLEMS = ["arithmetic", "counting", "units"]  # with one right answer

pytestmark = pytest.mark.skipif(
    not (TINY / "drafter" / "model.safetensors").is_file(),
    reason="THE EMBEDDED PAIR IS MISSING: train it with recipes/train_tiny.sh",
)


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    """Whole answers, by a process of its own: on the fast BLAS, as people run it."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(TINY)],
        capture_output=True,
        text=True,
        cwd=WORKER.parent,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_embedded_files_are_small_and_complete():
    sizes = [path.stat().st_size for path in TINY.rglob("*") if path.is_file()]
    assert sum(sizes) <= 9_000_000
    card = (TINY / "README.md").read_text(encoding="utf-8")
    assert all(category in card for category in CATEGORIES)
    lines = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["category"] for record in records} == CATEGORIES
    assert all(record["answer"].strip() for record in records)
    assert all(("prompt" in record) != ("messages" in record) for record in records)
    assert any(len(record.get("messages", ())) > 1 for record in records)  # turns before the last
    asked = [json.dumps(record.get("messages") or record["prompt"]) for record in records]
    assert len(set(asked)) == len(asked) >= 60


def test_mlx_lm_loads_the_target():
    from mlx_lm import load as mlx_lm_load

    theirs, tokenizer = mlx_lm_load(str(TINY / "target"))
    ours = dm.load_target("tiny")
    theirs.set_dtype(mx.float32)
    question = [{"role": "user", "content": "What is 47 + 38?"}]
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert tokens == ours.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert tokenizer.eos_token_ids == ours.tokenizer.eos_token_ids
    logits = [model(mx.array([tokens])) for model in (theirs, ours.model)]
    assert mx.allclose(*logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bits", [{}, {"target_bits": 8}, {"target_bits": 4, "draft_bits": 4}])
def test_it_loads_by_name_and_answers(bits):
    target, drafter = dm.load("tiny", **bits)
    result = generate(
        target, drafter, [{"role": "user", "content": "What is 47 + 38?"}], max_tokens=100
    )
    assert result.finish_reason == "stop"
    assert bits or "85" in result.text  # quantized it may be wrong
    assert result.stats.acceptance_length > 3
    assert max(drafter.tap_layers) < target.num_layers - 1  # it is not computed for a whole prompt


@pytest.mark.parametrize("drafted", [False, True])
def test_a_text_is_continued_with_its_space_if_that_is_asked_for(drafted):
    target, drafter = dm.load("tiny")
    for prompt in ("Ones: 7 +", "Let us add 4", "Hello there"):
        ask = partial(dm.generate, target, drafter if drafted else None, prompt, max_tokens=6)
        whole = target.tokenizer.decode([*target.tokenizer.encode(prompt), *ask().tokens])
        assert prompt + ask(continues=True).text == whole
        assert ask().text == whole[len(prompt) :].removeprefix(" ")


def test_its_second_drafter_accepts_more():
    target, dflash = dm.load("tiny")
    _, dflash2 = dm.load("tiny", draft="tiny-dflash2")
    assert type(dflash2).__name__ == "DFlash2"
    rounds = [0, 0]
    for record in read_prompts(TINY)[::14]:
        first, second = (generate(target, each, record["messages"]) for each in (dflash, dflash2))
        assert first.tokens == second.tokens
        rounds = [rounds[0] + first.stats.rounds, rounds[1] + second.stats.rounds]
    assert rounds[1] < rounds[0]


def acceptance_length(answers: Iterable[dict]) -> float:
    answers = list(answers)
    return sum(a["tokens"] for a in answers) / sum(a["rounds"] for a in answers)


@pytest.mark.slow
@pytest.mark.xdist_group("tiny pair, answers")
class TestAnswers:
    """What the pair says to ten prompts of each category, to the end of each answer."""

    def test_drafted_answers_are_mlx_lms(self, answers):
        assert len(answers) == len(CATEGORIES) * PER_CATEGORY
        assert all(answer["as mlx-lm's"] for answer in answers)

    def test_acceptance_length(self, answers):
        assert acceptance_length(answers) >= 7.0

    @pytest.mark.parametrize("category", sorted(CATEGORIES))
    def test_acceptance_length_by_category(self, answers, category):
        assert acceptance_length(a for a in answers if a["category"] == category) >= 4.0

    @pytest.mark.parametrize("category", PROBLEMS)
    def test_answers_to_problems_are_right(self, answers, category):
        exact = [a["exact"] for a in answers if a["category"] == category]
        assert len(exact) >= 9 and sum(exact) / len(exact) >= 0.85

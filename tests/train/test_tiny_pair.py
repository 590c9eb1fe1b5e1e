"""The embedded pair has what its model card promises: small files, mlx-lm's texts, and speed."""

import json
import subprocess
import sys
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
    """Complete answers, from another process that uses the fast BLAS, as users do."""
    result = subprocess.run(
        [sys.executable, str(WORKER), str(TINY)],
        capture_output=True,
        text=True,
        cwd=WORKER.parent,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


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
    assert any(len(record.get("messages", ())) > 1 for record in records)  # earlier turns
    prompts = [json.dumps(record.get("messages") or record["prompt"]) for record in records]
    assert len(set(prompts)) == len(prompts) >= 60


def test_mlx_lm_loads_the_target_and_computes_the_same_logits():
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
def test_the_pair_loads_by_name_and_answers(bits):
    target, drafter = dm.load("tiny", **bits)
    result = generate(
        target, drafter, [{"role": "user", "content": "What is 47 + 38?"}], max_tokens=100
    )
    assert result.finish_reason == "stop"
    if not bits:  # a quantized target may answer wrongly
        assert "85" in result.text
    assert result.stats.acceptance_length > 3
    # The last layer is not tapped, because it is computed for the last row of a prompt only.
    assert max(drafter.tap_layers) < target.num_layers - 1


@pytest.mark.parametrize("drafted", [False, True])
def test_the_leading_space_of_a_text_is_kept_only_with_continues(drafted):
    target, drafter = dm.load("tiny")
    for prompt in ("Ones: 7 +", "Let us add 4", "Hello there"):
        generate_text = partial(
            dm.generate, target, drafter if drafted else None, prompt, max_tokens=6
        )
        result = generate_text()
        whole_text = target.tokenizer.decode([*target.tokenizer.encode(prompt), *result.tokens])
        assert prompt + generate_text(continues=True).text == whole_text
        assert result.text == whole_text[len(prompt) :].removeprefix(" ")


def test_the_pairs_dflash2_drafter_needs_fewer_steps_than_its_dflash_drafter():
    target, dflash = dm.load("tiny")
    _, dflash2 = dm.load("tiny", draft="tiny-dflash2")
    assert type(dflash2).__name__ == "DFlash2"
    dflash_steps = 0
    dflash2_steps = 0
    for record in read_prompts(TINY)[::14]:
        first = generate(target, dflash, record["messages"])
        second = generate(target, dflash2, record["messages"])
        assert first.tokens == second.tokens
        dflash_steps += first.stats.rounds
        dflash2_steps += second.stats.rounds
    assert dflash2_steps < dflash_steps


def acceptance_length(answers: list[dict]) -> float:
    """Tokens per step."""
    tokens = sum(answer["tokens"] for answer in answers)
    return tokens / sum(answer["rounds"] for answer in answers)


@pytest.mark.slow
@pytest.mark.xdist_group("tiny pair, answers")
class TestAnswers:
    """The pair's complete answers to ten prompts of each category."""

    def test_drafted_answers_are_mlx_lms(self, answers):
        assert len(answers) == len(CATEGORIES) * PER_CATEGORY
        assert all(answer["as mlx-lm's"] for answer in answers)

    def test_the_acceptance_length_is_at_least_7(self, answers):
        assert acceptance_length(answers) >= 7.0

    @pytest.mark.parametrize("category", sorted(CATEGORIES))
    def test_the_acceptance_length_of_every_category_is_at_least_4(self, answers, category):
        of_category = [answer for answer in answers if answer["category"] == category]
        assert acceptance_length(of_category) >= 4.0

    @pytest.mark.parametrize("category", PROBLEMS)
    def test_answers_to_problems_are_right(self, answers, category):
        exact = [answer["exact"] for answer in answers if answer["category"] == category]
        assert len(exact) >= 9 and sum(exact) / len(exact) >= 0.85

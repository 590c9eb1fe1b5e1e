"""Answers for training, written in batches: they are plain decoding's, and resumed from a file."""

import json
from copy import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tinymodels
from tiny_pair.own import drawn
from tinymodels import END, LINES

from dflash_mlx.errors import DataError, OutputError, PromptError
from dflash_mlx.targets import Target
from dflash_mlx.train.answer_writer import (
    AnswerSettings,
    answer_all,
    append,
    collect_samples,
    complete_prompts,
)
from dflash_mlx.train.recipe import Recipe
from dflash_mlx.train.synthesize import turn_start, user_header, write_turns

SMALL = AnswerSettings(max_tokens=6, rows=2, chunk=2)


@pytest.fixture(scope="module")
def target() -> Target:
    return tinymodels.target()


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    return [target.tokenizer.encode(line)[: 4 + 3 * i] for i, line in enumerate(LINES)] + [[5, 6]]


def test_answers_are_those_of_plain_decoding(target, prompts):
    answers = complete_prompts(target, prompts, AnswerSettings(max_tokens=8, rows=3, chunk=9))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.answer) == tinymodels.greedy(target, prompt, 8)
        assert answer.prompt == tuple(prompt)


class ShapeRecorder(nn.Module):
    """A model that records the shapes of its inputs, padding included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layers = model.layers
        self.shapes = []

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.shapes.append(ids.shape)
        return self.model(ids, cache=cache)


def test_prompts_of_similar_length_are_read_together(target):
    """Eight at a time. In the given order, all would be padded to the length of the longest."""
    recorder = ShapeRecorder(target.model)
    target = copy(target)
    target.model = recorder
    prompts = [[5] * (30 if i % 2 else 3) for i in range(16)]
    answers = complete_prompts(target, prompts, AnswerSettings(max_tokens=2, rows=16, chunk=16))
    assert [list(answer.prompt) for answer in answers] == prompts
    tokens_read = sum(rows * width for rows, width in recorder.shapes if width > 1)
    assert tokens_read <= 8 * 29 + 8 * 2  # all tokens of the prompts but the last ones


def test_an_answer_includes_the_token_that_ended_it(prompts):
    plain = tinymodels.greedy(tinymodels.target(), prompts[0], 8)
    ending = tinymodels.ending_at(tinymodels.target(), plain[3])
    [answer] = complete_prompts(ending, prompts[:1], AnswerSettings(max_tokens=8))
    assert list(answer.answer) == plain[: plain.index(plain[3]) + 1] and answer.ended
    start = len(prompts[0])
    assert answer.sample.answers == ((start, start + len(answer.answer)),)


def test_a_file_of_answers_that_was_cut_anywhere_is_completed_to_the_same_bytes(
    tmp_path, target, prompts
):
    """Greedy, and with a sampler whose seed follows from the position in the file."""

    def greedy(start):
        return None

    for sampler_at in (greedy, drawn):
        complete = tmp_path / f"{sampler_at.__name__}.jsonl"
        cut = tmp_path / f"{sampler_at.__name__} cut.jsonl"
        answers = answer_all(
            target, prompts=prompts, path=complete, settings=SMALL, sampler_at=sampler_at
        )
        content = complete.read_bytes()
        for length in (0, 10, len(content) // 2, int(0.9 * len(content)), len(content)):
            cut.write_bytes(content[:length])
            completed = answer_all(
                target, prompts=prompts, path=cut, settings=SMALL, sampler_at=sampler_at
            )
            assert completed == answers
            assert cut.read_bytes() == content


def test_sampled_answers_to_the_same_prompt_differ(tmp_path, target, prompts):
    rows = answer_all(
        target,
        prompts=[prompts[0]] * 4,
        path=tmp_path / "a.jsonl",
        settings=SMALL,
        sampler_at=drawn,
    )
    assert len({row.answer for row in rows}) == 4


def test_prompts_with_an_answer_in_the_file_are_not_answered_again(tmp_path, target, prompts):
    path = tmp_path / "a.jsonl"
    first_progress = []
    answer_all(target, prompts=prompts, path=path, settings=SMALL, progress=first_progress.append)
    assert first_progress[-1].done == len(prompts)
    second_progress = []
    answer_all(target, prompts=prompts, path=path, settings=SMALL, progress=second_progress.append)
    assert [(event.done, event.tokens) for event in second_progress] == [(len(prompts), 0)]
    with pytest.raises(DataError, match="other prompts"):
        answer_all(target, prompts=prompts[::-1], path=path, settings=SMALL)


def test_a_full_disk_is_an_error_of_one_line():
    with pytest.raises(OutputError, match="the disk is full") as caught:
        append(Path("/dev/full"), iter([{"a": 1}]))
    assert "\n" not in str(caught.value)


def test_the_user_header_is_the_text_of_the_template_around_a_users_message(target):
    assert user_header(target) == ("user: ", "\nassistant:")


def test_synthesized_turns_are_resumed_from_a_file_and_depend_on_the_seed(tmp_path, target):
    settings = AnswerSettings(max_tokens=12, rows=4, chunk=8)
    ending = tinymodels.ending_at(target, *range(20, 60))  # many end tokens, so that turns end

    def write(name: str, seed: int) -> list[str]:
        return write_turns(ending, count=5, path=tmp_path / name, settings=settings, seed=seed)

    turns = write("a.jsonl", seed=1)
    assert len(set(turns)) == 5 and all(len(turn.split()) > 1 for turn in turns)
    first_line = (tmp_path / "a.jsonl").read_text().splitlines()[0]
    (tmp_path / "b.jsonl").write_text(first_line + "\n")
    assert write("b.jsonl", seed=1) == turns
    assert write("c.jsonl", seed=2) != turns
    assert all(END not in turn for turn in turns)


def test_a_base_model_synthesizes_beginnings_of_texts_and_continues_them(
    tmp_path, target, monkeypatch
):
    """It has no chat template, and needs a token that begins a text."""
    monkeypatch.setattr(target.tokenizer, "has_chat_template", False)
    with pytest.raises(PromptError, match="--keep-answers"):
        turn_start(target)
    monkeypatch.setattr(target.tokenizer._tokenizer, "bos_token", END)
    turns = write_turns(
        target, count=5, path=tmp_path / "a.jsonl", settings=AnswerSettings(rows=4, chunk=8), seed=1
    )
    recipe = Recipe(synthesize=5, max_tokens=6, rows=4)
    samples = collect_samples(
        target, work=tmp_path, recipe=recipe, turns=turns, listen=lambda event: None
    )
    prompts = {sample.tokens[: sample.answers[0][0]] for sample in samples}
    assert prompts == {tuple(target.tokenizer.encode(turn)) for turn in turns}


def test_too_few_different_turns_are_refused(tmp_path, target):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"turns": ["the same words again"]}) + "\n") * 40)
    with pytest.raises(DataError, match="1 different turns.*--synthesize 1"):
        write_turns(target, count=5, path=path, settings=SMALL)


@pytest.mark.parametrize("short", [0, 3])
def test_rows_longer_than_the_context_are_left_out_with_a_warning(target, tmp_path, short):
    """It tells their number; if too few rows are left, an error does."""
    data = tmp_path / "rows.jsonl"
    texts = [f"{i} " + "a lot of dogs " * 900 for i in range(4)]
    texts += [f"{i} quick brown foxes" for i in range(short)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = Recipe(data=data, keep_answers=True)
    message = rf"4 of {4 + short} rows are longer than the context of .* \(8,192 tokens\)"
    if not short:
        with pytest.raises(DataError, match=f"fewer than two samples.*{message}"):
            collect_samples(
                target, work=tmp_path, recipe=recipe, turns=(), listen=lambda event: None
            )
        return
    with pytest.warns(UserWarning, match=f"{message} and are left out"):
        samples = collect_samples(
            target, work=tmp_path, recipe=recipe, turns=(), listen=lambda event: None
        )
    assert len(samples) == short

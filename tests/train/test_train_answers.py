"""Answers in batches: what plain decoding says, kept chunk by chunk, taken up where they ended."""

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


class Widths(nn.Module):
    """A model that remembers how many tokens it was given at once, padding included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layers = model.layers
        self.seen = []

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        self.seen.append(ids.shape)
        return self.model(ids, cache=cache)


def test_prompts_of_like_length_are_read_together(target):
    """Eight at a time; in the order given, each eight would be as wide as the longest."""
    target = copy(target)
    target.model = watched = Widths(target.model)
    prompts = [[5] * (30 if i % 2 else 3) for i in range(16)]
    answers = complete_prompts(target, prompts, AnswerSettings(max_tokens=2, rows=16, chunk=16))
    assert [list(answer.prompt) for answer in answers] == prompts
    read = sum(rows * width for rows, width in watched.seen if width > 1)
    assert read <= 8 * 29 + 8 * 2


def test_an_answer_holds_the_token_that_ended_it(prompts):
    plain = tinymodels.greedy(tinymodels.target(), prompts[0], 8)
    ending = tinymodels.ending_at(tinymodels.target(), plain[3])
    [answer] = complete_prompts(ending, prompts[:1], AnswerSettings(max_tokens=8))
    assert list(answer.answer) == plain[: plain.index(plain[3]) + 1] and answer.ended
    start = len(prompts[0])
    assert answer.sample.answers == ((start, start + len(answer.answer)),)


def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(tmp_path, target, prompts):
    """Greedy, and with a sampler that the place in the file seeds."""
    for name, sampler_at in {"greedy": lambda start: None, "drawn": drawn}.items():
        whole = tmp_path / f"{name}.jsonl"
        part = tmp_path / f"{name} part.jsonl"
        answers = answer_all(
            target, prompts=prompts, path=whole, settings=SMALL, sampler_at=sampler_at
        )
        content = whole.read_bytes()
        for length in (0, 10, len(content) // 2, int(0.9 * len(content)), len(content)):
            part.write_bytes(content[:length])
            assert (
                answer_all(
                    target, prompts=prompts, path=part, settings=SMALL, sampler_at=sampler_at
                )
                == answers
            )
            assert part.read_bytes() == content
    same = answer_all(
        target,
        prompts=[prompts[0]] * 4,
        path=tmp_path / "a.jsonl",
        settings=SMALL,
        sampler_at=drawn,
    )
    assert len({row.answer for row in same}) == 4


def test_prompts_with_an_answer_in_the_file_are_not_answered_again(tmp_path, target, prompts):
    path = tmp_path / "a.jsonl"
    seen = []
    answer_all(target, prompts=prompts, path=path, settings=SMALL, progress=seen.append)
    assert seen[-1].done == len(prompts)
    again = []
    answer_all(target, prompts=prompts, path=path, settings=SMALL, progress=again.append)
    assert [(p.done, p.tokens) for p in again] == [(len(prompts), 0)]
    with pytest.raises(DataError, match="other prompts"):
        answer_all(target, prompts=prompts[::-1], path=path, settings=SMALL)


def test_a_full_disk_is_an_error_of_one_line():
    with pytest.raises(OutputError, match="the disk is full") as caught:
        append(Path("/dev/full"), iter([{"a": 1}]))
    assert "\n" not in str(caught.value)


def test_a_header_is_what_the_template_writes_before_a_user_speaks(target):
    assert user_header(target) == ("user: ", "\nassistant:")


def test_turns_go_on_from_a_file_and_depend_on_the_seed(tmp_path, target):
    settings = AnswerSettings(max_tokens=12, rows=4, chunk=8)
    ending = tinymodels.ending_at(target, *range(20, 60))  # so that turns end at all
    first = write_turns(ending, count=5, path=tmp_path / "a.jsonl", settings=settings, seed=1)
    assert len({*first}) == 5 and all(len(turn.split()) > 1 for turn in first)
    rounds = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "b.jsonl").write_text(rounds[0] + "\n")
    assert (
        write_turns(ending, count=5, path=tmp_path / "b.jsonl", settings=settings, seed=1) == first
    )
    assert (
        write_turns(ending, count=5, path=tmp_path / "c.jsonl", settings=settings, seed=2) != first
    )
    assert all(END not in turn for turn in first)


def test_a_base_model_opens_texts_and_continues_them(tmp_path, target, monkeypatch):
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
    opened = {sample.tokens[: sample.answers[0][0]] for sample in samples}
    assert opened == {tuple(target.tokenizer.encode(turn)) for turn in turns}


def test_too_few_different_turns_are_refused(tmp_path, target):
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"turns": ["the same words again"]}) + "\n") * 40)
    with pytest.raises(DataError, match="1 different turns.*--synthesize 1"):
        write_turns(target, count=5, path=path, settings=SMALL)


@pytest.mark.parametrize("short", [0, 3])
def test_rows_that_are_longer_than_the_context_are_counted(target, tmp_path, short):
    """Left out with a warning; if too few are left, the error says so."""
    data = tmp_path / "rows.jsonl"
    texts = [f"{i} " + "a lot of dogs " * 900 for i in range(4)]
    texts += [f"{i} quick brown foxes" for i in range(short)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = Recipe(data=data, keep_answers=True)
    said = rf"4 of {4 + short} rows are longer than the context of .* \(8,192 tokens\)"
    if not short:
        with pytest.raises(DataError, match=f"fewer than two samples.*{said}"):
            collect_samples(
                target, work=tmp_path, recipe=recipe, turns=(), listen=lambda event: None
            )
        return
    with pytest.warns(UserWarning, match=f"{said} and are left out"):
        samples = collect_samples(
            target, work=tmp_path, recipe=recipe, turns=(), listen=lambda event: None
        )
    assert len(samples) == short

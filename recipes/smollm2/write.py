"""Write the answers that the drafter learns from, chunk by chunk; a chunk that is there is kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from dflash_mlx.prompt import encode_prompt
from dflash_mlx.targets import Target
from dflash_mlx.train.answer_writer import (
    Answer,
    AnswerSettings,
    append,
    complete_prompts,
    read_answers,
    whole_lines,
)
from dflash_mlx.train.dataset import Messages, Sample
from dflash_mlx.train.features import KeptFeatures
from dflash_mlx.train.synthesize import MIN_P, TEMPERATURE, turn_start, write_turns

from .answers import Writer
from .prompts import OPENINGS, Turns, conversations

CHUNK = 512  # conversations that begin in a chunk
# User turns that the target writes, for each conversation: more than conversations take.
OWN = 0.25  # from nothing
BEGUN = 0.2  # of each kind in `OPENINGS`, from a few given words
TURN_TOKENS = 96  # the most of a user turn
ANSWER_TOKENS = 384  # the most of an answer
AFTER_TOKENS = 320  # a conversation of more tokens does not go on: long contexts cost most


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def write_chunks(
    target: Target,
    layers: Sequence[int],
    data: Path,
    work: Path,
    seed: int,
    count: int,
    rows: int,
) -> list[Sample]:
    """The answered conversations of `count` chunks of a seed; `work`/features keeps their features.

    A conversation's second turn is asked in the chunk after its first.

    Args:
        layers: the layers to tap.
        data: the folder of the public training splits.
        work: the folder for the features, and for the chunks of each seed.
        rows: answers written together.
    """
    folder = work / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    settings = AnswerSettings(TURN_TOKENS, rows, 2 * rows)
    own_turns = write_turns(
        target, int(OWN * CHUNK * count), folder / "turns.jsonl", settings, seed
    )
    begun = {
        kind: begin_turns(
            target, openings, int(BEGUN * CHUNK * count), folder / f"{kind}.jsonl", settings, seed
        )
        for kind, openings in OPENINGS.items()
    }
    stream = conversations(data, {"own": own_turns, **begun}, seed)
    kept = KeptFeatures(target, layers, work / "features")
    writer = Writer(target, layers, rows)
    samples: list[Sample] = []
    earlier: list[Messages] = []  # the second turns of the chunk before
    for number in range(count):
        fresh = [turns for _, turns in islice(stream, CHUNK)]
        path = folder / f"{number:03}.jsonl"
        if not path.exists():
            chats = [[user(turns[0])] for turns in fresh] + earlier
            prompts = [encode_prompt(target, messages) for messages in chats]
            prompts = [p for i, p in enumerate(prompts) if i < CHUNK or len(p) <= AFTER_TOKENS]
            mx.random.seed(seed * 1_000_003 + number)  # of this chunk alone
            answered = writer.answer(prompts, ANSWER_TOKENS, Report(number, len(prompts)))
            for row in answered:
                kept.save(row.answer.sample, row.features())
            _write(path, [asdict(row.answer) for row in answered])
        answers = read_answers(path)
        samples += [answer.sample for answer in answers if len(answer.answer) > 1]
        earlier = second_turns(target, answers, fresh)
    return samples


def begin_turns(
    target: Target,
    openings: Sequence[str],
    count: int,
    path: Path,
    settings: AnswerSettings,
    seed: int,
) -> list[str]:
    """User turns that begin with one of `openings`, which the target completes. `path` keeps them.

    There are fewer than `count`: those without an end, and repetitions, are dropped.
    """
    if not path.exists():
        header, _ = turn_start(target)
        beginnings = Random(seed).choices(openings, k=count)
        encoded = [target.tokenizer.encode(text, add_special_tokens=False) for text in beginnings]
        mx.random.seed(seed)
        sampler = make_sampler(TEMPERATURE, min_p=MIN_P)
        prompts = [header + list(tokens) for tokens in encoded]
        turns = []
        answers = complete_prompts(target, prompts, settings, sampler)
        for text, answer in zip(beginnings, answers, strict=True):
            completion = target.tokenizer.decode(list(answer.answer), skip_special_tokens=True)
            if answer.ended and completion.strip():
                turns.append((text + completion).strip())
        _write(path, [{"turn": turn} for turn in dict.fromkeys(turns)])
    return [line["turn"] for line in whole_lines(path)]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file of JSON lines that is whole, or not there."""
    unfinished = path.with_suffix(".part")
    unfinished.unlink(missing_ok=True)  # of a run that was killed here
    append(unfinished, rows)
    unfinished.replace(path)


class Report:
    """Prints how far a chunk has come, about every 8,000 tokens."""

    def __init__(self, number: int, prompts: int) -> None:
        self._number = number
        self._prompts = prompts
        self._said = 0
        self._begin = time.monotonic()

    def __call__(self, done: int, tokens: int) -> None:
        if tokens - self._said >= 8000:
            self._said = tokens
            rate = tokens / (time.monotonic() - self._begin)
            answers = f"{done}/{self._prompts} answers"
            say(f"chunk {self._number}: {answers}, {tokens} tokens, {rate:.0f} a second")


def user(text: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": text}


def second_turns(
    target: Target, answers: list[Answer], fresh: list[Turns]
) -> list[list[dict[str, str]]]:
    """The chats [question, answer, question] of a chunk's conversations that have a second turn."""
    conversations = []
    for answer, turns in zip(answers, fresh, strict=False):
        if len(turns) > 1:
            text = target.tokenizer.decode(list(answer.answer), skip_special_tokens=True)
            said = {"role": "assistant", "content": text}
            conversations.append([user(turns[0]), said, user(turns[1])])
    return conversations

"""Write the answers that the drafter learns from, chunk by chunk; a chunk that is there is kept."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import mlx.core as mx

from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.prompt import encode_prompt
from dflash_mlx.targets import Target
from dflash_mlx.train.answers import Answer, AnswerSettings, append, read_answers
from dflash_mlx.train.dataset import Messages, Sample
from dflash_mlx.train.features import KeptFeatures
from dflash_mlx.train.synthesize import write_turns

from .answers import ROWS, Writer
from .prompts import Turns, conversations

CHUNK = 256  # conversations that begin in a chunk
OWN_TURNS = 480  # user turns that the target writes
TURN_TOKENS = 96
LONG, SHORT = 384, 256  # the most tokens of an answer
LONG_CHUNKS = 1
AFTER_TOKENS = 256  # a conversation of more tokens does not go on: long contexts cost most


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def write_chunks(
    target: Target, drafter: DFlash, data: Path, work: Path, seed: int, count: int
) -> list[Sample]:
    """The conversations of `count` chunks, whose features are kept in `work`/features.

    A conversation's second turn is asked in the chunk after its first.

    Args:
        drafter: whose layers are tapped, and whose tokens are the likeliest.
        data: the folder of the public training splits.
        work: the folder for the chunks.
    """
    settings = AnswerSettings(TURN_TOKENS, ROWS, 2 * ROWS)
    own = write_turns(target, OWN_TURNS, work / "turns.jsonl", settings, seed)
    stream = conversations(data, own, seed)
    kept = KeptFeatures(target, drafter.config.target_layer_ids, work / "features")
    likely = drafter.token_ids()
    assert likely is not None  # its head has fewer tokens than the target's
    writer = Writer(target, drafter.config.target_layer_ids, likely)
    samples: list[Sample] = []
    earlier: list[Messages] = []  # the second turns of the chunk before
    for number in range(count):
        fresh = [turns for _, turns in islice(stream, CHUNK)]
        path = work / f"{number:03}.jsonl"
        if not path.exists():
            asked = [[user(turns[0])] for turns in fresh] + earlier
            prompts = [encode_prompt(target, messages) for messages in asked]
            prompts = [p for i, p in enumerate(prompts) if i < CHUNK or len(p) <= AFTER_TOKENS]
            mx.random.seed(seed * 1_000_003 + number)
            limit = LONG if number < LONG_CHUNKS else SHORT
            rows = writer.answer(prompts, limit, Report(number, len(prompts)))
            for row in rows:
                kept.save(row.answer.sample, row.features())
            unfinished = path.with_suffix(".part")
            unfinished.unlink(missing_ok=True)  # of a run that was killed here
            append(unfinished, (asdict(row.answer) for row in rows))
            unfinished.replace(path)
        answers = read_answers(path)
        samples += [answer.sample for answer in answers if len(answer.answer) > 1]
        earlier = second_turns(target, answers, fresh)
    return list(dict.fromkeys(samples))


class Report:
    """Prints now and then how far a chunk has come."""

    def __init__(self, number: int, prompts: int) -> None:
        self._number, self._prompts = number, prompts
        self._said, self._begin = 0, time.process_time()

    def __call__(self, done: int, tokens: int) -> None:
        if tokens - self._said >= 4000:
            self._said = tokens
            rate = tokens / (time.process_time() - self._begin)
            answers = f"{done}/{self._prompts} answers"
            say(f"chunk {self._number}: {answers}, {tokens} tokens, {rate:.0f} a CPU second")


def user(text: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": text}


def second_turns(
    target: Target, answers: list[Answer], fresh: list[Turns]
) -> list[list[dict[str, str]]]:
    """The conversations of a chunk that go on, with the answers to their first turns."""
    found = []
    for answer, turns in zip(answers, fresh, strict=False):
        if len(turns) > 1:
            text = target.tokenizer.decode(list(answer.answer), skip_special_tokens=True)
            said = {"role": "assistant", "content": text}
            found.append([user(turns[0]), said, user(turns[1])])
    return found

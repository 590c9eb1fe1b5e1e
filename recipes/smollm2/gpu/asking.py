"""Conversations as the recipe makes them (prompts.py, write.py), with answers by `Writer`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from dflash_mlx.bench.datasets import SUITES, local_files

from ..prompts import OPENINGS, Turns, conversations
from .features import Sample
from .target import SmolLM2
from .writer import Sampling, Task, Writer

# These five are those of write.py, which needs MLX and explains them.
OWN = 0.25
BEGUN = 0.2
TURN_TOKENS = 96
ANSWER_TOKENS = 384
AFTER_TOKENS = 320
TURNS = Sampling(temperature=1.0, min_p=0.05)  # of user turns
PUBLISHED = Sampling(temperature=0.2, top_p=0.9)  # of sampled answers, as published with the model
SAMPLED = 4  # one answer in so many is sampled, the others are greedy
SUITE_NAMES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")


def write_turns(
    target: SmolLM2, writer: Writer, count: int, path: Path, seed: int, deadline: float
) -> dict[str, list[str]]:
    """User turns that the target writes for `count` conversations, by kind; `path` keeps them.

    Turns that differ only by capitals and punctuation are the same, and come once.
    """
    if path.exists():
        kept: dict[str, list[str]] = json.loads(path.read_text())
        return kept
    sentinel = "user turn goes here"
    chat = [{"role": "user", "content": sentinel}]
    whole = target.tokenizer.apply_chat_template(chat, tokenize=False)
    header = whole.partition(sentinel)[0]
    begun = {"own": [""] * int(OWN * count)}
    for kind, openings in OPENINGS.items():
        begun[kind] = Random(seed).choices(openings, k=int(BEGUN * count))
    starts = [(kind, text) for kind, texts in begun.items() for text in texts]
    headers = [header + text for _, text in starts]
    ids = target.tokenizer(headers, add_special_tokens=False)["input_ids"]
    tasks = [Task(i, prompt, TURN_TOKENS, TURNS) for i, prompt in enumerate(ids)]
    turns: dict[str, dict[tuple[str, ...], str]] = {kind: {} for kind in begun}

    def done(task: Task) -> None:
        kind, start = starts[task.number]
        completion = target.tokenizer.decode(task.answer, skip_special_tokens=True)
        turn = (start + completion).strip()
        words = tuple(re.findall(r"\w+", turn.lower()))
        if task.ended and completion.strip() and len(words) > 1:
            turns[kind].setdefault(words, turn)

    writer.write(tasks, done, deadline)
    # The order in which answers end depends on the slots.
    written = {kind: sorted(of_kind.values()) for kind, of_kind in turns.items()}
    for of_kind in written.values():
        Random(seed).shuffle(of_kind)
    path.write_text(json.dumps(written))
    return written


def asked(data: Path, turns: dict[str, list[str]], count: int, seed: int) -> list[Turns]:
    """The user turns of `count` conversations. No prompt of a test split is among them."""
    return [chat for _, chat in islice(conversations(data, turns, seed), count)]


def write_answers(
    target: SmolLM2, writer: Writer, chats: list[Turns], path: Path, deadline: float
) -> int:
    """Answer the turns that `path` has no answers to; returns the number of tokens written.

    A line of the file has the fields of `dflash_mlx.train.answer_writer.Answer`, and the numbers of
    the conversation and of the turn.
    """
    rows = read_rows(path)
    answered = {(row["conversation"], row["turn"]) for row in rows}
    second = [
        task
        for row in rows
        if row["turn"] == 0 and (row["conversation"], 1) not in answered
        for task in second_turn(target, chats, row)
    ]
    numbers = [number for number in range(len(chats)) if (number, 0) not in answered]
    texts = [user(chats[number][0]) for number in numbers]
    prompts = target.encode_all(texts)
    first = [task_of(number, prompt, 0) for number, prompt in zip(numbers, prompts, strict=True)]
    with path.open("a", encoding="utf-8") as file:

        def done(task: Task) -> Task | None:
            conversation, turn = divmod(task.number, 2)
            row = {"prompt": list(task.prompt), "answer": task.answer, "ended": task.ended}
            row |= {"conversation": conversation, "turn": turn}
            file.write(json.dumps(row) + "\n")
            file.flush()
            return next(second_turn(target, chats, row), None) if turn == 0 else None

        return writer.write(second + first, done, deadline)


def second_turn(target: SmolLM2, chats: list[Turns], row: dict[str, Any]) -> Iterator[Task]:
    """The task of a conversation's second turn, or none if it has no such turn or is too long.

    `row` has the answer to the first turn.
    """
    number = row["conversation"]
    if len(chats[number]) > 1:
        said = target.tokenizer.decode(row["answer"], skip_special_tokens=True)
        first, after = chats[number]
        chat = user(first) + [{"role": "assistant", "content": said}] + user(after)
        [prompt] = target.encode_all([chat])
        if len(prompt) <= AFTER_TOKENS:
            yield task_of(number, prompt, 1)


def task_of(conversation: int, prompt: list[int], turn: int) -> Task:
    """A task with the number 2 * conversation + turn, where turn is 0 or 1."""
    drawn = conversation % SAMPLED == SAMPLED - 1
    sampling = PUBLISHED if drawn else Sampling()
    return Task(2 * conversation + turn, prompt, ANSWER_TOKENS, sampling)


def user(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of answers; one that a killed run left unfinished is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def split(path: Path, held_out: int) -> tuple[list[Sample], list[Sample]]:
    """Samples of `held_out` conversations, at most a tenth of all, and samples of the others."""
    rows = [row for row in read_rows(path) if len(row["answer"]) > 1]
    numbers = sorted({row["conversation"] for row in rows})
    tenth = -(-len(numbers) // 10)  # rounded up
    chosen = {*Random(0).sample(numbers, min(held_out, tenth))}

    def samples(wanted: Callable[[int], bool]) -> list[Sample]:
        return [
            Sample(row["prompt"] + row["answer"], len(row["prompt"]))
            for row in rows
            if wanted(row["conversation"])
        ]

    return samples(chosen.__contains__), samples(lambda number: number not in chosen)


def suite_answers(
    target: SmolLM2, writer: Writer, data: Path, prompts: int, tokens: int, path: Path
) -> dict[str, list[Sample]]:
    """Greedy answers to the first prompts of each suite; MT-bench has its first turns.

    Training uses MBPP's task ids from 601 on, so its first ones are not trained on.

    Args:
        target: the model.
        writer: writes its answers.
        data: the folder of the suites.
        prompts: how many of each suite.
        tokens: the most of an answer.
        path: keeps the answers.
    """
    if not path.exists():
        names = []
        chats = []
        for name in SUITE_NAMES:
            [file] = local_files(name, data)
            for prompt in SUITES[name].prompts(name, file)[:prompts]:
                names.append(name)
                chats.append(list(prompt.messages))
        ids = target.encode_all(chats)
        tasks: list[Task] = []
        writer.write([Task(i, prompt, tokens) for i, prompt in enumerate(ids)], tasks.append)
        lines = [
            json.dumps({"suite": names[t.number], "prompt": t.prompt, "answer": t.answer})
            for t in sorted(tasks, key=lambda task: task.number)
        ]
        path.write_text("".join(line + "\n" for line in lines))
    suites: dict[str, list[Sample]] = {name: [] for name in SUITE_NAMES}
    for row in read_rows(path):
        if len(row["answer"]) > 1:
            suites[row["suite"]].append(Sample(row["prompt"] + row["answer"], len(row["prompt"])))
    return suites

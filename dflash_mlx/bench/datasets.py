"""The prompts a benchmark runs: the embedded ones, or a person's own JSONL file.

The suites of the hub are in `suites.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..validation import parse_json


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to be answered.

    Attributes:
        category: results are summed up by it.
        messages: chat messages ({"role", "content"}), the last one the user's.
        answer: the one right answer, where there is one.
        then: what the user says next, after each answer.
        source: where the prompt comes from, for messages about it.
    """

    category: str
    messages: tuple[dict[str, str], ...]
    answer: str | None = None
    then: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    @property
    def question(self) -> str:
        """What the user said last."""
        return self.messages[-1]["content"]

    def answered(self, text: str) -> BenchPrompt | None:
        """The conversation with the user's next turn, after this answer; None when it is over."""
        if not self.then:
            return None
        turns = ({"role": "assistant", "content": text}, {"role": "user", "content": self.then[0]})
        return replace(self, messages=(*self.messages, *turns), answer=None, then=self.then[1:])

    def after(self, text: str) -> BenchPrompt:
        """The same with some text before the user's last words."""
        last = self.messages[-1] | {"content": f"{text}\n\n{self.question}"}
        return replace(self, messages=(*self.messages[:-1], last))


def embedded_prompts() -> list[BenchPrompt]:
    """The held-out prompts that come with the embedded pair."""
    return read_prompts(Path(str(files("dflash_mlx").joinpath("tiny", "prompts.jsonl"))))


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read a JSONL file of {"prompt": text} or {"messages": [...]}, with "category" and "answer"
    if wanted; empty lines are skipped.

    Raises `DataError`, naming the line.
    """
    prompts = []
    for number, line in lines_of(path):
        where = f"{path}, line {number}"
        prompts.append(replace(_parse(parse_object(line, where), where), source=where))
    if not prompts:
        raise DataError(f"{path}: there is no prompt in it.")
    return prompts


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not empty, with their numbers, one at a time.

    Raises `DataError`.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from ((n, line) for n, line in enumerate(file, start=1) if line.strip())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8.") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object. Raises `DataError`, which says where it should have been."""
    row = parse_json(text, where, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON object is expected.")
    return row


def limit_per_category(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, in their order."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def _parse(row: dict[str, Any], where: str) -> BenchPrompt:
    if ("prompt" in row) == ("messages" in row):
        raise DataError(f'{where}: an object with either "prompt" or "messages" is expected.')
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    if not _is_conversation(messages):
        raise DataError(f'{where}: messages need a "role" and a "content" that is not empty.')
    category, answer = row.get("category", "prompts"), row.get("answer")
    if not isinstance(category, str) or not isinstance(answer, str | None):
        raise DataError(f'{where}: "category" and "answer" are text.')
    return BenchPrompt(category, tuple(messages), answer)


def _is_conversation(messages: Any) -> bool:
    """Whether these are messages of text, at least one."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and all(isinstance(message.get(key), str) for key in ("role", "content"))
            and message["content"].strip()
            for message in messages
        )
    )

"""The prompts of a benchmark: the embedded ones, or a JSONL file.

The suites of the hub are in `suites.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from ..errors import DataError
from ..validation import UTF8, is_message, parse_json

PROTOCOL_SEED, PROTOCOL_PROMPTS, PROTOCOL_MAX_TOKENS = 42, 128, 2048


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to answer.

    Attributes:
        category: results are summed up by it.
        messages: chat messages ({"role", "content"}), the last one the user's.
        answer: the only right answer, where there is one.
        then: what the user says next, after each answer.
        source: where the prompt comes from, for error messages.
    """

    category: str
    messages: tuple[dict[str, str], ...]
    answer: str | None = None
    then: tuple[str, ...] = ()
    source: str = field(default="", compare=False)

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]

    def answered(self, text: str) -> BenchPrompt | None:
        """The conversation with this answer and the user's next turn; None when it is over."""
        if not self.then:
            return None
        turns = ({"role": "assistant", "content": text}, {"role": "user", "content": self.then[0]})
        return replace(self, messages=(*self.messages, *turns), answer=None, then=self.then[1:])


def embedded_prompts() -> list[BenchPrompt]:
    """The held-out prompts of the embedded pair."""
    return read_prompts(Path(str(files("dflash_mlx").joinpath("tiny", "prompts.jsonl"))))


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read JSON lines of {"prompt": text} or {"messages": [...]}.

    "category" and "answer" are optional, empty lines are skipped. Raises `DataError`, which names
    the line.
    """
    prompts = []
    for number, line in lines_of(path):
        source = f"{path}, line {number}"
        prompts.append(_parse(parse_object(line, source), source))
    if not prompts:
        raise DataError(f"{path}: there is no prompt in it.")
    return prompts


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not empty, with their numbers, one at a time.

    Raises `DataError`.
    """
    try:
        with path.open(encoding=UTF8, newline="\n") as file:
            yield from ((n, line) for n, line in enumerate(file, start=1) if line.strip())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text file in UTF-8.") from error


def parse_object(text: str, source: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `DataError`, which names the source."""
    row = parse_json(text, source, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{source}: a JSON object is expected.")
    return row


def limit_per_category(prompts: list[BenchPrompt], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, in their order."""
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def choose_protocol_prompts(suite: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """The prompts of z-lab's protocol (github.com/z-lab/dflash, dflash/benchmark.py).

    The first `PROTOCOL_PROMPTS` of a shuffled suite; a smaller suite keeps its order.
    """
    chosen = list(suite)
    if len(chosen) > PROTOCOL_PROMPTS:
        Random(PROTOCOL_SEED).shuffle(chosen)
    return chosen[:PROTOCOL_PROMPTS]


def _parse(row: dict[str, Any], source: str) -> BenchPrompt:
    if ("prompt" in row) == ("messages" in row):
        raise DataError(f'{source}: an object with either "prompt" or "messages" is expected.')
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    valid = isinstance(messages, list) and messages and all(map(is_message, messages))
    if not valid or not all(message["content"].strip() for message in messages):
        raise DataError(f'{source}: messages need a "role" and a "content" that is not empty.')
    category, answer = row.get("category", "prompts"), row.get("answer")
    if not isinstance(category, str) or not isinstance(answer, str | None):
        raise DataError(f'{source}: "category" and "answer" must be text.')
    return BenchPrompt(category, tuple(messages), answer, source=source)

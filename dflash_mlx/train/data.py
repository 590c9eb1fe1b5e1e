"""Training data: chat or text files, tokenized, with the spans of the assistant's answers.

Accepted: JSON lines with {"messages": [{"role", "content"}, ...]}, {"prompt", "answer"}, {"prompt"}
or {"text"}, one kind or a mix, and plain .txt files, whose paragraphs (separated by blank lines)
are samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..validation import ErrorWrapper, parse_json

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """Token ids of one conversation or text.

    `answers` are the half-open spans [start, end) of the assistant's tokens, the end-of-turn token
    included. A plain text is one answer from its second token on.
    """

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def encode_text(tokenizer: TokenizerWrapper, text: str) -> Sample:
    """Tokenize plain text as it stands; all of it is to be predicted."""
    tokens = tuple(tokenizer.encode(text))
    return Sample(tokens, ((1, len(tokens)),))


def encode_chat(tokenizer: TokenizerWrapper, messages: Sequence[dict[str, str]]) -> Sample:
    """Tokenize a conversation with the tokenizer's chat template.

    Where a template rewrites earlier turns once a new one arrives (some drop old reasoning), the
    earlier answers are left out and only the last one counts.
    """
    whole = template_ids(tokenizer, messages, prompt=False)
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template_ids(tokenizer, messages[:index], prompt=True)
        after = template_ids(tokenizer, messages[: index + 1], prompt=False)
        if whole[: len(before)] != before or whole[: len(after)] != after:
            continue
        ends = (
            i + 1 for i in range(len(before), len(after)) if after[i] in tokenizer.eos_token_ids
        )
        answers.append((len(before), next(ends, len(after))))
    return Sample(tuple(whole), tuple(answers))


def template_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[dict[str, str]], prompt: bool
) -> list[int]:
    """Token ids of the messages; with `prompt`, the assistant's turn is opened at the end.

    Raises `DataError` where the chat template does not take them.
    """
    with ErrorWrapper(DataError, "The chat template refuses these messages"):
        ids: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
    return list(ids)


def read_samples(path: Path, tokenizer: TokenizerWrapper) -> list[Sample]:
    """Read and tokenize a data file.

    Raises `DataError` naming the file and the line for what is missing, malformed or has no answer.
    """
    samples = []
    for where, record in read_records(path):
        sample = (
            encode_text(tokenizer, record)
            if isinstance(record, str)
            else encode_chat(tokenizer, record)
        )
        if not any(end > start for start, end in sample.answers):
            raise DataError(f"{where}: nothing to learn from: no answer, or an empty text.")
        samples.append(sample)
    if not samples:
        raise DataError(f"{path}: no samples in this file.")
    return samples


def read_records(path: Path) -> Iterator[tuple[str, str | Messages]]:
    """Yield ("file:line", a text or a list of messages) of a data file. Raises `DataError`."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
    if path.suffix == ".txt":
        line = 1
        for block in content.split("\n\n"):
            if block.strip():
                yield f"{path}:{line}", block.strip("\n")
            line += block.count("\n") + 2
        return
    # Not splitlines(): it also cuts at U+2028, which JSON texts may contain as it is.
    for number, line_text in enumerate(content.split("\n"), 1):
        if line_text.strip():
            where = f"{path}:{number}"
            yield where, parse_record(line_text, where)


def parse_record(line: str, where: str) -> str | Messages:
    """One JSON line as a text or a list of messages. Raises `DataError`."""
    record = parse_json(line, where, DataError)
    match record:
        case {"text": str(text)}:
            return text
        case {"prompt": str(prompt), "answer": str(answer)}:
            return [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
        case {"prompt": str(prompt)} if "answer" not in record:
            return [{"role": "user", "content": prompt}]
        case {"messages": [*messages]} if messages and all(map(is_message, messages)):
            return messages
    raise DataError(
        f'{where}: expected {{"messages": [{{"role", "content"}}, ...]}}, {{"prompt", "answer"}} or'
        ' {"text"}, all strings.'
    )


def is_message(message: object) -> bool:
    """Whether it is {"role": str, "content": str}."""
    return isinstance(message, dict) and all(
        isinstance(message.get(field), str) for field in ("role", "content")
    )

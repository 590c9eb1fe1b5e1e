"""Training data: chat or text files, tokenized, in batches of fixed shape.

Accepted: JSON lines with {"messages": [{"role", "content"}, ...]}, {"prompt", "answer"}, {"prompt"}
or {"text"}, also mixed, and .txt files, whose paragraphs (separated by blank lines) are samples.

`mx.compile` builds one graph per shape: lengths are rounded up to buckets, whose batches all have
as many rows. Only the seed decides the order: a checkpoint has a position (epoch, index), no data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import mlx.core as mx

from ..chat_template import apply_chat_template
from ..errors import DataError, PromptError
from ..loading.contents import check_is_text
from ..prompt import encode_text
from ..validation import UTF8, is_message, parse_json

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    """Token ids of one conversation or text.

    `answers` are half-open spans [start, end) of the assistant's tokens, with the end-of-turn
    token. A plain text is one answer from its second token on.
    """

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def encode_chat(tokenizer: TokenizerWrapper, messages: Sequence[dict[str, str]]) -> Sample:
    """Tokenize a conversation with the tokenizer's chat template.

    If the template rewrites earlier turns when a new one arrives (some drop old reasoning), only
    the last answer counts.
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
        # The answer ends with its first end token, if it has one: templates may add more text.
        ends = (
            i + 1 for i in range(len(before), len(after)) if after[i] in tokenizer.eos_token_ids
        )
        answers.append((len(before), next(ends, len(after))))
    return Sample(tuple(whole), tuple(answers))


def template_ids(
    tokenizer: TokenizerWrapper, messages: Sequence[dict[str, str]], prompt: bool
) -> list[int]:
    """Token ids of the messages; `prompt` opens an assistant turn at the end.

    Raises `DataError` if the chat template refuses them.
    """
    try:
        return encode_text(tokenizer, apply_chat_template(tokenizer, messages, prompt), False)
    except PromptError as error:
        raise DataError(str(error)) from error


def encode_record(tokenizer: TokenizerWrapper, source: str, record: str | Messages) -> Sample:
    """Tokenize a text or conversation. Raises `DataError` if there is nothing to learn."""
    if isinstance(record, str):
        tokens = tuple(tokenizer.encode(record))
        sample = Sample(tokens, ((1, len(tokens)),))
    else:
        sample = encode_chat(tokenizer, record)
    if not any(end > start for start, end in sample.answers):
        raise DataError(f"{source}: nothing to learn from: no answer, or an empty text.")
    return sample


def read_records(path: Path) -> Iterator[tuple[str, str | Messages]]:
    """Yield ("file:line", text or messages) for each record of a file. Raises `DataError`."""
    check_is_text(path)
    try:
        content = path.read_text(encoding=UTF8)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
    if path.suffix == ".txt":
        line = 1
        for block in content.split("\n\n"):
            if block.strip():
                yield f"{path}:{line}", block.strip("\n")
            line += block.count("\n") + 2
        return
    # Not splitlines(): it also splits at U+2028, which JSON texts may contain.
    for number, line_text in enumerate(content.split("\n"), 1):
        if line_text.strip():
            where = f"{path}:{number}"
            yield where, parse_record(line_text, where)


def parse_record(line: str, where: str) -> str | Messages:
    """Parse one JSON line into a text or a list of messages. Raises `DataError`."""
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


BUCKET = 16  # lengths are multiples of this many tokens, or more
BUCKETS = 128  # a batch's tokens divided by the length of a bucket, at most

Arrays = tuple[mx.array, ...]


def bucket_length(length: int, tokens: int = 0) -> int:
    """Round `length` up to a whole bucket of batches of so many tokens."""
    bucket = max(BUCKET, tokens // BUCKETS)
    return -(-length // bucket) * bucket


def group(samples: Sequence[Sample], tokens: int, rng: Random) -> list[list[Sample]]:
    """Shuffled batches of about `tokens` tokens with padding, one bucket per batch.

    A bucket repeats some samples to fill its last batch.
    """
    buckets = defaultdict(list)
    for sample in samples:
        buckets[bucket_length(len(sample.tokens), tokens)].append(sample)
    batches = []
    for length, members in sorted(buckets.items()):
        rows = max(1, tokens // length)
        missing = -len(members) % rows  # in the last batch
        members += [rng.choice(members) for _ in range(missing)]
        rng.shuffle(members)
        batches += [members[i : i + rows] for i in range(0, len(members), rows)]
    rng.shuffle(batches)
    return batches


class BatchStream:
    """An endless stream of batches that can be resumed at any position.

    Args:
        epoch: the samples of epoch e, always the same for the same e.
        collate: makes the arrays of a batch; its `Random` depends on the position only.
        tokens: tokens of a batch, with padding.
        seed: seeds the order, and the `Random` of `collate`.
        position: (epoch, batch index) to start at.
    """

    def __init__(
        self,
        epoch: Callable[[int], Sequence[Sample]],
        collate: Callable[[list[Sample], Random], Arrays],
        tokens: int,
        seed: int,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        self._epoch = epoch
        self._collate = collate
        self._tokens = tokens
        self._seed = seed
        self._batches: list[list[Sample]] = []
        self.position = position
        self._load()

    def _load(self) -> None:
        epoch, _ = self.position
        samples = self._epoch(epoch)
        rng = Random(f"{self._seed} {epoch}")
        self._batches = group(samples, self._tokens, rng)

    def next(self) -> Arrays:
        """The arrays of the next batch."""
        epoch, index = self.position
        if index >= len(self._batches):
            epoch += 1
            index = 0
            self.position = (epoch, index)
            self._load()
        self.position = (epoch, index + 1)
        rng = Random(f"{self._seed} {epoch} {index}")
        return self._collate(self._batches[index], rng)

"""Replace the answers of a chat data set by the target's own.

A drafter learns what *this* target would say. On answers somebody else wrote most blocks end at the
first disagreement and teach little, so the DFlash recipe lets the target answer the prompts itself.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import DataError
from ..loop import generate
from ..target import Target
from .data import Messages, read_records


def regenerate(target: Target, messages: Messages, max_tokens: int) -> Messages:
    """The conversation with every assistant turn generated greedily after the turns before it."""
    renewed: Messages = []
    for message in messages:
        if message["role"] == "assistant":
            answer = generate(target, None, renewed, max_tokens=max_tokens).text
            message = {"role": "assistant", "content": answer}
        renewed.append(message)
    return renewed


def regenerate_file(target: Target, source: Path, result: Path, max_tokens: int = 1024) -> int:
    """Write `source` with the target's own answers as JSON lines; returns the number of lines.

    Lines that `result` already has are kept, so an interrupted run goes on where it stopped.
    Raises `DataError` for a bad line, and for plain text, which has nothing to answer.
    """
    done = len(result.read_text(encoding="utf-8").splitlines()) if result.exists() else 0
    count = 0
    with result.open("a", encoding="utf-8") as file:
        for where, record in read_records(source):
            if isinstance(record, str):
                raise DataError(f"{where}: plain text has no prompt to answer; use chat data.")
            count += 1
            if count > done:
                line = json.dumps({"messages": regenerate(target, record, max_tokens)})
                file.write(line + "\n")
                file.flush()
    return count

"""The same questions at chosen lengths of context: speed and acceptance change with what came
before, and short prompts alone would hide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import SettingsError
from ..targets import Target
from .datasets import BenchPrompt
from .measure import encoded


def stretched(
    target: Target, prompts: Sequence[BenchPrompt], length: int, max_tokens: int
) -> list[BenchPrompt]:
    """The prompts, each behind as much of the others' text as makes it about `length` tokens long.

    A prompt that is longer stays as it is. Their category becomes the length, so that figures are
    summed up by it.

    Raises:
        SettingsError: no room for `length` tokens and an answer of `max_tokens`.
        PromptError: a prompt that does not fit the target.
    """
    if length + max_tokens > target.context_length:
        raise SettingsError(
            f"A context of {length:,} tokens and an answer of {max_tokens:,} are more than the "
            f"{target.context_length:,} that {target.name} was made for."
        )
    book = "\n\n".join(message["content"] for one in prompts for message in one.messages)
    page = target.tokenizer.encode(f"{book}\n\n", add_special_tokens=False)
    longer = []
    for number, prompt in enumerate(prompts):
        start = number * len(page) // len(prompts)  # not the same beginning for all
        missing = max(0, length - len(encoded(target, prompt)))
        pages = (start + missing) // len(page) + 1
        text = target.tokenizer.decode((page * pages)[start : start + missing])
        prompt = replace(prompt, category=f"{length:,} tokens", then=())
        longer.append(prompt.after(text) if missing else prompt)
    return longer

"""A prompt in any of its forms -> token ids that the target can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .errors import PromptError
from .sharpness import matching
from .validation import ErrorWrapper, brief

if TYPE_CHECKING:
    from .targets import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

SYSTEM = ("system", "developer")  # roles of messages that begin many chats alike

_FORMS = "A prompt is text, a list of token ids, or a list of messages with 'role' and 'content'."
_LIST = " Of an array of token ids, give array.tolist()."


def encode_prompt(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text, encoded as it is (with the tokenizer's own special tokens, as mlx-lm does);
            token ids; or chat messages ({"role", "content"}), put through the chat template. That
            is a program of the model's, which transformers runs in jinja's sandbox: it reaches no
            files, but nothing bounds how long it runs or what it builds.

    Raises:
        PromptError: empty, not one of these forms, ids outside the vocabulary, no chat template or
            one that raises anything, or as long as the context, so that there is no room for an
            answer.
    """
    ids = token_ids(target.tokenizer, prompt)
    if not ids:
        raise PromptError("The prompt is empty: give some text, token ids or messages.")
    outside = next((i for i in ids if not 0 <= i < target.vocab_size), None)
    if outside is not None:
        raise PromptError(
            f"Token id {brief(outside)} is outside the target's vocabulary of {target.vocab_size}."
        )
    if len(ids) >= target.context_length:
        raise PromptError(
            f"The prompt has {len(ids)} tokens; with room for an answer {target.name} reads "
            f"at most {target.context_length - 1}: shorten it."
        )
    return ids


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, which no target has judged. Raises `PromptError` for what is none."""
    if isinstance(prompt, str):
        if not prompt:
            return []
        bos = tokenizer.bos_token
        special = bos is None or not prompt.startswith(bos)
        _check_text(prompt)
        with ErrorWrapper(PromptError, "The tokenizer cannot encode this prompt"):
            return list(tokenizer.encode(prompt, add_special_tokens=special))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise PromptError(_FORMS + (_LIST if hasattr(prompt, "tolist") else ""))
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
        return [int(item) for item in prompt]  # type: ignore[arg-type]
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise PromptError(_FORMS)
    if not tokenizer.has_chat_template:
        raise PromptError("The target has no chat template: give text or token ids.")
    return _rendered(tokenizer, prompt)


def parting_places(target: Target, prompt: Prompt, ids: Sequence[int]) -> list[int]:
    """Where other prompts will part from one of messages: tokens up to there, in order.

    After the system messages, where another chat begins, and before what asks for the answer, which
    the next turn may not repeat. None of text and of token ids, which say nothing of it.

    Args:
        prompt: in any form.
        ids: what `encode_prompt` made of it.
    """
    if isinstance(prompt, str) or not any(isinstance(item, Mapping) for item in prompt):
        return []
    messages: list[Any] = list(prompt)
    roles = [message["role"] for message in messages]
    first = next((at for at, role in enumerate(roles) if role not in SYSTEM), len(roles))
    another = [*messages[:first], {"role": "user", "content": ""}] if first else []
    places = set()
    for others, asks in ((another, True), (messages, False)):
        with suppress(PromptError):  # a template may refuse what nobody has said
            other = _rendered(target.tokenizer, others, asks) if others else []
            both = min(len(ids), len(other))
            places.add(matching(ids[:both], other[:both]))
    return sorted(places - {0})


def _rendered(tokenizer: Any, messages: Sequence[Any], asks: bool = True) -> list[int]:
    """Messages through the chat template, with or without what asks for an answer at the end.

    Raises `PromptError`.
    """
    whole = [_with_text(message) for message in messages]
    with ErrorWrapper(PromptError, "The chat template refuses these messages"):
        return list(tokenizer.apply_chat_template(whole, add_generation_prompt=asks))


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content, if it is a list of parts, is their text.

    A template that expects text writes a list down as Python shows it, and one that knows of images
    puts places into the text that nothing fills. Raises `PromptError` for a part that is no text.
    """
    parts = message["content"]
    if isinstance(parts, str):
        _check_text(parts)
    if not isinstance(parts, list):
        # None says it by calls of tools alone, and some templates write down what a tool returned.
        if not isinstance(parts, str | Mapping | None):
            raise PromptError(f"A message's content is text, or parts of text, not {brief(parts)}.")
        return message
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise PromptError(f"A message's content is text, or parts of text, not {brief(kind)}.")
    return _with_text({**message, "content": "".join(part["text"] for part in parts)})


def _check_text(text: str) -> None:
    """Raise `PromptError` for half of a character, which text in UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = brief(text[error.start])
        raise PromptError(
            f"The prompt is not text: its character {error.start + 1} is {half}, a surrogate "
            "without its other half."
        ) from error

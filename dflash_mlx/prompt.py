"""Converts a prompt in any of its forms to token ids that the target can read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .chat_template import apply_chat_template, template_reads, thinking_switches
from .errors import PromptError
from .validation import TOKENIZER_ERRORS, ErrorWrapper, brief

if TYPE_CHECKING:
    from .targets import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

EFFORT = "reasoning_effort"  # the variable of chat templates that says how much to think
SYSTEM_ROLES = ("system", "developer")

_FORMS = "A prompt is text, a list of token ids, or a list of messages with 'role' and 'content'."
_ARRAY_HINT = " For an array of token ids, give array.tolist()."


def encode_prompt(
    target: Target, prompt: Prompt, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Convert a prompt to token ids.

    Args:
        target: the model that reads the prompt.
        prompt: text, which is encoded unchanged, with the special tokens that the tokenizer adds
            (as in mlx-lm); token ids; or chat messages ({"role", "content"}), which go through the
            chat template.
        template: more variables of the chat template.

    Raises:
        PromptError: the prompt is empty or has another form; an id is outside the vocabulary; there
            is no chat template, or it fails; or the prompt fills the whole context, which leaves no
            room for an answer.
    """
    ids = token_ids(target.tokenizer, prompt, template)
    check_ids(target, ids)
    if len(ids) >= target.context_length:
        raise PromptError(
            f"The prompt has {len(ids)} tokens, but {target.name} reads at most "
            f"{target.context_length - 1} and then has room for an answer: shorten it."
        )
    return ids


def check_ids(target: Target, ids: Sequence[int]) -> None:
    """Raise `PromptError` for an empty prompt, or ids outside the vocabulary."""
    if not ids:
        raise PromptError("The prompt is empty: give some text, token ids or messages.")
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        outside = next(token for token in ids if not 0 <= token < target.vocab_size)
        raise PromptError(
            f"Token id {brief(outside)} is outside the target's vocabulary of {target.vocab_size}."
        )


def thinking_variables(
    tokenizer: Any, think: bool | None = None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """Return the chat template's variables that switch thinking on or off, and say how much.

    Warns if the template has no such variable.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        think: whether to think; None leaves it to the template.
        reasoning_effort: "low", "medium" or "high"; None leaves it to the template.
    """
    variables: dict[str, Any] = {}
    if think is not None:
        switches = thinking_switches(tokenizer, think)
        variables |= switches
        if not switches:
            _warn_without_effect(f"think={think} ({'--think' if think else '--no-think'})")
    if reasoning_effort is not None:
        if template_reads(tokenizer, EFFORT):
            variables[EFFORT] = reasoning_effort
        else:
            _warn_without_effect("reasoning_effort (--reasoning-effort)")
    return variables


def _warn_without_effect(setting: str) -> None:
    warnings.warn(
        f"dflash-mlx: {setting} changes nothing: this model's chat template has no such switch.",
        stacklevel=3,
    )


def thinks(tokenizer: Any, template: Mapping[str, Any]) -> bool | None:
    """Whether the model thinks with these template variables; None if it has no switch."""
    switches = thinking_switches(tokenizer, True)
    if not switches:
        return None
    sample = [{"role": "user", "content": "?"}]
    prompt = _apply_template(tokenizer, sample, template=template)
    thinking_prompt = _apply_template(tokenizer, sample, template={**template, **switches})
    return prompt == thinking_prompt


def token_ids(
    tokenizer: Any, prompt: Prompt, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Convert a prompt to token ids, without the checks that need a target.

    Raises `PromptError` for an invalid prompt.
    """
    if isinstance(prompt, str):
        if not prompt:
            return []
        bos = tokenizer.bos_token
        add_special = bos is None or not prompt.startswith(bos)
        _check_text(prompt)
        return encode_text(tokenizer, prompt, add_special)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise PromptError(_FORMS + (_ARRAY_HINT if hasattr(prompt, "tolist") else ""))
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompt):
        return [int(item) for item in prompt]  # type: ignore[arg-type]
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise PromptError(_FORMS)
    if not tokenizer.has_chat_template:
        raise PromptError("The target has no chat template: give text or token ids.")
    return _apply_template(tokenizer, prompt, template=template)


def branch_points(
    target: Target, prompt: Prompt, ids: Sequence[int], template: Mapping[str, Any] | None = None
) -> list[int]:
    """Find where other prompts are likely to diverge from this one, for the prefix store.

    These positions are the end of the system messages, where another chat begins, and the start of
    the generation prompt, which the next turn may not repeat. Text and token ids have none.

    Args:
        target: the model that reads the prompt.
        prompt: the prompt, in any form.
        ids: the prompt's token ids, from `encode_prompt`.
        template: more variables of the chat template, the same as for `encode_prompt`.
    """
    if isinstance(prompt, str) or not any(isinstance(item, Mapping) for item in prompt):
        return []
    messages: list[Any] = list(prompt)
    system = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    variants = [(messages, False)]
    if system:
        variants.append(([*system, {"role": "user", "content": ""}], True))
    points = set()
    for variant, generation_prompt in variants:
        with suppress(PromptError):  # a template may refuse messages that no user wrote
            variant_ids = _apply_template(
                target.tokenizer,
                variant,
                generation_prompt=generation_prompt,
                template=template,
            )
            points.add(_shared_length(ids, variant_ids))
    return sorted(points - {0})


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two prompts share at their beginning."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Any],
    generation_prompt: bool = True,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Convert messages to token ids with the chat template. Raises `PromptError`."""
    texts = list(map(_with_text, messages))
    text = apply_chat_template(tokenizer, texts, generation_prompt, settings=template)
    return encode_text(tokenizer, text, add_special_tokens=False)


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Convert a text to token ids. Raises `PromptError` if the tokenizer cannot encode it."""
    with ErrorWrapper(PromptError, "The tokenizer cannot encode this prompt", TOKENIZER_ERRORS):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join the content of a message to one text, if it is a list of parts.

    A template for text would print a list as Python does, and one for images would add placeholders
    that nothing fills. Raises `PromptError` for a part that is not text.
    """
    content = message["content"]
    # None: the message has only tool calls. A mapping: some templates print tool results.
    if content is None or isinstance(content, Mapping):
        return message
    if isinstance(content, str):
        _check_text(content)
        return message
    if not isinstance(content, list):
        raise _not_text(content)
    text = ""
    for part in content:
        if not isinstance(part, Mapping):
            raise _not_text(part)
        if not isinstance(part.get("text"), str):
            raise _not_text(part.get("type"))
        text += part["text"]
    _check_text(text)
    return {**message, "content": text}


def _not_text(content: Any) -> PromptError:
    return PromptError(f"A message's content must be text, or parts of text, not {brief(content)}.")


def _check_text(text: str) -> None:
    """Raise `PromptError` for an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = brief(text[error.start])
        raise PromptError(
            f"The prompt is not valid text: its character {error.start + 1} is {surrogate}, a "
            "surrogate without its other half."
        ) from error

"""A prompt in any of its forms -> token ids that the target can read."""

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

EFFORT = "reasoning_effort"  # what chat templates call the amount of thinking
SYSTEM_ROLES = ("system", "developer")

_FORMS = "A prompt is text, a list of token ids, or a list of messages with 'role' and 'content'."
_ARRAY_HINT = " Of an array of token ids, give array.tolist()."


def encode_prompt(
    target: Target, prompt: Prompt, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt.

    Args:
        target: the model that reads it.
        prompt: text, encoded as it is (with the tokenizer's own special tokens, as mlx-lm does);
            token ids; or chat messages ({"role", "content"}), put through the chat template.
        template: further variables of the chat template.

    Raises:
        PromptError: empty, none of these forms, ids outside the vocabulary, no chat template or one
            that fails, or as long as the context, which leaves no room for an answer.
    """
    ids = token_ids(target.tokenizer, prompt, template)
    check_ids(target, ids)
    if len(ids) >= target.context_length:
        raise PromptError(
            f"The prompt has {len(ids)} tokens; with room for an answer {target.name} reads "
            f"at most {target.context_length - 1}: shorten it."
        )
    return ids


def check_ids(target: Target, ids: Sequence[int]) -> None:
    """Raise `PromptError` for an empty prompt, or ids outside the vocabulary."""
    if not ids:
        raise PromptError("The prompt is empty: give some text, token ids or messages.")
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        outside = next(i for i in ids if not 0 <= i < target.vocab_size)
        raise PromptError(
            f"Token id {brief(outside)} is outside the target's vocabulary of {target.vocab_size}."
        )


def thinking_variables(
    tokenizer: Any, think: bool | None = None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """The chat template's variables for thinking or not, and how much.

    Warns of what the template does not know.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        think: whether to think; None leaves it to the template.
        reasoning_effort: "low", "medium" or "high"; None leaves it to the template.
    """
    found: dict[str, Any] = {}
    switch = f"think={think} ({'--think' if think else '--no-think'})"
    has_amount = template_reads(tokenizer, EFFORT)
    wanted = (
        (switch, think, thinking_switches(tokenizer, bool(think))),
        (
            "reasoning_effort (--reasoning-effort)",
            reasoning_effort,
            {EFFORT: reasoning_effort} if has_amount else {},
        ),
    )
    for setting, value, variables in wanted:
        found |= {} if value is None else variables
        if value is not None and not variables:
            warnings.warn(
                f"dflash-mlx: {setting} changes nothing: this model's chat template has no such "
                "switch.",
                stacklevel=2,
            )
    return found


def thinks(tokenizer: Any, template: Mapping[str, Any]) -> bool | None:
    """Whether the template with these variables has answers think; None if it has no switch."""
    switches = thinking_switches(tokenizer, True)
    if not switches:
        return None
    sample = [{"role": "user", "content": "?"}]
    thinking = {**template, **switches}
    return _apply_template(tokenizer, sample, template=template) == _apply_template(
        tokenizer, sample, template=thinking
    )


def token_ids(
    tokenizer: Any, prompt: Prompt, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a prompt, not checked against a target. Raises `PromptError` if it is none."""
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
    """Positions where other prompts are likely to diverge from this one, for the prefix store.

    These are the end of the system messages, where another chat begins, and the start of the
    generation prompt, which the next turn may not repeat. Text and token ids have none.

    Args:
        target: the model that reads the prompt.
        prompt: in any form.
        ids: the prompt's token ids, from `encode_prompt`.
        template: as for `encode_prompt`.
    """
    if isinstance(prompt, str) or not any(isinstance(item, Mapping) for item in prompt):
        return []
    messages: list[Any] = list(prompt)
    roles = [message["role"] for message in messages]
    system = next((at for at, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    variants = [(messages, False)]
    if system:
        variants.append(([*messages[:system], {"role": "user", "content": ""}], True))
    points = set()
    for variant, generation_prompt in variants:
        with suppress(PromptError):  # a template may refuse messages that no user wrote
            other = _apply_template(target.tokenizer, variant, generation_prompt, template)
            pairs = zip(ids, other, strict=False)
            points.add(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return sorted(points - {0})


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Any],
    generation_prompt: bool = True,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of messages, put through the chat template. Raises `PromptError`."""
    texts = list(map(_with_text, messages))
    text = apply_chat_template(tokenizer, texts, generation_prompt, settings=template)
    return encode_text(tokenizer, text, False)


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises `PromptError` if the tokenizer cannot encode it."""
    with ErrorWrapper(PromptError, "The tokenizer cannot encode this prompt", TOKENIZER_ERRORS):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content, if it is a list of parts, is their joined text.

    A text template would print a list as Python does, and one for images would add placeholders
    that nothing fills. Raises `PromptError` for a part that is not text.
    """
    content = message["content"]
    if isinstance(content, str):
        _check_text(content)
    if not isinstance(content, list):
        # None: the message is tool calls alone. A mapping: some templates print tool results.
        if not isinstance(content, str | Mapping | None):
            raise PromptError(
                f"A message's content is text, or parts of text, not {brief(content)}."
            )
        return message
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise PromptError(f"A message's content is text, or parts of text, not {brief(kind)}.")
    return _with_text({**message, "content": "".join(part["text"] for part in content)})


def _check_text(text: str) -> None:
    """Raise `PromptError` for an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = brief(text[error.start])
        raise PromptError(
            f"The prompt is not text: its character {error.start + 1} is {half}, a surrogate "
            "without its other half."
        ) from error

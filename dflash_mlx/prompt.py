"""A prompt in any of its forms -> token ids that the target can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import PromptError
from .foreign import Foreign
from .reading import shown

if TYPE_CHECKING:
    from .target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_FORMS = "A prompt is text, a list of token ids, or a list of messages with 'role' and 'content'."


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
            f"Token id {shown(outside)} is outside the target's vocabulary of {target.vocab_size}."
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
        with Foreign(PromptError, "The tokenizer cannot encode this prompt"):
            return list(tokenizer.encode(prompt, add_special_tokens=special))
    if not isinstance(prompt, Sequence):
        raise PromptError(_FORMS)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return list(prompt)  # type: ignore[arg-type]
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise PromptError(_FORMS)
    if not tokenizer.has_chat_template:
        raise PromptError("The target has no chat template: give text or token ids.")
    with Foreign(PromptError, "The chat template refuses these messages"):
        return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True))

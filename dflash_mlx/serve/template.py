"""Messages -> token ids, by the model's own chat template.

Templates refuse what others allow: a system message that is not the first, two turns of one side in
a row, a system message at all; some drop it without a word. So messages are rendered as they are,
and only where that fails put into an order that every template takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from transformers import PreTrainedTokenizerBase

from ..errors import PromptError
from ..prompt import token_ids
from ..validation import ErrorWrapper
from . import harmony
from .ask import Ask
from .errors import Refusal, TooLong
from .length import LeastTokens
from .tools import Syntax, described, in_words

if TYPE_CHECKING:
    from ..targets import Target

COUNTED: Final = 2**18  # characters; the tokens of less are soon told exactly

Message = Mapping[str, Any]
# What apply_chat_template itself is told, which is not a request's to say: not even its template.
_RESERVED: Final = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


@dataclass(frozen=True)
class Encoded:
    """A prompt: its token ids, and whether the answer starts in the model's reasoning."""

    ids: list[int]
    thinking: bool = False


def encode(target: Target, syntax: Syntax, ask: Ask, least: LeastTokens) -> Encoded:
    """The prompt of a request; `least` tells before it is tokenized where that is of no use.

    Raises `Refusal` for what the template does not take, `TooLong` where no answer has room.
    """
    tokenizer, most = target.tokenizer, target.context_length - 1
    thinking = False
    try:
        if isinstance(ask.prompt, str) or not _are_messages(ask.prompt):
            if isinstance(ask.prompt, str):
                _check_length(ask.prompt, ask, least, most)
            ids = token_ids(tokenizer, ask.prompt)
        else:
            text = _render(tokenizer, syntax, ask, ask.prompt)
            _check_length(text, ask, least, most)
            if tokenizer.has_thinking:
                thinking = text.rstrip().endswith(tokenizer.think_start)
            with ErrorWrapper(PromptError, "The tokenizer cannot encode this prompt"):
                ids = list(tokenizer.encode(text, add_special_tokens=False))
    except PromptError as error:
        raise Refusal(str(error), param=ask.origin) from error
    if not ids:
        raise Refusal("The prompt is empty.", param=ask.origin)
    if any(not 0 <= token < target.vocab_size for token in ids):
        raise Refusal(
            f"A token is outside the vocabulary of {target.vocab_size}.", param=ask.origin
        )
    if len(ids) > most:
        raise TooLong(len(ids), most, ask.origin)
    return Encoded(ids, thinking)


def _check_length(text: str, ask: Ask, least: LeastTokens, most: int) -> None:
    """Raise `TooLong` for a text that is so far beyond `most` tokens that it needs no counting."""
    if len(text) > COUNTED and (tokens := least.of(text)) > most:
        raise TooLong(tokens, most, ask.origin, counted=False)


def _are_messages(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _render(tokenizer: Any, syntax: Syntax, ask: Ask, messages: Any) -> str:
    """The text of a prompt. Raises `PromptError`, the template's first one."""
    if not tokenizer.has_chat_template:
        raise PromptError("The model has no chat template: use completions.")
    if wrong := sorted(_RESERVED & set(ask.template)):
        raise PromptError(f"chat_template_kwargs cannot have {wrong[0]!r}.")
    tools = ask.callable
    if not syntax.native:
        messages = in_words(messages, syntax)
        if tools:
            told = {"role": "system", "content": described(tools, syntax)}
            messages = folded([told, *messages])
    if syntax.name == harmony.NAME:
        messages = [harmony.with_thinking(message) for message in messages]
    settings = dict(ask.template)
    if syntax.native and tools:
        settings["tools"] = [tool.for_template() for tool in tools]
    first: PromptError | None = None
    for attempt in (messages, folded(messages), folded(messages, system=False)):
        try:
            with ErrorWrapper(PromptError, "The chat template refuses these messages"):
                text = tokenizer.apply_chat_template(
                    [dict(message) for message in attempt],
                    tokenize=False,
                    add_generation_prompt=not ask.continues,
                    continue_final_message=ask.continues,
                    **settings,
                )
        except PromptError as error:
            first = first or error
            continue
        if all(_said(message) in text for message in messages if message["role"] == "system"):
            return str(text)
    raise first or PromptError("The chat template leaves out system messages.")


def _said(message: Message) -> str:
    return str(message["content"]).strip()


def folded(messages: Sequence[Message], system: bool = True) -> list[Message]:
    """The same words in turns that alternate, after at most one system message.

    System messages at the start become one; those in the middle, and all without `system`, a part
    of the user's turn that follows, or of one of its own at the end.
    """
    start = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    head = "\n\n".join(_said(message) for message in messages[:start])
    turns: list[dict[str, Any]] = []
    if head:
        turns.append({"role": "system" if system else "user", "content": head})
    for message in messages[start:]:
        role = "user" if message["role"] == "system" else message["role"]
        last = turns[-1] if turns else {"role": ""}
        plain = not any(one.get("tool_calls") for one in (last, message))
        if role == last["role"] and role in ("user", "assistant") and plain:
            turns[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
        else:
            turns.append({**message, "role": role})
    return list(turns)

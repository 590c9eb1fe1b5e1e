"""From messages to token ids, with the model's chat template.

Templates differ in what they refuse: a system message in the middle, two messages of one role in a
row, any system message. Some drop it silently. Messages are rendered as they are first. If that
fails, they are merged into an order that every template takes.
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
from .errors import ContextLengthError, RequestError
from .request import GenerationRequest
from .tools import ToolSyntax, calls_as_text, describe_tools

if TYPE_CHECKING:
    from ..targets import Target

Message = Mapping[str, Any]
# Parameters of apply_chat_template, the template itself among them: a request may not set them.
_RESERVED: Final = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids, and whether the answer starts in the model's reasoning."""

    ids: list[int]
    starts_in_reasoning: bool = False


def encode(target: Target, syntax: ToolSyntax, request: GenerationRequest) -> EncodedPrompt:
    """The prompt of a request.

    Raises `RequestError` if the template refuses it, and `ContextLengthError` if it is too long.
    """
    tokenizer, field, prompt = target.tokenizer, request.prompt_field, request.prompt
    thinks = False
    try:
        if prompt and isinstance(prompt[0], Mapping):
            text = _render(tokenizer, syntax, request)
            if tokenizer.has_thinking:
                thinks = text.rstrip().endswith(tokenizer.think_start)
            with ErrorWrapper(PromptError, "The tokenizer cannot encode this prompt"):
                ids = list(tokenizer.encode(text, add_special_tokens=False))
        else:
            ids = token_ids(tokenizer, prompt)
    except PromptError as error:
        raise RequestError(str(error), param=field) from error
    if not ids:
        raise RequestError("The prompt is empty.", param=field)
    if any(not 0 <= token < target.vocab_size for token in ids):
        message = f"A token id is not in the vocabulary of {target.vocab_size}."
        raise RequestError(message, param=field)
    if len(ids) >= target.context_length:
        raise ContextLengthError(len(ids), target.context_length - 1, field)
    return EncodedPrompt(ids, thinks)


def _render(tokenizer: Any, syntax: ToolSyntax, request: GenerationRequest) -> str:
    """The text of a chat. Raises `PromptError`, the template's first one."""
    if not tokenizer.has_chat_template:
        raise PromptError("The model has no chat template: use completions.")
    settings = dict(request.template_settings)
    if reserved := sorted(_RESERVED & set(settings)):
        raise PromptError(f"chat_template_kwargs cannot set {reserved[0]!r}.")
    messages: Any = request.prompt
    tools = request.callable_tools
    if syntax.native and tools:
        settings["tools"] = [tool.for_template() for tool in tools]
    if not syntax.native:
        messages = calls_as_text(messages, syntax)
        if tools:
            system = {"role": "system", "content": describe_tools(tools, syntax)}
            messages = merge_messages([system, *messages])
    if syntax.name == harmony.NAME:
        messages = [harmony.with_thinking(message) for message in messages]
    systems = [_content(message) for message in messages if message["role"] == "system"]
    first: PromptError | None = None
    for attempt in (messages, merge_messages(messages), merge_messages(messages, system=False)):
        try:
            with ErrorWrapper(PromptError, "The chat template refuses these messages"):
                text = tokenizer.apply_chat_template(
                    [dict(message) for message in attempt],
                    tokenize=False,
                    add_generation_prompt=not request.continues_message,
                    continue_final_message=request.continues_message,
                    **settings,
                )
        except PromptError as error:
            first = first or error
            continue
        if all(content in text for content in systems):
            return str(text)
    raise first or PromptError("The chat template leaves out system messages.")


def _content(message: Message) -> str:
    return str(message["content"]).strip()


def merge_messages(messages: Sequence[Message], system: bool = True) -> list[Message]:
    """Messages whose roles alternate, after at most one system message.

    System messages at the start become one. Those in the middle, and all if not `system`, become
    part of the next user message.
    """
    start = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    head = "\n\n".join(_content(message) for message in messages[:start])
    merged: list[Message] = []
    if head:
        merged.append({"role": "system" if system else "user", "content": head})
    for message in messages[start:]:
        role = "user" if message["role"] == "system" else message["role"]
        last = merged[-1] if merged else {"role": ""}
        has_calls = any(one.get("tool_calls") for one in (last, message))
        if role == last["role"] and role in ("user", "assistant") and not has_calls:
            content = f"{last['content']}\n\n{message['content']}"
            merged[-1] = {**last, "content": content}
        else:
            merged.append({**message, "role": role})
    return merged

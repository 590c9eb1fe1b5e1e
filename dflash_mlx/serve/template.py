"""Converts messages to token ids with the model's chat template.

Some templates refuse a system message in the middle, two messages of one role in a row, or any
system message. Others drop them silently. So messages are rendered unchanged first. If that fails,
they are merged into an order that every template accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from ..answers.calls import JsonCalls
from ..answers.families import HARMONY, AnswerFormat, Family
from ..chat_template import TemplateLimitError, apply_chat_template
from ..errors import PromptError, SettingsError
from ..prompt import branch_points, check_ids, encode_text, token_ids
from .generation_request import GenerationRequest, Tool
from .http_errors import RequestError, too_long

if TYPE_CHECKING:
    from ..targets import Target

Message = Mapping[str, Any]


class EncodedPrompt(NamedTuple):
    """A prompt, and the state in which the answer begins.

    Attributes:
        ids: token ids.
        branches: positions where other chats may diverge from the prompt.
        thinks_first: whether the prompt ends with the beginning of a thought.
        begun: the beginning of the answer that the prompt ends with, if the answer continues the
            last message.
    """

    ids: list[int]
    branches: Sequence[int] = ()
    thinks_first: bool = False
    begun: str = ""


def encode(target: Target, form: AnswerFormat, request: GenerationRequest) -> EncodedPrompt:
    """Convert a request's prompt to token ids.

    Raises `RequestError` if the template refuses the prompt, or it is too long.
    """
    tokenizer = target.tokenizer
    prompt = request.prompt
    branches: list[int] = []
    begun = ""
    try:
        if prompt and isinstance(prompt[0], Mapping):
            rendered = _render(tokenizer, form, request)
            ids = encode_text(tokenizer, rendered.text, add_special_tokens=False)
            branches = branch_points(
                target,
                rendered.messages,
                ids=ids,
                template=rendered.settings,
            )
            if request.continues_message:
                begun = _begun_answer(tokenizer, form, rendered)
        else:
            ids = token_ids(tokenizer, prompt)
        check_ids(target, ids)
    except PromptError as error:
        raise RequestError(str(error), param=request.prompt_field) from error
    except SettingsError as error:
        raise RequestError(str(error), param="chat_template_kwargs") from error
    if len(ids) >= target.context_length:
        raise too_long(len(ids), target.context_length - 1, request.prompt_field)
    return EncodedPrompt(
        ids=ids,
        branches=branches,
        thinks_first=not begun and form.starts_in_thought(tokenizer, ids),
        begun=begun,
    )


class Rendered(NamedTuple):
    """The text of a chat, and the messages and template variables that it was made of."""

    text: str
    messages: Sequence[Message]
    settings: Mapping[str, Any]


def _begun_answer(tokenizer: Any, form: AnswerFormat, rendered: Rendered) -> str:
    """Return the part of a prompt that belongs to the answer.

    That is everything after the position where an answer would begin. A template may write more
    than the message there: an empty thought, or the header of a message.
    """
    text = rendered.text
    if rendered.messages[-1]["role"] != "assistant":
        return ""
    start = _answer_start(tokenizer, rendered)
    opens, closes = form.thought
    if opens and text[:start].rstrip().endswith(opens):
        # The template opens a thought in every answer.
        return text[text.rindex(opens, 0, start) :]
    for marker in (opens, closes):
        start = _outside_marker(text, start, marker)
    return text[start:]


def _answer_start(tokenizer: Any, rendered: Rendered) -> int:
    """Return the position in a prompt where its last message, an answer, begins.

    The prompt without this message has the same text up to there.
    """
    text = rendered.text
    content = _content(rendered.messages[-1])
    start = text.rfind(content) if content else len(text)
    earlier = rendered.messages[:-1] or [{"role": "user", "content": ""}]
    with suppress(PromptError):
        without_answer = apply_chat_template(tokenizer, earlier, settings=rendered.settings)
        shared = len(commonprefix([text, without_answer]))
        start = shared if start < 0 else min(start, shared)
    return max(0, start)


def _outside_marker(text: str, position: int, marker: str) -> int:
    """Return the position, or the start of the marker if the position lies within one."""
    for length in reversed(range(1, len(marker))):
        if length <= position and text.startswith(marker, position - length):
            return position - length
    return position


def _render(tokenizer: Any, form: AnswerFormat, request: GenerationRequest) -> Rendered:
    """Turn the messages of a request into text.

    Raises the first `PromptError` of the template, or `RequestError`.
    """
    if not tokenizer.has_chat_template:
        raise PromptError("The model has no chat template: use the completions API.")
    settings = dict(request.template_settings)
    messages: Any = request.prompt
    tools = request.callable_tools
    if not form.template_has_tools:
        messages = calls_as_text(messages, form.family)
    if tools and form.shows_tools:
        settings["tools"] = [tool.for_template() for tool in tools]
    elif tools:
        system = {"role": "system", "content": describe_tools(tools, form.family)}
        messages = merge_messages([system, *messages])
    messages = for_family(messages, form.family)
    first_error: PromptError | None = None
    incomplete: Rendered | None = None  # the first text with all system messages but not all others
    for attempt in _attempts(messages, form.family):
        try:
            text = apply_chat_template(
                tokenizer,
                attempt,
                add_generation_prompt=not request.continues_message,
                continue_final_message=request.continues_message,
                settings=settings,
            )
        except TemplateLimitError:
            raise
        except PromptError as error:
            first_error = first_error or error
            continue
        missing_roles = set()
        for message in messages:
            if any(word not in text for word in _required_words(message)):
                missing_roles.add(message["role"])
        rendered = Rendered(text, attempt, settings)
        if not missing_roles:
            return rendered
        if "system" not in missing_roles:
            incomplete = incomplete or rendered
    if incomplete is None:
        raise first_error or PromptError("The chat template leaves out system messages.")
    return incomplete


def _required_words(message: Message) -> Iterator[str]:
    """Yield words that a prompt contains if it contains all of a message.

    Single words are compared, because a template may escape a text.
    """
    texts = [message["content"]]
    for call in message.get("tool_calls", ()):
        texts += call["function"]["arguments"].values()
    for text in texts:
        if isinstance(text, str):
            yield max(re.findall(r"\w+", text), key=len, default="")
    if message["role"] == "system":
        yield _content(message)


def _attempts(messages: Sequence[Message], family: Family) -> Iterator[Sequence[Message]]:
    """Yield the messages unchanged, then in forms that more templates accept.

    Some templates accept only one call in each message, some only alternating roles, some no
    system message, and some only arguments that are text.
    """
    with_single_calls = split_calls(messages)
    candidates = [messages, with_single_calls]
    if family is HARMONY:  # its template drops all but the first of several calls
        candidates = [with_single_calls]
    has_calls = any("tool_calls" in message for message in messages)
    without_merging = list
    without_system = partial(merge_messages, system=False)
    for merge in (without_merging, merge_messages, without_system):
        for candidate in candidates:
            merged = merge(candidate)
            yield merged
            if has_calls:
                yield list(map(_with_text_arguments, merged))


def _with_text_arguments(message: Message) -> Message:
    """Convert the arguments of a message's calls to JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return {**message, "tool_calls": calls}


def for_family(messages: Sequence[Message], family: Family) -> list[dict[str, Any]]:
    """Adapt messages to a family's template.

    Calls get ids of the family's form, each result gets the name of its call, and reasoning goes to
    the fields that templates read.
    """
    adapted: list[dict[str, Any]] = []
    open_calls: list[_OpenCall] = []
    numbers = count()
    for message in messages:
        copy = {key: value for key, value in message.items() if key not in ("media", "left_out")}
        if "tool_calls" in copy:
            open_calls = []
            calls = []
            for call in copy["tool_calls"]:
                name = call["function"]["name"]
                id = family.call_ids.format(name=name, number=next(numbers)) or call["id"]
                open_calls.append(_OpenCall(client_id=call["id"], template_id=id, name=name))
                calls.append(call | {"id": id})
            copy["tool_calls"] = calls
        if copy["role"] == "tool" and open_calls:
            client_ids = [call.client_id for call in open_calls]
            client_id = copy.get("tool_call_id")
            # A result with an unknown id belongs to the first call without a result.
            index = client_ids.index(client_id) if client_id in client_ids else 0
            answered = open_calls.pop(index)
            copy = {"name": answered.name} | copy | {"tool_call_id": answered.template_id}
        reasoning = copy.pop("reasoning_content", None)
        if reasoning:
            fields = ["thinking", "reasoning", "reasoning_content"]  # templates read one of them
            if family is HARMONY:  # its template only reads "thinking", of messages with calls
                fields = ["thinking"] if "tool_calls" in copy else []
            copy |= dict.fromkeys(fields, reasoning)
        adapted.append(copy)
    return adapted


class _OpenCall(NamedTuple):
    """A call without a result so far: its id in the request, its id in the prompt, its name."""

    client_id: str
    template_id: str
    name: str


def split_calls(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, without other text, directly before its result."""
    split: list[Message] = []
    for message in messages:
        fields = {key: value for key, value in message.items() if key != "tool_calls"}
        if message["role"] == "tool":
            split.insert(_after_call(split, message.get("tool_call_id")), message)
        elif "tool_calls" not in message or message["content"]:
            split.append(fields)
            fields = {key: fields[key] for key in ("role", "thinking") if key in fields}
        for call in message.get("tool_calls", ()):
            split.append(fields | {"content": "", "tool_calls": [call]})
            fields = {"role": message["role"]}
    return split


def _after_call(messages: Sequence[Message], call_id: str | None) -> int:
    """Return the index after the message with a call; the end if there is none."""
    for index, message in enumerate(messages):
        if any(call["id"] == call_id for call in message.get("tool_calls", ())):
            return index + 1
    return len(messages)


def _content(message: Message) -> str:
    return str(message["content"]).strip()


def merge_messages(messages: Sequence[Message], system: bool = True) -> list[Message]:
    """Merge messages so that their roles alternate, after at most one system message.

    System messages at the start become one. Those in the middle become part of the next user
    message. Without `system`, all of them do.
    """
    merged: list[Message] = []
    for message in messages:
        role = message["role"]
        content = message["content"]
        if role == "system":
            content = _content(message)
            if not content:
                continue
            is_at_start = all(earlier["role"] == "system" for earlier in merged)
            role = "system" if system and is_at_start else "user"
        last = merged[-1] if merged else {"role": ""}
        has_calls = bool(last.get("tool_calls") or message.get("tool_calls"))
        if role == last["role"] and role != "tool" and not has_calls:
            merged[-1] = {**last, "content": f"{last['content']}\n\n{content}"}
        else:
            merged.append({**message, "role": role, "content": content})
    return merged


def describe_tools(tools: Sequence[Tool], family: Family) -> str:
    """Write a system message about tools, for a template that does not list them."""
    lines = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    syntax = family.calls if isinstance(family.calls, JsonCalls) else JsonCalls()
    example = f"{syntax.head}{{...}}{syntax.tail}".replace("{name}", "...")
    call = f"{family.start}{example}{family.end}"
    return "\n".join(["You can call these tools:", *lines, "To call one, write", call])


def calls_as_text(messages: Sequence[Mapping[str, Any]], family: Family) -> list[dict[str, Any]]:
    """Write calls and results as text, for a template that would drop them."""
    converted = []
    for message in messages:
        copy = dict(message)
        parts = [copy["content"]] if copy["content"] else []
        for call in copy.pop("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            parts.append(f"{family.start}\n{text}\n{family.end}")
        if copy["role"] == "tool":
            copy = {"role": "user"}
            parts = [f"<tool_response>\n{message['content']}\n</tool_response>"]
        converted.append(copy | {"content": "\n".join(parts)})
    return converted

"""From messages to token ids, with the model's chat template.

Templates differ in what they refuse: a system message in the middle, two messages of one role in a
row, any system message. Some drop it silently. Messages are rendered as they are first. If that
fails, they are merged into an order that every template takes.
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
from .errors import RequestError, too_long
from .request import GenerationRequest, Tool

if TYPE_CHECKING:
    from ..targets import Target

Message = Mapping[str, Any]


class EncodedPrompt(NamedTuple):
    """A prompt, and the state that it leaves the answer in.

    Attributes:
        ids: token ids.
        branches: where other chats may diverge from it.
        thinks_first: whether it ends where it has opened a thought.
        begun: the beginning of the answer that it ends with, in a chat whose last message is
            continued.
    """

    ids: list[int]
    branches: Sequence[int] = ()
    thinks_first: bool = False
    begun: str = ""


def encode(target: Target, form: AnswerFormat, request: GenerationRequest) -> EncodedPrompt:
    """A request's prompt.

    Raises `RequestError` if the template refuses it, or it is too long.
    """
    tokenizer, field, prompt = target.tokenizer, request.prompt_field, request.prompt
    branches: list[int] = []
    begun = ""
    try:
        if prompt and isinstance(prompt[0], Mapping):
            text, messages, settings = _render(tokenizer, form, request)
            ids = encode_text(tokenizer, text, False)
            branches = branch_points(target, messages, ids, settings)
            if request.continues_message:
                begun = _begun(tokenizer, form, text, messages, settings)
        else:
            ids = token_ids(tokenizer, prompt)
        check_ids(target, ids)
    except PromptError as error:
        raise RequestError(str(error), param=field) from error
    except SettingsError as error:
        raise RequestError(str(error), param="chat_template_kwargs") from error
    if len(ids) >= target.context_length:
        raise too_long(len(ids), target.context_length - 1, field)
    thinks_first = not begun and form.starts_in_thought(tokenizer, ids)
    return EncodedPrompt(ids, branches, thinks_first, begun)


def _begun(
    tokenizer: Any,
    form: AnswerFormat,
    text: str,
    messages: Sequence[Message],
    settings: Mapping[str, Any],
) -> str:
    """What a prompt has of the answer: all behind the place where an answer would begin.

    A template may write more of it than the message: an empty thought, the header of a message.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return ""
    content = _content(last)
    at = text.rfind(content) if content else len(text)
    earlier = messages[:-1] or [{"role": "user", "content": ""}]
    with suppress(PromptError):
        empty = apply_chat_template(tokenizer, earlier, settings=settings)
        same = len(commonprefix([text, empty]))
        at = same if at < 0 else min(at, same)
    before = text[: max(0, at)]
    opens, closes = form.thought
    if opens and before.rstrip().endswith(opens):  # it opens the thought of every answer
        return text[before.rindex(opens) :]
    for marker in (opens, closes):  # the prefix may end within one
        inside = [n for n in range(1, len(marker)) if text.startswith(marker, len(before) - n)]
        before = before[: len(before) - max(inside, default=0)]
    return text[len(before) :]


Rendered = tuple[str, Sequence[Message], Mapping[str, Any]]  # of these messages and variables


def _render(tokenizer: Any, form: AnswerFormat, request: GenerationRequest) -> Rendered:
    """The text of a chat. Raises `PromptError`, the template's first one, or `RequestError`."""
    if not tokenizer.has_chat_template:
        raise PromptError("The model has no chat template: use completions.")
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
    refused: PromptError | None = None  # the first time
    best: Rendered | None = None
    ends = not request.continues_message, request.continues_message
    for attempt in _attempts(messages, form.family):
        try:
            text = apply_chat_template(tokenizer, attempt, *ends, settings)
        except TemplateLimitError:
            raise
        except PromptError as error:
            refused = refused or error
            continue
        missing = {one["role"] for one in messages for word in _words(one) if word not in text}
        if not missing:
            return text, attempt, settings
        if "system" not in missing:
            best = best or (text, attempt, settings)
    if best is None:
        raise refused or PromptError("The chat template leaves out system messages.")
    return best


def _words(message: Message) -> Iterator[str]:
    """What the text of a prompt has if it has all of a message, which it may escape."""
    texts = [message["content"]]
    for call in message.get("tool_calls", ()):
        texts += call["function"]["arguments"].values()
    for text in texts:
        if isinstance(text, str):
            yield max(re.findall(r"\w+", text), key=len, default="")
    if message["role"] == "system":
        yield _content(message)


def _attempts(messages: Sequence[Message], family: Family) -> Iterator[Sequence[Message]]:
    """The messages as they are, then as more templates take them."""
    single = split_calls(messages)
    shapes = [single] if family is HARMONY else [messages, single]  # it leaves out other calls
    for merged in (list, merge_messages, partial(merge_messages, system=False)):
        for shape in shapes:
            yield merged(shape)
            if any("tool_calls" in one for one in shape):
                yield [_with_text_arguments(one) for one in merged(shape)]


def _with_text_arguments(message: Message) -> Message:
    """A message whose calls have their arguments as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return {**message, "tool_calls": calls}


def for_family(messages: Sequence[Message], family: Family) -> list[dict[str, Any]]:
    """Messages with ids of the family's form, and with the name of its call beside each result."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str, str]] = []  # calls: the client's id, the template's, the name
    numbers = count()
    for message in messages:
        copy = {key: one for key, one in message.items() if key not in ("media", "left_out")}
        if "tool_calls" in copy:
            waiting, calls = [], []
            for call in copy["tool_calls"]:
                name, number = call["function"]["name"], next(numbers)
                id = family.call_ids.format(name=name, number=number) or call["id"]
                waiting.append((call["id"], id, name))
                calls.append(call | {"id": id})
            copy["tool_calls"] = calls
        if copy["role"] == "tool" and waiting:
            given = [one[0] for one in waiting]
            id = copy.get("tool_call_id")
            _, id, name = waiting.pop(given.index(id) if id in given else 0)
            copy = {"name": name} | copy | {"tool_call_id": id}
        if reasoning := copy.pop("reasoning_content", None):
            names = ["thinking", "reasoning", "reasoning_content"]  # templates differ
            if family is HARMONY:
                names = names[: "tool_calls" in copy]
            copy |= dict.fromkeys(names, reasoning)
        found.append(copy)
    return found


def split_calls(messages: Sequence[Message]) -> list[Message]:
    """Messages with one call each, before its result, and without text beside it."""
    found: list[Message] = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        if message["role"] == "tool":
            ids = [{call["id"] for call in one.get("tool_calls", ())} for one in found]
            at = next((at for at, one in enumerate(ids) if rest.get("tool_call_id") in one), -1)
            found.insert(at + 1 or len(found), message)
        elif "tool_calls" not in message or message["content"]:
            found.append(rest)
            rest = {key: rest[key] for key in ("role", "thinking") if key in rest}
        for call in message.get("tool_calls", ()):
            found.append(rest | {"content": "", "tool_calls": [call]})
            rest = {"role": message["role"]}
    return found


def _content(message: Message) -> str:
    return str(message["content"]).strip()


def merge_messages(messages: Sequence[Message], system: bool = True) -> list[Message]:
    """Messages whose roles alternate, after at most one system message.

    System messages at the start become one. Those in the middle, and all if not `system`, become
    part of the next user message.
    """
    merged: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system":
            if not (content := _content(message)):
                continue
            begins = system and all(one["role"] == "system" for one in merged)
            role = "system" if begins else "user"
        last = merged[-1] if merged else {"role": ""}
        has_calls = any(one.get("tool_calls") for one in (last, message))
        if role == last["role"] != "tool" and not has_calls:
            merged[-1] = {**last, "content": f"{last['content']}\n\n{content}"}
        else:
            merged.append({**message, "role": role, "content": content})
    return merged


def describe_tools(tools: Sequence[Tool], family: Family) -> str:
    """The system message about tools for a template without them."""
    lines = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    syntax = family.calls if isinstance(family.calls, JsonCalls) else JsonCalls()
    example = f"{syntax.head}{{...}}{syntax.tail}".replace("{name}", "...")
    call = f"{family.start}{example}{family.end}"
    return "\n".join(["You can call these tools:", *lines, "To call one, write", call])


def calls_as_text(messages: Sequence[Mapping[str, Any]], family: Family) -> list[dict[str, Any]]:
    """Messages with calls and results as text, for a template that would drop them."""
    written = []
    for message in messages:
        copy = dict(message)
        parts = [copy["content"]] if copy["content"] else []
        for call in copy.pop("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            parts.append(f"{family.start}\n{text}\n{family.end}")
        if copy["role"] == "tool":
            copy = {"role": "user"}
            parts = [f"<tool_response>\n{message['content']}\n</tool_response>"]
        written.append(copy | {"content": "\n".join(parts)})
    return written

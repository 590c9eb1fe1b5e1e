"""Chat messages -> text, by the chat template of a model.

A template is a program that comes with the model, so it runs in a `Worker`. transformers prepares
the template's variables: it renders a template of ours that prints them. Nothing else is passed but
what the caller sets: mlx-lm's `TokenizerWrapper` would tell every template to think or not.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .errors import PromptError, SettingsError
from .validation import ErrorWrapper, brief
from .worker import Worker, WorkerLimitError

SECONDS = 10  # of a template
MAX_GROWTH, MAX_ADDED = 4, 2**20  # bytes of a text: for each of the messages, and beside them
# What jinja2, transformers, and templates that are Python code raise for messages.
_ERRORS = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
SWITCHES = ("enable_thinking", "thinking")  # what templates call the switch for thinking
# Variables that cannot be set: parameters of apply_chat_template, and the conversation.
_RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "tokenizer"),
} - {"tools", "documents"}
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_NAMES = ("messages", "tools", "documents", "add_generation_prompt", *SWITCHES)
_VARIABLES = "".join(
    f"{{% if {name} is defined %}}{{{{ ['{name}', {name}] | tojson(ensure_ascii=true) }}}}\n"
    "{% endif %}"
    for name in _NAMES
)


class TemplateLimitError(PromptError):
    """A template took more than it may, and would do so again."""


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`, or transformers' own.
        messages: with "role" and "content".
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message's turn open instead.
        settings: more variables of the template, such as tools.

    Raises `PromptError` for messages that transformers or the template refuses, its subclass
    `TemplateLimitError` for a template that takes too long or too much memory, and `SettingsError`
    for a variable that cannot be set.
    """
    own, is_code = _own(tokenizer)
    settings = dict(settings or {})
    for name in settings:
        if name in _RESERVED or not isinstance(name, str):
            raise SettingsError(f"chat_template_kwargs cannot set {brief(name)}.")
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    with ErrorWrapper(PromptError, "The chat template refuses these messages", _ERRORS):
        if is_code:
            how |= {"continue_final_message": continue_final_message, **settings}
            return _by_code(tokenizer, list(messages), how)
        template = own.get_chat_template(tools=settings.get("tools"))
        copies = list(map(dict, messages))
        if continue_final_message:
            copies[-1]["content"] += _TAG
        how |= {name: settings.pop(name) for name in _NAMES if name in settings}
        lines = own.apply_chat_template(copies, chat_template=_VARIABLES, **how)
        variables = dict(map(json.loads, lines.split("\n")[:-1]))
        text = _rendered(template, {**own.special_tokens_map, **settings, **variables})
    if not continue_final_message:
        return text
    if (at := text.rfind(_TAG.strip())) < 0:
        raise PromptError("The chat template leaves out the message to continue.")
    return text[:at] if text[at:].startswith(_TAG) else text[:at].rstrip()


def _own(tokenizer: Any) -> tuple[Any, bool]:
    """transformers' tokenizer, and whether its chat template is code."""
    base = PreTrainedTokenizerBase
    is_bare = isinstance(tokenizer, base)
    own = tokenizer if is_bare else tokenizer._tokenizer
    is_code = type(own).apply_chat_template is not base.apply_chat_template
    return own, is_code or not (is_bare or tokenizer._chat_template is None)


def _by_code(tokenizer: Any, messages: list[Any], how: dict[str, Any]) -> str:
    """The text of a template that is code: a tokenizer's own method, or a function of mlx-lm's."""
    if any(name in how for name in SWITCHES):
        return str(tokenizer.apply_chat_template(messages, **how))
    own, _ = _own(tokenizer)
    function = None if own is tokenizer else tokenizer._chat_template
    if function is None:
        return str(own.apply_chat_template(messages, **how))
    del how["tokenize"]
    return str(function(messages, **how))


def thinking_switches(tokenizer: Any, think: bool) -> dict[str, bool]:
    """The variables that make a chat template think, or not; empty if it has no switch."""
    return {name: think for name in SWITCHES if template_reads(tokenizer, name)}


def template_reads(tokenizer: Any, name: str) -> bool:
    """Whether a chat template mentions a variable.

    One that is code may read any; its switch has its first name for mlx-lm.
    """
    own, is_code = _own(tokenizer)
    if is_code:
        return name != SWITCHES[1]
    if own.chat_template is None:
        return False
    # Neither a field of that name nor a text: message.thinking, 'thinking'.
    variable = rf"(?<![\w.'\"]){name}(?![\w'\"])"
    return re.search(variable, own.get_chat_template() or "") is not None


def _rendered(template: str, variables: Mapping[str, Any]) -> str:
    """A template's text. Raises `TemplateLimitError`, and `TemplateError` for one inside."""
    request = json.dumps({"template": template, "variables": variables}).encode()
    most = MAX_ADDED + MAX_GROWTH * (len(request) - len(template))
    try:
        result = json.loads(worker().call(request, most).decode(errors="surrogatepass"))
    except WorkerLimitError as error:
        raise TemplateLimitError(f"The chat template {error}") from error
    if "error" in result:
        raise TemplateError(result["error"])
    return str(result["text"])


@cache
def worker() -> Worker:
    """The one that all templates of this process share."""
    return Worker("dflash_mlx.template_worker:render", SECONDS)

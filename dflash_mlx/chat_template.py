"""Turns chat messages into text with the chat template of a model.

A template is a program that comes with the model. transformers runs it in jinja2's sandbox, and we
stop it after some time: a template that never ends would keep a server's thread forever. Templates
get only the variables that the caller sets. mlx-lm's `TokenizerWrapper` would also tell every
template whether to think.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .deadline import run_within
from .errors import PromptError, SettingsError
from .validation import ErrorWrapper, brief

TEMPLATE_SECONDS = 10.0  # how long a template may run
# What jinja2, transformers, and templates that are Python code raise for invalid messages.
_ERRORS = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
SWITCHES = ("enable_thinking", "thinking")  # what templates call the switch for thinking
_PARAMETERS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
# Variables that a caller cannot set, because apply_chat_template or this module sets them.
_RESERVED = (_PARAMETERS | {"messages", "tokenizer"}) - {"tools", "documents"}


class TemplateLimitError(PromptError):
    """A template ran too long. It would do so again."""


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Turn a chat into text.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`, or a tokenizer of transformers.
        messages: the chat, each message with "role" and "content".
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message's turn open instead.
        settings: more variables of the template, such as tools.

    Raises `PromptError` for messages that transformers or the template refuses, its subclass
    `TemplateLimitError` for a template that takes too long, and `SettingsError` for a variable that
    cannot be set.
    """
    settings = dict(settings or {})
    for name in settings:
        if name in _RESERVED or not isinstance(name, str):
            raise SettingsError(f"chat_template_kwargs cannot set {brief(name)}.")
    arguments = {
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **settings,
    }
    copies = list(map(dict, messages))
    if _template_is_code(tokenizer):
        render = partial(_render_by_code, tokenizer, copies, arguments)
    else:
        render = partial(_unwrapped(tokenizer).apply_chat_template, copies, **arguments)
    with ErrorWrapper(PromptError, "The chat template refuses these messages", _ERRORS):
        try:
            return str(run_within(TEMPLATE_SECONDS, render))
        except TimeoutError as error:
            message = f"The chat template takes longer than {TEMPLATE_SECONDS:g} seconds."
            raise TemplateLimitError(message) from error
        except ValueError as error:
            if "continue_final_message is set" not in str(error):
                raise
            # The message of transformers would repeat the whole chat.
            message = "The chat template leaves out the message to continue."
            raise PromptError(message) from error


def _unwrapped(tokenizer: Any) -> Any:
    """Return transformers' tokenizer, without mlx-lm's wrapper."""
    is_wrapped = not isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer._tokenizer if is_wrapped else tokenizer


def _template_is_code(tokenizer: Any) -> bool:
    """Whether Python code of the model, or of mlx-lm, replaces the template."""
    unwrapped = _unwrapped(tokenizer)
    method = type(unwrapped).apply_chat_template
    if method is not PreTrainedTokenizerBase.apply_chat_template:
        return True
    return unwrapped is not tokenizer and tokenizer._chat_template is not None


def _render_by_code(tokenizer: Any, messages: list[Any], arguments: dict[str, Any]) -> str:
    """Turn a chat into text with a method of the tokenizer, or with a function of mlx-lm."""
    if any(name in arguments for name in SWITCHES):
        # mlx-lm's wrapper adds a switch only if there is none, so it can be called.
        return str(tokenizer.apply_chat_template(messages, **arguments))
    unwrapped = _unwrapped(tokenizer)
    function = None if unwrapped is tokenizer else tokenizer._chat_template
    if function is None:
        return str(unwrapped.apply_chat_template(messages, **arguments))
    del arguments["tokenize"]  # mlx-lm's functions always return text
    return str(function(messages, **arguments))


def thinking_switches(tokenizer: Any, think: bool) -> dict[str, bool]:
    """Return the variables that turn a chat template's thinking on or off.

    The result is empty if the template has no such switch.
    """
    return {name: think for name in SWITCHES if template_reads(tokenizer, name)}


def template_reads(tokenizer: Any, name: str) -> bool:
    """Whether a chat template mentions a variable.

    A template that is code may read any. mlx-lm always calls its switch `enable_thinking`.
    """
    if _template_is_code(tokenizer):
        return name != SWITCHES[1]
    unwrapped = _unwrapped(tokenizer)
    if unwrapped.chat_template is None:
        return False
    # A variable, but neither a field (message.thinking) nor a string ('thinking').
    variable = rf"(?<![\w.'\"]){name}(?![\w'\"])"
    return re.search(variable, unwrapped.get_chat_template() or "") is not None

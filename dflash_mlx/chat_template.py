"""Chat messages -> text, by the chat template of a model.

A template is a program that comes with the model. transformers runs it in jinja2's sandbox, for a
limited time: one that never ends would keep a server's thread for ever. Nothing is passed but what
the caller sets: mlx-lm's `TokenizerWrapper` would tell every template to think or not.
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

SECONDS = 10.0  # of a template
# What jinja2, transformers, and templates that are Python code raise for messages.
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
# Variables that cannot be set: parameters of apply_chat_template, and the conversation.
_RESERVED = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "tokenizer"),
} - {"tools", "documents"}


class TemplateLimitError(PromptError):
    """A template took longer than it may, and would do so again."""


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
    `TemplateLimitError` for a template that takes too long, and `SettingsError` for a variable that
    cannot be set.
    """
    settings = dict(settings or {})
    for name in settings:
        if name in _RESERVED or not isinstance(name, str):
            raise SettingsError(f"chat_template_kwargs cannot set {brief(name)}.")
    how = {
        "tokenize": False,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **settings,
    }
    own, is_code = _own(tokenizer)
    copies = list(map(dict, messages))
    render = partial(_by_code, tokenizer, copies, how)
    if not is_code:
        render = partial(own.apply_chat_template, copies, **how)
    with ErrorWrapper(PromptError, "The chat template refuses these messages", _ERRORS):
        try:
            return str(run_within(SECONDS, render))
        except TimeoutError as error:
            message = f"The chat template takes longer than {SECONDS:g} seconds."
            raise TemplateLimitError(message) from error
        except ValueError as error:
            if "continue_final_message is set" not in str(error):
                raise
            message = "The chat template leaves out the message to continue."
            raise PromptError(message) from error  # transformers' own repeats the whole chat


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

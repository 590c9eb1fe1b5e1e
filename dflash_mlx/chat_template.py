"""Chat messages -> text, by the chat template of a model.

A template is a program that comes with the model. It may build gigabytes or never end, which no
sandbox prevents. So it runs in a process of its own with bounds on time and memory. transformers
and mlx-lm prepare the template's variables: they render a template of ours that prints them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from . import template_worker
from .errors import PromptError

ON_MAC = sys.platform == "darwin"
SECONDS = 10  # of a template
MAX_GROWTH, MAX_ADDED = 4, 2**20  # bytes of a text: for each of the messages, and beside them
STEP = 0.05  # seconds between looks at its memory
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_NAMES = ("messages", "tools", "add_generation_prompt", "enable_thinking", "thinking")
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
    **settings: Any,
) -> str:
    """The text of a chat.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`, or transformers' own.
        messages: with "role" and "content".
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message's turn open instead.
        settings: more variables of the template, such as tools.

    Raises `TemplateLimitError` for a template that takes too long or too much memory, and whatever
    transformers raises for messages that are none, or jinja2 for a template that refuses them.
    """
    is_bare = isinstance(tokenizer, PreTrainedTokenizerBase)
    own: Any = tokenizer if is_bare else tokenizer._tokenizer
    is_code = type(own).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
    if is_code or not (is_bare or tokenizer._chat_template is None):
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **settings,
            )
        )
    template = own.get_chat_template(tools=settings.get("tools"))
    copies = list(map(dict, messages))
    if continue_final_message:
        copies[-1]["content"] += _TAG
    lines = tokenizer.apply_chat_template(
        copies,
        chat_template=_VARIABLES,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **{name: settings.pop(name) for name in _NAMES if name in settings},
    )
    variables = dict(map(json.loads, lines.split("\n")[:-1]))
    text = _worker().render(template, {**own.special_tokens_map, **settings, **variables})
    if not continue_final_message:
        return text
    if (at := text.rfind(_TAG.strip())) < 0:
        raise PromptError("The chat template leaves out the message to continue.")
    return text[:at] if text[at:].startswith(_TAG) else text[:at].rstrip()


def template_reads(tokenizer: Any, name: str) -> bool:
    """Whether a chat template mentions a variable. One that is code may read any."""
    own = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else tokenizer._tokenizer
    if type(own).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return True
    # Neither a field of that name nor a text: message.thinking, 'thinking'.
    variable = rf"(?<![\w.'\"]){name}(?![\w'\"])"
    return re.search(variable, own.get_chat_template() or "") is not None


class TemplateWorker:
    """Renders templates in a process, which it starts when it needs one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Any = None  # ends the process; None before the first one

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """A template's text. Raises `TemplateLimitError`, and `TemplateError` for one inside."""
        request = json.dumps({"template": template, "variables": variables}).encode()
        most = MAX_ADDED + MAX_GROWTH * (len(request) - len(template))
        with self._lock:
            if self._end is None or not self._end.alive or self._process.poll() is not None:
                self._start()
            try:
                self._socket.send_bytes(request)
                self._wait()
                answer = self._socket.recv_bytes(most).decode(errors="surrogatepass")
            except (EOFError, OSError) as error:
                self._end()
                raise TemplateLimitError(
                    "The chat template takes too much memory or text."
                ) from error
        result = json.loads(answer)
        if "error" in result:
            raise TemplateError(result["error"])
        return str(result["text"])

    def _start(self) -> None:
        self._socket, other = Pipe()
        command = [sys.executable, "-I", template_worker.__file__, str(other.fileno())]
        self._process = subprocess.Popen(
            [*command, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,  # Ctrl-C is not for it
        )
        other.close()
        self._end = weakref.finalize(self, _kill, self._process)
        with suppress(EOFError):  # it has ended, which `render` notices
            self._socket.recv_bytes()  # it is ready: that time is not the template's

    def _wait(self) -> None:
        """Wait for an answer. Raises `OSError` if it takes too much memory."""
        end = time.monotonic() + SECONDS
        while not self._socket.poll(STEP):
            if time.monotonic() > end:
                self._end()
                raise TemplateLimitError(f"The chat template takes longer than {SECONDS} seconds.")
            if ON_MAC and memory_of(self._process.pid) > template_worker.MEMORY:
                raise OSError("macOS limits no process's memory")


def memory_of(process: int) -> int:
    """Bytes of memory that a process has, 0 for none."""
    ps = ["ps", "-o", "rss=", "-p", str(process)]
    return 1024 * int(subprocess.run(ps, capture_output=True).stdout or 0)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@cache
def _worker() -> TemplateWorker:
    """The one that all templates of this process share."""
    return TemplateWorker()

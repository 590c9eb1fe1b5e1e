"""Chat templates render as in transformers, and one that never ends is stopped."""

import contextlib
import os
import signal
import threading

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tinymodels import wrapped

from dflash_mlx import chat_template
from dflash_mlx.chat_template import TemplateLimitError, apply_chat_template
from dflash_mlx.deadline import run_within
from dflash_mlx.errors import PromptError, SettingsError

MESSAGES = [
    {"role": "system", "content": "é \U0001f600 <b>\u2028"},
    {"role": "user", "content": "hello", "name": None},
    {"role": "assistant", "content": "I think ", "reasoning_content": "so", "n": [1, (2.5, None)]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": [], "a": "ü"}}}]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}",
    "{{ bos_token }}{{ eos_token }}{{ colour }}{{ enable_thinking }}{{ add_generation_prompt }}",
    "{{ enable_thinking is defined }}{{ thinking is defined }}{{ reasoning_effort is defined }}"
    "{{ documents is defined }}{{ documents is none }}{{ tools is none }}",
    "{% for d in documents or () %}{{ d.title }}: {{ d.text }}\n{% endfor %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
    "{% generation %}{{ m.content | trim }}\n{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ dict(a=1).items() | list }}{{ messages[2].thinking }}{{ x is defined }}",
]
# Two nested loops of 99,999 steps take far longer than the time limit.
LOOP = "{% for i in range(99999) %}"
ENDLESS = [
    f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    f"{LOOP}{LOOP}x{{% endfor %}}{{% endfor %}}",
    f"{{% macro f() %}}{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}{{% endmacro %}}{{{{ f() }}}}",
    "{% for i in range(99999) | sort %}{{ range(99999) | map('string') | join | length }}"
    "{% endfor %}",
    "{{ lipsum(n=100000) }}",
]
FAILING = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 2**62 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].content / 2 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{",
]


def wait_for_new_threads_to_end(earlier_threads):
    """Wait until every thread that is not one of these has ended."""
    for thread in set(threading.enumerate()) - earlier_threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def tokenizer():
    """A tokenizer whose chat template a test may change."""
    tokenizer = wrapped()
    template = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = template


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_renders_the_text_that_transformers_renders(template, tokenizer):
    tokenizer.chat_template = template
    documents = [{"title": "é", "text": "So."}]
    for settings in (
        {},
        {"tools": TOOLS, "colour": "red"},
        {"documents": documents, "enable_thinking": False, "reasoning_effort": "low"},
    ):
        for add_prompt in (True, False):
            text = apply_chat_template(tokenizer, MESSAGES, add_prompt, settings=settings)
            assert text == tokenizer._tokenizer.apply_chat_template(
                MESSAGES, tokenize=False, add_generation_prompt=add_prompt, **settings
            )


def test_a_template_that_is_a_function_gets_only_the_settings_given(tokenizer):
    """mlx-lm's wrapper would pass `enable_thinking` even if the caller did not."""

    def template(messages, **settings):
        return f"{messages[0]['content']} {sorted(settings.items())}"

    tokenizer = TokenizerWrapper(tokenizer._tokenizer, chat_template=template)
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    for settings in ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"colour": "red"}):
        expected = template(MESSAGES, **defaults, **settings)
        assert apply_chat_template(tokenizer, MESSAGES, settings=settings) == expected


def test_documents_that_are_not_objects_are_refused(tokenizer):
    with pytest.raises(PromptError, match="Documents should be a list"):
        apply_chat_template(tokenizer, MESSAGES, settings={"documents": ["text"]})


@pytest.mark.parametrize("name", ["messages", "tokenizer", "add_generation_prompt", "tokenize", 1])
def test_reserved_variables_cannot_be_set(name, tokenizer):
    with pytest.raises(SettingsError, match="chat_template_kwargs cannot set"):
        apply_chat_template(tokenizer, MESSAGES, settings={name: True})


@pytest.mark.parametrize("content_filter", ["", " | trim"])
def test_a_last_message_is_continued(content_filter, tokenizer):
    """The text stops after the last message's content, also where the template trims it."""
    content = "{{ m.content" + content_filter + " }}"
    tokenizer.chat_template = "{% for m in messages %}[" + content + "]{% endfor %}"
    text = apply_chat_template(tokenizer, MESSAGES, False, continue_final_message=True)
    assert text == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )


def test_a_message_that_the_template_leaves_out_cannot_be_continued(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(PromptError, match="leaves out the message to continue"):
        apply_chat_template(tokenizer, MESSAGES, False, continue_final_message=True)


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_a_template_that_never_ends_is_stopped(template, tokenizer, monkeypatch):
    """An error is raised, the rendering thread ends, and the next template is rendered."""
    threads = set(threading.enumerate())
    tokenizer.chat_template = template
    with monkeypatch.context() as shorter, pytest.raises(TemplateLimitError, match="takes longer"):
        shorter.setattr(chat_template, "TEMPLATE_SECONDS", 0.1)
        apply_chat_template(tokenizer, MESSAGES)
    wait_for_new_threads_to_end(threads)
    tokenizer.chat_template = TEMPLATES[0]
    assert "hello" in apply_chat_template(tokenizer, MESSAGES)


@pytest.mark.parametrize("template", FAILING, ids=range(len(FAILING)))
def test_a_template_that_fails_raises_an_error_of_one_line(template, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(PromptError) as caught:
        apply_chat_template(tokenizer, MESSAGES)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400


@pytest.fixture
def ctrl_c():
    """Make SIGINT raise `KeyboardInterrupt`; a shell's background jobs would ignore the signal."""
    earlier_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier_handler)


def test_ctrl_c_in_run_within_ends_the_call_and_its_thread(ctrl_c):
    """`run_within` waits for a call in another thread. Ctrl-C must end both."""
    threads = set(threading.enumerate())

    def endless():
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        run_within(60, endless)
    wait_for_new_threads_to_end(threads)


def test_run_within_raises_again_when_its_exception_is_lost():
    """`run_within` ends a late call with a SystemExit, which may be swallowed.

    Python drops an exception that is raised inside a finalizer, and a finalizer may run at any
    time. Here the call itself swallows the first three.
    """
    threads = set(threading.enumerate())

    def endless():
        for _ in range(3):
            with contextlib.suppress(SystemExit):
                while True:
                    pass

    with pytest.raises(TimeoutError):
        run_within(0.01, endless)
    wait_for_new_threads_to_end(threads)

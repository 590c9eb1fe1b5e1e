"""Chat templates say what they say in transformers, and one that never ends is ended."""

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

SAID = [
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
LOOP = "{% for i in range(99999) %}"
ENDLESS = [
    f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    f"{LOOP}{LOOP}x{{% endfor %}}{{% endfor %}}",
    f"{{% macro f() %}}{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}{{% endmacro %}}{{{{ f() }}}}",
    "{% for i in range(99999) | sort %}{{ range(99999) | map('string') | join | length }}"
    "{% endfor %}",
    "{{ lipsum(n=100000) }}",
]
REFUSED = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 2**62 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].content / 2 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{",
]


def wait_for_others_to_end(threads):
    """Wait until every thread but these has ended."""
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def speaker():
    """A tokenizer whose template a test may change."""
    speaker = wrapped()
    before = speaker.chat_template
    yield speaker
    speaker.chat_template = before


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_rendered_text_is_that_of_transformers(template, speaker):
    speaker.chat_template = template
    documents = [{"title": "é", "text": "So."}]
    for settings in (
        {},
        {"tools": TOOLS, "colour": "red"},
        {"documents": documents, "enable_thinking": False, "reasoning_effort": "low"},
    ):
        for prompt in (True, False):
            text = apply_chat_template(speaker, SAID, prompt, settings=settings)
            assert text == speaker._tokenizer.apply_chat_template(
                SAID, tokenize=False, add_generation_prompt=prompt, **settings
            )


def test_a_template_that_is_code_gets_only_the_settings_given(speaker):
    """mlx-lm's wrapper would always pass a choice of thinking, asked or not."""

    def by_code(messages, **settings):
        return f"{messages[0]['content']} {sorted(settings.items())}"

    speaker = TokenizerWrapper(speaker._tokenizer, chat_template=by_code)
    asked = {"add_generation_prompt": True, "continue_final_message": False}
    for settings in ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"colour": "red"}):
        expected = by_code(SAID, **asked, **settings)
        assert apply_chat_template(speaker, SAID, settings=settings) == expected


def test_documents_are_a_list_of_objects(speaker):
    with pytest.raises(PromptError, match="Documents should be a list"):
        apply_chat_template(speaker, SAID, settings={"documents": ["text"]})


@pytest.mark.parametrize("name", ["messages", "tokenizer", "add_generation_prompt", "tokenize", 1])
def test_reserved_variables_cannot_be_set(name, speaker):
    with pytest.raises(SettingsError, match="chat_template_kwargs cannot set"):
        apply_chat_template(speaker, SAID, settings={name: True})


@pytest.mark.parametrize("spaces", ["", " | trim"])
def test_a_last_message_is_continued(spaces, speaker):
    speaker.chat_template = f"{{% for m in messages %}}[{{{{ m.content{spaces} }}}}]{{% endfor %}}"
    text = apply_chat_template(speaker, SAID, False, continue_final_message=True)
    assert text == speaker.apply_chat_template(
        SAID, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    speaker.chat_template = "{{ messages[0].content }}"
    with pytest.raises(PromptError, match="leaves out the message to continue"):
        apply_chat_template(speaker, SAID, False, continue_final_message=True)


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_a_template_that_never_ends_is_ended(template, speaker, monkeypatch):
    """The error is one line, the thread ends, and the next template is rendered."""
    threads = set(threading.enumerate())
    speaker.chat_template = template
    with monkeypatch.context() as shorter, pytest.raises(TemplateLimitError, match="takes longer"):
        shorter.setattr(chat_template, "TEMPLATE_SECONDS", 0.1)
        apply_chat_template(speaker, SAID)
    wait_for_others_to_end(threads)
    speaker.chat_template = TEMPLATES[0]
    assert "hello" in apply_chat_template(speaker, SAID)


@pytest.mark.parametrize("template", REFUSED, ids=range(len(REFUSED)))
def test_a_template_that_fails_is_one_line(template, speaker):
    speaker.chat_template = template
    with pytest.raises(PromptError) as told:
        apply_chat_template(speaker, SAID)
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


@pytest.fixture
def ctrl_c():
    """Make SIGINT raise `KeyboardInterrupt`, also in a background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_waiting_ends_the_call(ctrl_c):
    """Ctrl-C raises in the waiting thread, and ends the call in the other one."""
    threads = set(threading.enumerate())

    def endless():
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        run_within(60, endless)
    wait_for_others_to_end(threads)


def test_run_within_raises_again_when_its_exception_is_lost():
    """Python drops an exception that is raised inside a finalizer, which may run at any time."""
    threads = set(threading.enumerate())

    def endless():
        for _ in range(3):
            with contextlib.suppress(SystemExit):
                while True:
                    pass

    with pytest.raises(TimeoutError):
        run_within(0.01, endless)
    wait_for_others_to_end(threads)

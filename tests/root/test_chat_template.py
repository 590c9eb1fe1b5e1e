"""Chat templates say what they say in transformers, and none ends the process or fills memory."""

import resource

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tinymodels import wrapped

from dflash_mlx import worker as bounds
from dflash_mlx.chat_template import apply_chat_template, worker
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
BOMBS = [
    "{{ lipsum(n=100000) }}",
    "{{ 'x' | center(3000000000) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 'x' * 2**22 }}",
    "{{ '%3000000000d' % 1 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no') }}",
    "{{",
]


@pytest.fixture
def speaker():
    """A tokenizer whose template a test may change."""
    speaker = wrapped()
    before = speaker.chat_template
    yield speaker
    speaker.chat_template = before


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_text_is_what_transformers_makes_of_it(template, speaker):
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


def test_a_template_that_is_code_gets_no_choice_that_nobody_made(speaker):
    """mlx-lm's wrapper would always tell it to think, or not to."""

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


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_a_template_that_never_ends_is_ended(template, speaker, monkeypatch):
    """In one line, and the next template is rendered."""
    earlier = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # KiB, other tests'
    speaker.chat_template = template
    with monkeypatch.context() as shorter, pytest.raises(PromptError):
        shorter.setattr(worker(), "seconds", 0.5)
        apply_chat_template(speaker, SAID)
    speaker.chat_template = TEMPLATES[0]
    assert "hello" in apply_chat_template(speaker, SAID)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(2**20, earlier + 1)


def test_on_a_mac_memory_is_watched(speaker, monkeypatch):
    monkeypatch.setattr(bounds, "ON_MAC", True)
    monkeypatch.setattr(bounds, "memory_of", lambda process: 2**30)
    speaker.chat_template = BOMBS[6]
    with pytest.raises(PromptError, match="too much memory"):
        apply_chat_template(speaker, SAID)

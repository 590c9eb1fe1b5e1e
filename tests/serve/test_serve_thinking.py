"""Fields that turn thinking on and off, and variables of the chat template."""

import pytest
from dialects import CHAT, GENERATE, MESSAGES, OLLAMA, RESPONSES, post_ok
from serving import FakeEngine, make_target


@pytest.fixture(scope="module")
def target():
    return make_target("json_tools")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"reasoning": {"effort": "none"}}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"thinking": {"type": "disabled"}}),
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"chat_template_kwargs": {"thinking": False}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (OLLAMA, {"think": False, "stream": False}),
    ],
)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking", "other"])
def test_thinking_is_off_by_any_name(path, more, switch):
    """Clients and templates have several names for it.

    A header says so if the template has none of them, and the model thinks nevertheless.
    """
    template = f"{{% if {switch} is false %}}calm{{% endif %}}{{{{ messages[0].content }}}}"
    engine = FakeEngine(make_target(template=template, thinking=""))
    answer = post_ok(engine, path, more, chat_template_kwargs={switch: True})
    switchable = switch != "other"
    assert engine.prompt() == ("calmHi" if switchable else "Hi")
    assert answer.headers.get("x-dflash-ignored") == (None if switchable else "thinking")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA, GENERATE])
@pytest.mark.parametrize("added", [(), ("<think>", "</think>")])
def test_without_a_choice_of_thinking_the_template_gets_no_variable(path, added):
    names = ("enable_thinking", "thinking", "reasoning_effort")
    template = "".join(f"{{{{ {name} is defined }}}}" for name in names)
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}", added=added))
    post_ok(engine, path, {})
    assert engine.prompt() == "FalseFalseFalseHi"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_thinking_between_tools_does_not_switch_the_template(engine, path):
    answer = post_ok(engine, path, {"thinking": {"type": "between_tools"}})
    assert answer.headers["x-dflash-ignored"] == "thinking between_tools"


def test_documents_reach_a_template_that_reads_them():
    template = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ documents is none }}"
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}"))
    post_ok(engine, CHAT, {})
    assert engine.prompt() == "TrueHi"
    post_ok(engine, CHAT, {"chat_template_kwargs": {"documents": [{"text": "Read."}]}})
    assert engine.prompt() == "Read.FalseHi"


@pytest.mark.parametrize(("think", "shown"), [(False, "off"), (True, "on"), ("low", "onlow")])
def test_ollamas_think_sets_the_switch_and_the_effort(think, shown):
    template = "{{ 'off' if enable_thinking is false else 'on' }}{{ reasoning_effort }}"
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}"))
    post_ok(engine, OLLAMA, {"think": think})
    assert engine.prompt() == shown + "Hi"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (OLLAMA, {"think": True}),
        (MESSAGES, {"thinking": {"type": "enabled"}, "max_tokens": 3}),
        (CHAT, {"reasoning_effort": "low"}),
    ],
)
def test_a_header_says_that_the_model_does_not_think(engine, path, more):
    assert post_ok(engine, path, more).headers["x-dflash-ignored"] == "thinking"
    thinks = FakeEngine(make_target("json_tools", thinking="<think>\n"))
    assert post_ok(thinks, path, more).headers.get("x-dflash-ignored") != "thinking"
    assert "x-dflash-ignored" not in post_ok(engine, OLLAMA, {"think": False}).headers

"""Thinking is switched by the chat template; a warning says where the template has no switch."""

import json
import shutil

import pytest
from program import run
from serving import make_target
from tinymodels import target

import dflash_mlx as dm
from dflash_mlx.cli import generate_summary
from dflash_mlx.cli import pair as pair_module
from dflash_mlx.cli.answer import Thoughts
from dflash_mlx.cli.options import Names
from dflash_mlx.errors import SettingsError
from dflash_mlx.events import Event, Stats
from dflash_mlx.loading.registry import KnownDrafter
from dflash_mlx.prompt import encode_prompt, thinking_variables, thinks

MESSAGES = [{"role": "user", "content": "The fox"}]
# Has a switch like Qwen3's template.
TEMPLATE = """{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and
 not enable_thinking %}: quick{% endif %}{{ reasoning_effort }}"""


@pytest.fixture
def switching(monkeypatch):
    """A target whose chat template can turn thinking off and has one reasoning effort."""
    model = target("qwen3")
    monkeypatch.setattr(model.tokenizer._tokenizer, "chat_template", TEMPLATE)
    return model


def prompt_text(model, **settings):
    """The prompt that the chat template makes of MESSAGES."""
    ids = encode_prompt(model, MESSAGES, thinking_variables(model.tokenizer, **settings))
    return model.tokenizer.decode(ids)


def test_the_template_decides_what_a_switch_does(switching):
    default = prompt_text(switching)
    assert prompt_text(switching, think=True) == default
    assert prompt_text(switching, think=False) == default + ": quick"
    assert prompt_text(switching, reasoning_effort="low") == default + "low"
    assert thinks(switching.tokenizer, {}) is True
    assert thinks(switching.tokenizer, {"enable_thinking": False}) is False


@pytest.mark.parametrize("added", [(), ("<think>", "</think>"), ("<|channel>", "<channel|>")])
@pytest.mark.parametrize("asks", ["enable_thinking", "not enable_thinking"])
def test_without_a_choice_of_thinking_the_template_decides(asks, added):
    """The text is that of transformers, whatever tokens for thoughts the vocabulary has.

    The template adds " told" if `enable_thinking` is given and has one of its two values.
    """
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += f"{{% if enable_thinking is defined and {asks} %}} told{{% endif %}}"
    model = make_target(template=template, added=added)
    expected = model.tokenizer._tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert prompt_text(model) == expected == "The fox"
    value = asks == "enable_thinking"
    assert prompt_text(model, think=value) == "The fox told"
    assert prompt_text(model, think=not value) == expected
    assert thinks(model.tokenizer, {}) is not value


def test_the_settings_reach_every_request(switching):
    def tokens(**settings):
        result = dm.generate(switching, None, MESSAGES, max_tokens=1, **settings)
        return result.stats.prompt_tokens

    kwargs = {"enable_thinking": False}
    assert tokens(think=False) == tokens(chat_template_kwargs=kwargs) > tokens(think=True)
    with pytest.raises(SettingsError, match="low, medium or high"):
        tokens(reasoning_effort="most")


def test_a_switch_that_the_template_does_not_have_gives_a_warning():
    model = target("qwen3")
    with pytest.warns(UserWarning, match=r"think=False \(--no-think\) changes nothing"):
        assert prompt_text(model, think=False) == prompt_text(model)
    assert thinks(model.tokenizer, {}) is None


def test_a_note_says_that_the_drafter_was_trained_with_thoughts(switching, monkeypatch, capsys):
    facts = KnownDrafter("x/y", thinking=True)
    monkeypatch.setattr(pair_module, "known_facts", lambda name: facts if name == "x/y" else None)
    names = Names("somebody/model", "x/y+lookup")
    for think in (False, True):
        pair_module.note_training(switching, names, {"think": think, "reasoning_effort": None})
    assert capsys.readouterr().err.count("with thoughts: --think may be faster") == 1


def test_thoughts_and_the_answer_are_shown_and_counted_separately():
    model = make_target(thinking="<think>\n")
    encode = model.tokenizer.encode
    texts = ("Hm", " so", ".\n</think>\n\nYes", ".")
    steps = [encode(text, add_special_tokens=False) for text in texts]
    thoughts = Thoughts(model, encode("Hi<think>\n"))
    stats = Stats()
    shown = []
    for number, tokens in enumerate(steps):
        stats.rounds = number  # the prefill brings the first token
        event = Event(
            model.tokenizer.decode(tokens),
            tokens=tokens,
            accepted=0,
            drafted=0,
            finish_reason="stop" if number == len(steps) - 1 else None,
            stats=stats,
        )
        shown += thoughts.split(event)
    assert "".join(text for text, is_thought in shown if is_thought).strip() == "Hm so."
    assert "".join(text for text, is_thought in shown if not is_thought) == "Yes."
    # The step in which the thoughts end is counted with them.
    thought_tokens = sum(map(len, steps[:3]))
    answer_tokens = len(steps[3])
    assert (thoughts.tokens, thoughts.rounds) == (thought_tokens, 2)
    stats.output_tokens = thought_tokens + answer_tokens
    summary = f"{thought_tokens / 2:.1f} tokens per step; answer: {answer_tokens} token"
    assert summary in generate_summary._thoughts_and_answer(stats, thoughts)


def test_the_zlab_protocol_of_bench_has_prompts_with_and_without_thinking(tmp_path):
    """Without thinking, the template here adds an empty thought, so the prompt is longer."""
    folder = shutil.copytree(f"{dm.__path__[0]}/tiny/target", tmp_path / "target")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "What is 2 plus 2?"}))
    options = ["bench", "--model", folder, "--draft", f"{dm.__path__[0]}/tiny/drafter", "--json"]
    options += ["--suite", "gsm8k", "--data", tmp_path, "--protocol", "zlab", "-n", "2"]
    lengths = [
        json.loads(run(*options, option).stdout)["prompts"][0]["prompt_tokens"]
        for option in ("--think", "--no-think")
    ]
    assert lengths[0] < lengths[1]

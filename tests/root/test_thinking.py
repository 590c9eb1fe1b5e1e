"""Thinking on and off: by the chat template where it knows how, and never without a word."""

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

ASKED = [{"role": "user", "content": "The fox"}]
# As Qwen3's.
SWITCH = """{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and
 not enable_thinking %}: quick{% endif %}{{ reasoning_effort }}"""


@pytest.fixture
def switching(monkeypatch):
    """A target whose chat template can turn thinking off and has one reasoning effort."""
    model = target("qwen3")
    monkeypatch.setattr(model.tokenizer._tokenizer, "chat_template", SWITCH)
    return model


def text_of(model, **settings):
    ids = encode_prompt(model, ASKED, thinking_variables(model.tokenizer, **settings))
    return model.tokenizer.decode(ids)


def test_the_template_decides_what_a_switch_does(switching):
    assert text_of(switching) == text_of(switching, think=True)
    assert text_of(switching, think=False) == text_of(switching) + ": quick"
    assert text_of(switching, reasoning_effort="low") == text_of(switching) + "low"
    assert thinks(switching.tokenizer, {}) is True
    assert thinks(switching.tokenizer, {"enable_thinking": False}) is False


@pytest.mark.parametrize("added", [(), ("<think>", "</think>"), ("<|channel>", "<channel|>")])
@pytest.mark.parametrize("asks", ["enable_thinking", "not enable_thinking"])
def test_without_a_choice_of_thinking_the_template_decides(asks, added):
    """The text is that of transformers, whatever tokens for thoughts the vocabulary has."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template += f"{{% if enable_thinking is defined and {asks} %}} told{{% endif %}}"
    model = make_target(template=template, added=added)
    right = model.tokenizer._tokenizer.apply_chat_template(ASKED, tokenize=False)
    assert text_of(model) == right == "The fox"
    told = asks == "enable_thinking"
    assert text_of(model, think=told) == "The fox told" and text_of(model, think=not told) == right
    assert thinks(model.tokenizer, {}) is not told


def test_the_settings_reach_every_request(switching):
    def tokens(**settings):
        result = dm.generate(switching, None, ASKED, max_tokens=1, **settings)
        return result.stats.prompt_tokens

    kwargs = {"enable_thinking": False}
    assert tokens(think=False) == tokens(chat_template_kwargs=kwargs) > tokens(think=True)
    with pytest.raises(SettingsError, match="low, medium or high"):
        tokens(reasoning_effort="most")


def test_a_switch_that_the_template_lacks_is_warned_of():
    model = target("qwen3")
    with pytest.warns(UserWarning, match=r"think=False \(--no-think\) changes nothing"):
        assert text_of(model, think=False) == text_of(model)
    assert thinks(model.tokenizer, {}) is None


def test_a_note_says_that_the_drafter_was_trained_with_thoughts(switching, monkeypatch, capsys):
    facts = KnownDrafter("x/y", thinking=True)
    monkeypatch.setattr(pair_module, "known_facts", lambda name: facts if name == "x/y" else None)
    names = Names("somebody/model", "x/y+lookup")
    for think in (False, True):
        pair_module.note_training(switching, names, {"think": think, "reasoning_effort": None})
    assert capsys.readouterr().err.count("with thoughts: --think may be faster") == 1


def test_thoughts_are_shown_apart_and_counted_apart():
    model = make_target(thinking="<think>\n")
    encode = model.tokenizer.encode
    steps = [
        encode(text, add_special_tokens=False) for text in ("Hm", " so", ".\n</think>\n\nYes", ".")
    ]
    thoughts = Thoughts(model, encode("Hi<think>\n"))
    stats = Stats()
    shown = []
    for number, tokens in enumerate(steps):
        stats.rounds = number  # the first comes with the prefill
        text = model.tokenizer.decode(tokens)
        last = tokens is steps[-1]
        shown += thoughts.split(
            Event(
                text,
                tokens=tokens,
                accepted=0,
                drafted=0,
                finish_reason="stop" if last else None,
                stats=stats,
            )
        )
    assert "".join(text for text, thought in shown if thought).strip() == "Hm so."
    assert "".join(text for text, thought in shown if not thought) == "Yes."
    assert (thoughts.tokens, thoughts.rounds) == (sum(map(len, steps[:3])), 2)
    stats.output_tokens = thoughts.tokens + len(steps[3])
    per_step = f"{thoughts.tokens / 2:.1f} tokens per step; answer: {len(steps[3])} token"
    assert per_step in generate_summary._thoughts_and_answer(stats, thoughts)


def test_the_papers_protocol_asks_with_and_without_thoughts(tmp_path):
    """Prompts differ as the template says, here by Qwen3's empty thought."""
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

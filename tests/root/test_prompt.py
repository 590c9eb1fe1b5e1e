"""A prompt in each of its forms, and values that are not prompts."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tinymodels import END, ending_at, target, tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import PromptError
from dflash_mlx.prompt import encode_prompt
from dflash_mlx.targets import Target

# Chat templates that are broken, or raise when they run.
TEMPLATES: list[Any] = [
    "{{ 1 / 0 }}",
    "{{ messages[99].content }}",
    "{{ messages + 5 }}",
    "{{ raise_exception('roles\nmust\nalternate') }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'other' %}",
    "{% set x = [] %}{{ x.pop() }}",
    "{% filter nothing %}{% endfilter %}",
    "{% for m in messages %}",
    "{{ \x00 }}",
    "\ud800",
    "",
    5,
    {"default": "{{ 1 / 0 }}"},
]


MESSAGES = [{"role": "user", "content": "what is 37?"}]


def test_text_is_encoded_without_a_chat_template():
    assert encode_prompt(target(), "The fox") == tokenizer().encode("The fox")


@pytest.mark.parametrize("kind", [list, tuple])
def test_token_ids_become_python_integers(kind):
    ids = encode_prompt(target(), kind([5, np.int64(0), np.uint8(7)]))
    assert ids == [5, 0, 7] and all(type(token) is int for token in ids)


def test_messages_go_through_the_chat_template():
    expected = tokenizer().encode("user: what is 37?\nassistant:")
    assert encode_prompt(target(), MESSAGES) == encode_prompt(target(), tuple(MESSAGES)) == expected


def test_a_message_in_parts_is_read_as_one_text():
    """OpenAI's clients send lists of parts, which a template would print as a Python list."""
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "is 37?"}]
    messages = [{"role": "user", "content": parts}]
    assert encode_prompt(target(), messages) == encode_prompt(target(), MESSAGES)
    assert messages[0]["content"] is parts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a\udcff", "character 2 is .*, a surrogate without its other half"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}], "a surrogate"),
        ("", "empty"),
        ([], "empty"),
        ([-1], "Token id -1 is outside"),
        ([10**400], "is outside the target's vocabulary"),
        ([3, len(tokenizer())], f"Token id {len(tokenizer())} is outside"),
        ([True], "text, a list of token ids, or a list of messages"),
        (b"The fox", "text, a list of token ids, or a list of messages"),
        (mx.array([3, 4]), r"give array.tolist\(\)"),
        (np.array([3, 4]), r"give array.tolist\(\)"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "not 'image_url'",
        ),
        ([{"role": "user", "content": ["text"]}], "parts of text, not 'text'"),
        ([{"role": "user", "content": 5}], "parts of text, not 5"),
        ([1, "two"], "text, a list of token ids, or a list of messages"),
        ([1.0], "text, a list of token ids, or a list of messages"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([MESSAGES[0], 5], "'role' and 'content'"),
        (None, "text, a list of token ids, or a list of messages"),
        (5, "text, a list of token ids, or a list of messages"),
    ],
    ids=str,
)
def test_values_that_are_not_prompts_are_refused(prompt, message):
    with pytest.raises(PromptError, match=message) as caught:
        encode_prompt(target(), prompt)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused():
    small = target(max_position_embeddings=10)
    assert len(encode_prompt(small, [3] * 9)) == 9
    with pytest.raises(PromptError, match="has 10 tokens.* at most 9"):
        encode_prompt(small, [3] * 10)


def with_template(template: str | None) -> Target:
    """A target whose tokenizer has this chat template."""
    changed = ending_at(target())
    changed.tokenizer = type(changed.tokenizer)(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer().backend_tokenizer, eos_token=END, chat_template=template
        )
    )
    return changed


def test_messages_need_a_chat_template():
    with pytest.raises(PromptError, match="no chat template"):
        encode_prompt(with_template(None), MESSAGES)


def test_the_reason_why_a_template_refuses_messages_is_told():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="refuses these messages .roles must alternate"):
        encode_prompt(with_template(template), MESSAGES)


@pytest.mark.parametrize("template", TEMPLATES, ids=repr)
def test_an_error_of_a_template_is_one_line(template):
    """A template that renders after all gives what transformers gives."""
    changed = with_template(template if isinstance(template, str) else repr(template))
    try:
        ids = encode_prompt(changed, MESSAGES)
    except PromptError as error:
        assert str(error).isprintable()
    else:
        assert ids == changed.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)


def test_a_bos_token_in_the_text_is_not_added_again():
    changed = with_template(None)
    transformers_tokenizer = changed.tokenizer._tokenizer
    transformers_tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = transformers_tokenizer.bos_token_id
    transformers_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    changed.vocab_size += 1
    expected = [bos, *tokenizer().encode("fox", add_special_tokens=False)]
    assert encode_prompt(changed, "fox") == encode_prompt(changed, "<s>fox") == expected

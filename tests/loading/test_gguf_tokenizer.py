"""Tokenizers built from a GGUF file's metadata split text as the originals do."""

from typing import Any

import pytest
from ggufs import vocabulary
from tinymodels import LINES, tokenizer
from tokenizers import Regex, pre_tokenizers

from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.gguf.tokenizer import build, end_tokens

# Lines of gsm8k, HumanEval, MBPP and MT-bench (see their licences in ../docs/benchmarks.md).
PROMPTS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many.",
    'def greatest_common_divisor(a: int, b: int) -> int:\n    """ Return a greatest common divisor'
    ' of two integers a and b\n    >>> greatest_common_divisor(25, 15)\n    5\n    """\n',
    "Write a function to find the shared elements from the given two lists.\r\n\tassert [1, 2]",
    "If $f(x) = \\frac{3x-2}{x-2}$, what is the value of $f(-2) +f(-1)+f(0)$?  It's 14/3",
    "naïve café — 中文, 日本語 🙂🚀 \u2028 and 1234567 €\n\n\n   end  ",
]


def pieces(name: str, text: str) -> list[str]:
    """How a text is split before the merges."""
    built = build("a.gguf", vocabulary() | {"tokenizer.ggml.pre": name})
    if built.normalizer is not None:
        text = built.normalizer.normalize_str(text)
    spans = [span for _, span in built.pre_tokenizer.pre_tokenize_str(text)]
    return [text[start:end] for start, end in spans]


def test_it_is_the_original() -> None:
    built = build("a.gguf", vocabulary())
    for line in LINES:
        assert built.encode(line, add_special_tokens=False).ids == tokenizer().encode(line)
        assert built.decode(built.encode(line).ids) == line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["It", "'s", " 1234", " x", ",", " y", "\n", "\n", "z"]),
        ("smollm", ["It", "'s", " ", *"1234", " x", ",", " y", "\n", "\n", "z"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " x", ",", " y", "\n\n", "z"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " x", ",", " y", "\n\n", "z"]),
        ("gpt-4o", ["It's", " ", "123", "4", " x", ",", " y", "\n\n", "z"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " x", ",", " y", "\n\n", "z"]),
        ("deepseek-v3", ["It", "'s", " ", "123", "4", " x", ",", " y", "\n\n", "z"]),
    ],
)
def test_pre_tokenizers_split_as_they_are_named(name: str, expected: list[str]) -> None:
    assert pieces(name, "It's 1234 x, y\n\nz") == expected


def test_llama_3_splits_as_its_own_tokenizer_json() -> None:
    pattern = (  # of meta-llama/Llama-3.1-8B's tokenizer.json
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    original = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in PROMPTS:
        assert pieces("llama-bpe", text) == [part for part, _ in original.pre_tokenize_str(text)]


def test_special_tokens_are_one_token_and_begin_texts_where_the_file_says_so() -> None:
    content: dict[str, Any] = vocabulary()
    end = content["tokenizer.ggml.eos_token_id"]
    begun = build(
        "a", content | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": end}
    )
    assert begun.encode("fox").ids == [end, *build("a", content).encode("fox").ids]
    assert begun.encode("<|end|>fox", add_special_tokens=False).ids[0] == end
    llama3 = content | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": end}
    assert build("a", llama3).encode("fox").ids[0] == end  # files of Llama 3 do not say so
    with pytest.raises(ConfigError, match="bos"):
        build("a", content | {"tokenizer.ggml.add_bos_token": True})


def test_a_text_ends_with_any_of_the_end_tokens() -> None:
    content = vocabulary()
    end = content["tokenizer.ggml.eos_token_id"]
    assert end_tokens("a", content | {"tokenizer.ggml.eot_token_id": 3}) == sorted({3, end})
    turn = content["tokenizer.ggml.tokens"][:-1] + ["<|eot_id|>"]
    types = content["tokenizer.ggml.token_type"][:-1] + [3]
    more = {"tokenizer.ggml.tokens": turn, "tokenizer.ggml.token_type": types}
    assert end_tokens("a", content | more) == sorted({end, len(turn) - 1})
    del content["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ConfigError, match="no text would end"):
        end_tokens("a", content)

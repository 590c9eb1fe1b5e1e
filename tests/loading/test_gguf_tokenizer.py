"""Tokenizers built from the metadata of GGUF files encode text as the originals do."""

import io
import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
import sentencepiece
from ggufs import gguf_of, vocabulary, write
from hypothesis import given
from hypothesis import strategies as st
from tinymodels import LINES, tokenizer
from tokenizers import Regex, pre_tokenizers

import dflash_mlx as dm
from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.gguf import gguf_file
from dflash_mlx.loading.gguf.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, build, end_tokens

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


def test_a_byte_level_tokenizer_encodes_as_the_original() -> None:
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


def test_llama_3_splits_text_as_its_tokenizer_json_does() -> None:
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
    content["tokenizer.ggml.tokens"][end] = "no end"
    with pytest.raises(ConfigError, match="no text would end"):
        end_tokens("a", content)


# SentencePiece: its own library shows which tokens are expected.


def trained() -> sentencepiece.SentencePieceProcessor:
    """Train a model like Llama 2's: bytes for unknown characters, each digit a token."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, *PROMPTS] * 3),
        model_writer=content,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())


def metadata_of(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    ids = range(model.vocab_size())
    kinds = {model.is_byte: BYTE, model.is_control: CONTROL, model.is_unknown: UNKNOWN}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [
            next((kind for is_kind, kind in kinds.items() if is_kind(i)), NORMAL) for i in ids
        ],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


MODEL = trained()
METADATA = metadata_of(MODEL)
BUILT = build("a.gguf", METADATA)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*" ".join(PROMPTS).split(" "), "", "\n"]), max_size=12).map(" ".join),
)


@given(text=TEXTS)
def test_texts_are_encoded_as_sentencepiece_encodes_them(text: str) -> None:
    # SentencePiece writes a space as U+2581, and takes a zero for the end of a text.
    text = text.replace("\u2581", "").replace("\0", "")
    ids = BUILT.encode(text, add_special_tokens=False).ids
    assert ids == MODEL.encode(text)
    assert BUILT.decode(ids) == text


def test_texts_begin_with_the_bos_token_unless_the_file_says_no() -> None:
    assert BUILT.encode("12 men").ids == [MODEL.bos_id(), *MODEL.encode("12 men")]
    bare = build("a.gguf", METADATA | {"tokenizer.ggml.add_bos_token": False})
    assert bare.encode("12 men").ids == MODEL.encode("12 men")


def test_a_file_may_ask_for_no_space_before_the_first_word() -> None:
    bare = build("a.gguf", METADATA | {"tokenizer.ggml.add_space_prefix": False})
    ids = bare.encode("men work", add_special_tokens=False).ids
    assert bare.id_to_token(ids[0])[0] == "m"
    assert bare.decode(ids) == "men work"


def test_gemma_4s_files_have_merges_instead_of_scores() -> None:
    merges = [" ".join(pair) for pair in json.loads(BUILT.to_str())["model"]["merges"]]
    gemma = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    built = build("a.gguf", METADATA | gemma)
    for text in PROMPTS:
        assert built.encode(text).ids == BUILT.encode(text).ids
    for add_bos in (True, False):  # llama.cpp ignores this key for Gemma 4, and adds the token
        built = build("a.gguf", METADATA | gemma | {"tokenizer.ggml.add_bos_token": add_bos})
        assert built.encode("12 men").ids[0] == MODEL.bos_id()


def test_a_model_writes_the_text_that_mlx_lm_writes_with_it(tmp_path: Path) -> None:
    metadata, tensors, _ = gguf_of("llama", vocab_size=MODEL.vocab_size())
    write(tmp_path / "a.gguf", metadata=metadata | METADATA, tensors=tensors, kinds={})
    ours = dm.load(str(tmp_path / "a.gguf"), draft="none")[0]
    theirs = mlx_lm.load(str(gguf_file.converted(tmp_path / "a.gguf", unpacked=True)))
    prompt = [MODEL.bos_id(), *MODEL.encode("12 men work")]
    text = dm.generate(ours, None, "12 men work", max_tokens=24).text
    assert text == mlx_lm.generate(theirs[0], theirs[1], prompt, max_tokens=24)

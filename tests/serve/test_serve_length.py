"""What is far too long is refused before a tokenizer has made anything of it."""

import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Says, a_target, client
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.serve.length import LeastTokens

CORPUS = [
    "the theory of the other --- 3141592653 ======== one     two        three",
    "Größe, déjà vu, 日本語の文章, Ελληνικά ΐ, İstanbul, 한국어, 🦥🦥\n\n\n        indented",
]
LONG = "the theory of the other " * 40_000  # 960 kB


def trained(normalizer=None, sentencepiece=False, **more):
    """A tokenizer of a family, trained on a few words."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=sentencepiece, **more))
    special = ["<|end|>"]
    if sentencepiece:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = []
    else:
        split = pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s?\S+|\s+"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=alphabet,
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def least(tokenizer):
    return LeastTokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
FAMILIES = {
    "byte level": trained(),
    "composed": trained(normalizers.NFC()),
    "sentencepiece": trained(SPACES, sentencepiece=True),
}
LEAST = {name: least(tokenizer) for name, tokenizer in FAMILIES.items()}
PIECES = st.sampled_from([*" \n-=39theor", "the ", "        ", "<|end|>", "日本", "한", "🦥", "="])
DECOMPOSED = st.sampled_from(["ΐ", "é", "Å", "한", "ᾂ", "≯"]).map(
    lambda text: unicodedata.normalize("NFD", text)
)
TEXTS = st.lists(PIECES | DECOMPOSED | st.characters(codec="utf-8")).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=TEXTS | TEXTS.map(lambda text: unicodedata.normalize("NFC", text)))
@settings(max_examples=60)
def test_there_are_never_fewer_tokens_than_it_says(family, text):
    assert LEAST[family].of(text) <= len(FAMILIES[family].encode(text).ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_words_it_says_a_fair_part(family):
    text = LONG[:2400]
    assert 10 * LEAST[family].of(text) > len(FAMILIES[family].encode(text).ids)


@pytest.mark.parametrize(
    "tokenizer",
    [
        SimpleNamespace(),  # written in Python
        trained(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        trained(normalizers.Replace(Regex(" +"), " ")),
        trained(unk_token="<|end|>", fuse_unk=True),
    ],
    ids=["slow", "strips", "shrinks", "unknown"],
)
def test_where_a_token_may_hold_more_than_it_shows_it_says_nothing(tokenizer):
    found = least(tokenizer) if isinstance(tokenizer, Tokenizer) else LeastTokens(tokenizer)
    assert found.of(LONG) == 0


def test_where_a_token_takes_the_spaces_around_it_it_says_nothing():
    tokenizer = trained()
    tokenizer.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
    assert least(tokenizer).of("<|wide|>" + " " * 9000) == 0


@pytest.fixture(scope="module")
def server():
    target = a_target(context=4096)
    encode = target.tokenizer._tokenizer.encode

    def few(text, **more):
        assert len(text) < 100_000, "this was to be refused before"
        return encode(text, **more)

    target.tokenizer._tokenizer.encode = few
    return client(Says(target))


MESSAGES = {"model": "m", "messages": [{"role": "user", "content": LONG}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MESSAGES),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", MESSAGES | {"max_tokens": 9}),
        ("/v1/messages/count_tokens", MESSAGES),
    ],
)
def test_a_prompt_of_a_megabyte_is_refused_unread_in_each_dialects_words(server, path, body):
    answer = server.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    if "messages" in path:
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: ")
        assert "tokens > 4095 maximum" in error["message"]
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]
        assert f"your {error['param']} resulted in" in error["message"]
    assert "or more" in error["message"]


def test_what_may_fit_is_read(server):
    assert server.post("/v1/completions", json={"prompt": LONG[:9000]}).status_code == 200

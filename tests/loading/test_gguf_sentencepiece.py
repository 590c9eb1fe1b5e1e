"""SentencePiece's BPE of a GGUF file is what SentencePiece itself makes of a text."""

import io
import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
import sentencepiece
from ggufs import gguf_of, write
from hypothesis import given
from hypothesis import strategies as st
from test_gguf_tokenizer import PROMPTS
from tinymodels import LINES

import dflash_mlx as dm
from dflash_mlx.loading.gguf import convert
from dflash_mlx.loading.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, build


def trained() -> sentencepiece.SentencePieceProcessor:
    """A model as Llama 2's was made: bytes for what is no token, digits one by one."""
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
def test_texts_are_cut_as_sentencepiece_cuts_them(text: str) -> None:
    text = text.replace("\u2581", "").replace("\0", "")  # its own sign for a space; and the end
    ids = BUILT.encode(text, add_special_tokens=False).ids
    assert ids == MODEL.encode(text)
    assert BUILT.decode(ids) == text


def test_texts_begin_with_the_token_for_it_unless_the_file_says_no() -> None:
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


def test_a_model_writes_the_text_that_mlx_lm_writes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "cache_folder", lambda part: tmp_path / "cache" / part)
    metadata, tensors, _ = gguf_of("llama", vocab_size=MODEL.vocab_size())
    write(tmp_path / "a.gguf", metadata | METADATA, tensors, {})
    ours = dm.load(str(tmp_path / "a.gguf"), draft="none")[0]
    theirs = mlx_lm.load(str(convert.converted(tmp_path / "a.gguf", unpacked=True)))
    prompt = [MODEL.bos_id(), *MODEL.encode("12 men work")]
    told = dm.generate(ours, None, "12 men work", max_tokens=24).text
    assert told == mlx_lm.generate(theirs[0], theirs[1], prompt, max_tokens=24)

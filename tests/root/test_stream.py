"""Tokens to text: whole characters, stop strings wherever they fall, and an exact end.

The expected text is what the tokenizer decodes from all tokens at once, cut where a search finds
the first stop string.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
)
from serving import make_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.stream import Detokenizer, TextStream, decode_text, skip_text_start

EOS = "<|end|>"
REPLACEMENT = "\ufffd"  # what an incomplete character is decoded to
ALPHABET = "ab \n.é€中🙂🚀"  # one to four bytes a character
# GPT-2's spelling of bytes: printable ones stand for themselves, the others for 256, 257, ...
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLING = {byte: chr(byte) for byte in PRINTABLE}
SPELLING |= {byte: chr(256 + index) for index, byte in enumerate(UNPRINTABLE)}


@dataclass
class TokenizedText:
    """A text cut into pieces, and a tokenizer in which each piece is one token."""

    tokenizer: PreTrainedTokenizerFast
    detokenizer: Any
    ids: list[int]
    pieces: list[bytes]  # what each token stands for
    continues: bool = False

    @property
    def eos(self) -> int:
        return self.tokenizer.eos_token_id

    def text(self, tokens: int) -> str:
        """The text of the first tokens, without an incomplete character at the end."""
        text = b"".join(self.pieces[:tokens]).decode(errors="ignore")
        # mlx-lm's other detokenizers drop the first space of a text.
        keeps_space = self.continues or isinstance(self.detokenizer, NaiveStreamingDetokenizer)
        return text if keeps_space else text.removeprefix(" ")

    def stream(self, stop: tuple[str, ...], max_tokens: int) -> TextStream:
        detokenizer = self.detokenizer
        if self.continues:
            skip_text_start(detokenizer, self.tokenizer)
        return TextStream(detokenizer, eos_ids={self.eos}, stop=stop, max_tokens=max_tokens)


def tokenized_text(
    names: list[str], pieces: list[bytes], single_bytes: Any, decoder: Any, detokenizer: Any
) -> TokenizedText:
    """Build a tokenizer whose vocabulary has tokens for single bytes, and these `names`.

    Args:
        names: how the vocabulary spells each piece of the text.
        pieces: the bytes of each piece.
        single_bytes: how the vocabulary spells each of the 256 bytes.
        decoder: what turns spellings into text.
        detokenizer: mlx-lm's class for such tokenizers.
    """
    unique_names = dict.fromkeys([*single_bytes, *names])
    vocabulary = {name: index for index, name in enumerate(unique_names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    return TokenizedText(
        fast, detokenizer=detokenizer(fast), ids=[vocabulary[name] for name in names], pieces=pieces
    )


def byte_level(pieces: list[bytes], detokenizer: Any = BPEStreamingDetokenizer) -> TokenizedText:
    """A text as Qwen and Llama tokenize it: a token may end inside a character."""
    return tokenized_text(
        names=["".join(SPELLING[byte] for byte in piece) for piece in pieces],
        pieces=pieces,
        single_bytes=SPELLING.values(),
        decoder=decoders.ByteLevel(),
        detokenizer=detokenizer,
    )


def sentencepiece(cut: list[str], by_bytes: list[bool]) -> TokenizedText:
    """A text as SentencePiece tokenizes it: tokens are whole characters, or single bytes of one.

    `by_bytes` says for each piece whether it is spelled with a token for each byte.
    """
    names: list[str] = []
    pieces: list[bytes] = []
    with_prefix = [" " + cut[0], *cut[1:]]  # SentencePiece adds a space in front of every text
    for text, split in zip(with_prefix, by_bytes, strict=True):
        encoded = text.encode()
        if split:
            names += [f"<0x{byte:02X}>" for byte in encoded]
            pieces += [bytes([byte]) for byte in encoded]
        else:
            names.append(text.replace(" ", "\u2581"))
            pieces.append(encoded)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenized_text(
        names=names,
        pieces=pieces,
        single_bytes=[f"<0x{byte:02X}>" for byte in range(256)],
        decoder=decoder,
        detokenizer=SPMStreamingDetokenizer,
    )


def draw_pieces(draw: Any, text: Any) -> list[Any]:
    """Cut a string, bytes or a list into random pieces, none of them empty."""
    cuts = draw(st.sets(st.integers(1, max(1, len(text) - 1))), label="cuts")
    borders = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    return [text[start:end] for start, end in pairwise(borders)]


def draw_text(draw: Any, kind: str) -> tuple[str, TokenizedText]:
    """A random text with a tokenizer of this kind, which decodes it correctly."""
    text = draw(st.text(ALPHABET, min_size=1, max_size=24), label="text")
    if kind == "spm":
        assume(not text.startswith(" "))  # mlx-lm's detokenizer would strip more than the prefix
        cut = draw_pieces(draw, text)
        by_bytes = draw(st.lists(st.booleans(), min_size=len(cut), max_size=len(cut)))
        tokenized = sentencepiece(cut, by_bytes)
    elif kind == "bpe":
        tokenized = byte_level(draw_pieces(draw, text.encode()))
    else:
        pieces = draw_pieces(draw, text.encode())
        # mlx-lm's detokenizer loses bytes that begin a character after a newline in the same token.
        assume(not any(re.search(rb"\n[\x80-\xff]+$", piece) for piece in pieces))
        tokenized = byte_level(pieces, NaiveStreamingDetokenizer)
    assert tokenized.tokenizer.decode(tokenized.ids) == text
    return text, tokenized


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the first stop string of a text begins, or None."""
    return min((text.find(string) for string in stop if string in text), default=None)


def draw_stops(draw: Any, text: str) -> tuple[str, ...]:
    """Up to three stop strings, most of them parts of the text."""
    start = st.integers(0, len(text) - 1)
    part = st.builds(lambda at, length: text[at : at + length], start, st.integers(1, 5))
    return tuple(draw(st.lists(part | st.text(ALPHABET, min_size=1, max_size=3), max_size=3)))


@pytest.mark.parametrize("kind", ["bpe", "naive", "spm"])
@given(data=st.data())
@settings(max_examples=80)
def test_text_and_end_are_exact_for_any_tokens_in_any_rounds(kind, data):
    """The text ends where a search finds the end, and no character is torn.

    The stream gets the tokens of the text, then more tokens that it must ignore, in steps of any
    length. The text ends by a stop string, by EOS, or by `max_tokens`.
    """
    text, tokenized = draw_text(data.draw, kind)
    tokenized.continues = data.draw(st.booleans(), label="continues")
    stop = draw_stops(data.draw, f" {text}" if kind == "spm" else text)
    end = data.draw(st.integers(0, len(tokenized.ids)), label="tokens before the end")
    by_eos = data.draw(st.booleans(), label="ends by EOS")

    whole = tokenized.text(end)
    cut = first_stop(whole, stop)
    stop_after_tokens = [first_stop(tokenized.text(count), stop) for count in range(end + 1)]
    # Of stop strings that overlap, the first to be complete may begin later. Such cases are left
    # out, because the search cannot tell which one it is.
    assume({place for place in stop_after_tokens if place is not None} <= {cut})

    tokens = tokenized.ids[:end]
    if by_eos:
        tokens = [*tokens, tokenized.eos]
    stream = tokenized.stream(stop, max_tokens=len(tokens))
    pieces = []
    used = []
    ignored = tokenized.ids
    steps = draw_pieces(data.draw, tokens + ignored) if tokens else [ignored]
    for step in steps:
        piece = stream.add(step)
        pieces.append(piece.text)
        used += piece.tokens
        assert (piece.finish_reason is None) == (stream.finish_reason is None)
        assert REPLACEMENT not in piece.text
    assert "".join(pieces) == whole[:cut]
    assert stream.finish_reason == ("stop" if by_eos or cut is not None else "length")
    if cut is None:
        assert used == tokens
    else:  # it cannot end before the stop string is complete
        complete = next(count for count, place in enumerate(stop_after_tokens) if place is not None)
        assert used == tokens[: len(used)] and len(used) >= complete


@given(data=st.data())
def test_text_is_shown_as_soon_as_it_is_certain(data):
    """Without stop strings only an unfinished character is held back."""
    _, tokenized = draw_text(data.draw, "naive")
    stream = tokenized.stream((), max_tokens=99)
    shown = ""
    for count, token in enumerate(tokenized.ids, start=1):
        shown += stream.add([token]).text
        assert shown == tokenized.text(count)


def shown_after_each_token(
    cut: list[str], stop: tuple[str, ...] = (), continues: bool = False
) -> list[str]:
    """The text that a stream adds for each of these tokens."""
    tokenized = byte_level([piece.encode() for piece in cut])
    tokenized.continues = continues
    stream = tokenized.stream(stop, max_tokens=99)
    return [stream.add([token]).text for token in tokenized.ids]


@pytest.mark.parametrize(
    ("cut", "stop", "shown"),
    [
        (["ab", "cd"], (), ["ab", "cd"]),
        (["ab", "cd"], ("x",), ["ab", "cd"]),
        (["ab", "cd"], ("bc",), ["a", ""]),  # across a border
        (["ab", "d"], ("bc",), ["a", "bd"]),  # only the beginning of a stop string
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", ""]),  # overlapping beginnings
        (["STO", "P", "x"], ("STOP", "TO"), ["S", "", ""]),
        (["abc", "STOP tail"], ("STOP",), ["abc", ""]),
        (["abc STOP"], ("STOP",), ["abc "]),
        (["a\n", "\n", "b"], ("\n\n",), ["a", "", ""]),
        (["a", " ", "b"], ("a ",), ["", "", ""]),
        (["é", "€"], ("€",), ["é", ""]),
    ],
)
def test_the_text_that_is_shown_after_each_token(cut, stop, shown):
    assert shown_after_each_token(cut, stop) == shown


def test_a_stop_string_is_found_in_text_that_the_detokenizer_held_back():
    tokenized = byte_level([b"a", b" "])  # mlx-lm holds back a single space
    stream = tokenized.stream(("a ",), max_tokens=2)
    assert stream.add(tokenized.ids).text == "" and stream.finish_reason == "stop"


@pytest.mark.parametrize(
    ("cut", "stop", "shown"),
    [
        ([" 7", " +", " 1"], (), [" 7", " +", " 1"]),
        ([" 7", " +", " 1"], (" 7",), ["", "", ""]),
        (["  ", " ", "x"], (), ["  ", "", " x"]),  # mlx-lm holds back a single space
        (["   ", " return", " x"], (" #",), ["  ", "  return", " x"]),
        ([" "], (), [""]),
    ],
)
def test_a_continuation_keeps_its_first_spaces(cut, stop, shown):
    assert shown_after_each_token(cut, stop, continues=True) == shown


@pytest.mark.parametrize("padding_rows", [[0], [1, 1], [5, 0, 70]])
def test_ids_beyond_the_vocabulary_have_no_text(padding_rows):
    """An embedding may have more rows than the tokenizer has tokens."""
    tokenizer = make_target().tokenizer
    ids = tokenizer.encode("abcd efgh", add_special_tokens=False)
    padding = [len(tokenizer) + row for row in padding_rows]
    tokens = [*padding, *ids[:2], *padding, *ids[2:], *padding]
    assert decode_text(tokenizer, tokens) == tokenizer.decode(tokens) == "abcd efgh"
    stream = TextStream(Detokenizer(tokenizer), eos_ids=[2], stop=(), max_tokens=len(tokens))
    assert "".join(stream.add([token]).text for token in tokens) == "abcd efgh"

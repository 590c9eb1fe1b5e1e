"""Tokens to text: whole characters, stop strings wherever they fall, and an exact end.

The truth is the tokenizer's own decoding of all the tokens at once, and a search in that text.
"""

import re
from dataclasses import dataclass
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

from dflash_mlx.stream import Detokenizer, TextStream, skip_text_start, text_of

EOS = "<|end|>"
TORN = "\ufffd"
ALPHABET = "ab \n.é€中🙂🚀"  # one to four bytes a character
# GPT-2's spelling of bytes: printable ones stand for themselves, the others for 256, 257, ...
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLING = {byte: chr(byte) for byte in PRINTABLE}
SPELLING |= {byte: chr(256 + i) for i, byte in enumerate(HIDDEN)}


@dataclass
class Coded:
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
        # As mlx-lm has it, the text starts without its first space.
        spaced = self.continues or isinstance(self.detokenizer, NaiveStreamingDetokenizer)
        return text if spaced else text.removeprefix(" ")

    def stream(self, stop: tuple[str, ...], max_tokens: int) -> TextStream:
        detokenizer = self.detokenizer
        if self.continues:
            skip_text_start(detokenizer, self.tokenizer)
        return TextStream(detokenizer, eos_ids={self.eos}, stop=stop, max_tokens=max_tokens)


def code(names: list[str], pieces: list[bytes], basis: Any, decoder: Any, kind: Any) -> Coded:
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*basis, *names]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    return Coded(
        fast, detokenizer=kind(fast), ids=[vocabulary[name] for name in names], pieces=pieces
    )


def byte_level(cut: list[bytes], kind: Any = BPEStreamingDetokenizer) -> Coded:
    """Qwen's and Llama's way: tokens are any bytes, so they end anywhere inside characters."""
    names = ["".join(SPELLING[byte] for byte in piece) for piece in cut]
    return code(names, pieces=cut, basis=SPELLING.values(), decoder=decoders.ByteLevel(), kind=kind)


def sentencepiece(cut: list[str], by_bytes: list[bool]) -> Coded:
    """SentencePiece's way: tokens are whole characters, or single bytes of one."""
    names: list[str] = []
    pieces: list[bytes] = []
    for text, split in zip([" " + cut[0], *cut[1:]], by_bytes, strict=True):  # its dummy prefix
        encoded = text.encode()
        if split:
            names += [f"<0x{byte:02X}>" for byte in encoded]
            pieces += [bytes([byte]) for byte in encoded]
        else:
            names.append(text.replace(" ", "\u2581"))
            pieces.append(encoded)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    basis = [f"<0x{byte:02X}>" for byte in range(256)]
    return code(names, pieces=pieces, basis=basis, decoder=decoder, kind=SPMStreamingDetokenizer)


def cut_anywhere(draw: Any, text: Any) -> list[Any]:
    """A string or bytes in random pieces, none of them empty."""
    places = draw(st.sets(st.integers(1, max(1, len(text) - 1))), label="cuts")
    borders = sorted({0, *(place for place in places if place < len(text)), len(text)})
    return [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def draw_coded(draw: Any, kind: str) -> tuple[str, Coded]:
    text = draw(st.text(ALPHABET, min_size=1, max_size=24), label="text")
    if kind == "spm":
        assume(not text.startswith(" "))  # mlx-lm's detokenizer would strip more than the prefix
        cut = cut_anywhere(draw, text)
        split = draw(st.lists(st.booleans(), min_size=len(cut), max_size=len(cut)))
        coded = sentencepiece(cut, split)
    elif kind == "bpe":
        coded = byte_level(cut_anywhere(draw, text.encode()))
    else:
        cut = cut_anywhere(draw, text.encode())
        # mlx-lm's detokenizer loses bytes that begin a character after a newline in the same token.
        assume(not any(re.search(rb"\n[\x80-\xff]+$", piece) for piece in cut))
        coded = byte_level(cut, NaiveStreamingDetokenizer)
    assert coded.tokenizer.decode(coded.ids) == text
    return text, coded


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    return min((text.find(string) for string in stop if string in text), default=None)


def draw_stops(draw: Any, text: str) -> tuple[str, ...]:
    """Up to three stop strings, most of them parts of the text."""
    start = st.integers(0, len(text) - 1)
    part = st.builds(lambda a, n: text[a : a + n], start, st.integers(1, 5))
    return tuple(draw(st.lists(part | st.text(ALPHABET, min_size=1, max_size=3), max_size=3)))


@pytest.mark.parametrize("kind", ["bpe", "naive", "spm"])
@given(data=st.data())
@settings(max_examples=80)
def test_text_and_end_are_exact_for_any_tokens_in_any_rounds(kind, data):
    """The text ends where a search finds the end, and no character is torn."""
    text, coded = draw_coded(data.draw, kind)
    coded.continues = data.draw(st.booleans(), label="continues")
    stop = draw_stops(data.draw, f" {text}" if kind == "spm" else text)
    end = data.draw(st.integers(0, len(coded.ids)), label="tokens before the end")
    by_eos = data.draw(st.booleans(), label="ends by EOS")

    whole = coded.text(end)
    cut = first_stop(whole, stop)
    firsts = [first_stop(coded.text(n), stop) for n in range(end + 1)]
    # Of stop strings that overlap, the tokens decide which is complete first.
    assume({place for place in firsts if place is not None} <= {cut})

    stream = coded.stream(stop, max_tokens=end + by_eos)
    tokens = coded.ids[:end] + [coded.eos] * by_eos
    pieces = []
    used = []
    steps = cut_anywhere(data.draw, tokens + coded.ids) if tokens else [coded.ids]
    for step in steps:
        piece = stream.add(step)
        pieces.append(piece.text)
        used += piece.tokens
        assert (piece.finish_reason is None) == (stream.finish_reason is None)
        assert TORN not in piece.text
    assert "".join(pieces) == whole[:cut]
    assert stream.finish_reason == ("stop" if by_eos or cut is not None else "length")
    if cut is None:
        assert used == tokens
    else:  # it cannot end before the stop string is complete
        complete = next(n for n, place in enumerate(firsts) if place is not None)
        assert used == tokens[: len(used)] and len(used) >= complete


@given(data=st.data())
def test_text_is_shown_as_soon_as_it_is_certain(data):
    """Without stop strings only an unfinished character is held back."""
    _, coded = draw_coded(data.draw, "naive")
    stream = coded.stream((), max_tokens=99)
    shown = ""
    for number, token in enumerate(coded.ids, start=1):
        shown += stream.add([token]).text
        assert shown == coded.text(number)


def pieces_of(
    cut: list[str], stop: tuple[str, ...] = (), max_tokens: int = 99, continues: bool = False
) -> list[str]:
    """What is shown after each token."""
    coded = byte_level([piece.encode() for piece in cut])
    coded.continues = continues
    stream = coded.stream(stop, max_tokens)
    return [stream.add([token]).text for token in coded.ids]


@pytest.mark.parametrize(
    ("cut", "stop", "shown"),
    [
        (["ab", "cd"], (), ["ab", "cd"]),
        (["ab", "cd"], ("x",), ["ab", "cd"]),
        (["ab", "cd"], ("bc",), ["a", ""]),  # across a border
        (["ab", "d"], ("bc",), ["a", "bd"]),  # begins like one, but is none
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", ""]),  # starts that overlap
        (["STO", "P", "x"], ("STOP", "TO"), ["S", "", ""]),
        (["abc", "STOP tail"], ("STOP",), ["abc", ""]),
        (["abc STOP"], ("STOP",), ["abc "]),
        (["a\n", "\n", "b"], ("\n\n",), ["a", "", ""]),
        (["a", " ", "b"], ("a ",), ["", "", ""]),
        (["é", "€"], ("€",), ["é", ""]),
    ],
)
def test_the_text_that_is_shown_after_each_token(cut, stop, shown):
    assert pieces_of(cut, stop) == shown


def test_a_stop_string_is_found_in_text_that_the_detokenizer_held_back():
    coded = byte_level([b"a", b" "])  # mlx-lm waits with a lone space
    stream = coded.stream(("a ",), max_tokens=2)
    assert stream.add(coded.ids).text == "" and stream.finish_reason == "stop"


@pytest.mark.parametrize(
    ("cut", "stop", "shown"),
    [
        ([" 7", " +", " 1"], (), [" 7", " +", " 1"]),
        ([" 7", " +", " 1"], (" 7",), ["", "", ""]),
        (["  ", " ", "x"], (), ["  ", "", " x"]),  # as mlx-lm, which waits with a lone space
        (["   ", " return", " x"], (" #",), ["  ", "  return", " x"]),
        ([" "], (), [""]),
    ],
)
def test_what_continues_a_text_has_its_first_spaces(cut, stop, shown):
    assert pieces_of(cut, stop, continues=True) == shown


@pytest.mark.parametrize("padded", [[0], [1, 1], [5, 0, 70]])
def test_ids_beyond_the_vocabulary_have_no_text(padded):
    """They are rows that pad an embedding; the tokenizer itself decodes them to nothing."""
    tokenizer = make_target().tokenizer
    ids = tokenizer.encode("abcd efgh", add_special_tokens=False)
    outside = [len(tokenizer) + number for number in padded]
    told = [*outside, *ids[:2], *outside, *ids[2:], *outside]
    assert text_of(tokenizer, told) == tokenizer.decode(told) == "abcd efgh"
    pieces = TextStream(Detokenizer(tokenizer), eos_ids=[2], stop=(), max_tokens=len(told))
    assert "".join(pieces.add([token]).text for token in told) == "abcd efgh"

"""Data files for training: their formats, where answers begin and end, and errors of one line."""

import json
import math
from pathlib import Path
from random import Random

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tiny_pair.tokenizer import save_tokenizer, train_tokenizer

from dflash_mlx.errors import DataError
from dflash_mlx.train.dataset import (
    BatchStream,
    Sample,
    encode_chat,
    encode_record,
    group,
    read_records,
)
from dflash_mlx.train.drafter import AnchorCollator


def read_samples(path: Path, tokenizer: TokenizerWrapper) -> list[Sample]:
    return [encode_record(tokenizer, *record) for record in read_records(path)]


CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two three"},
    {"role": "user", "content": "four"},
    {"role": "assistant", "content": "five 5 six"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerWrapper:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["one two three four five six seven 1234567890"] * 5
    save_tokenizer(train_tokenizer(texts, 300), folder, 128)
    return load_tokenizer(folder)


def test_answers_of_a_chat_end_with_the_end_of_turn(tokenizer):
    sample = encode_chat(tokenizer, CHAT)
    texts = [tokenizer.decode(list(sample.tokens[a:b])) for a, b in sample.answers]
    assert texts == ["two three<|im_end|>", "five 5 six<|im_end|>"]
    # The token before an answer is the last prompt token, where decoding drafts from first.
    start = sample.answers[1][0]
    assert tokenizer.decode(list(sample.tokens[:start])).endswith("<|im_start|>assistant\n")


def test_a_template_that_changes_earlier_answers_leaves_only_the_last_one(tokenizer, monkeypatch):
    template = (
        "{% for m in messages %}{{ m.role }}:"
        "{{ m.content if loop.last or m.role == 'user' else 'gone' }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    sample = encode_chat(tokenizer, CHAT)
    assert len(sample.answers) == 1
    [(start, end)] = sample.answers
    assert tokenizer.decode(list(sample.tokens[start:end])) == "five 5 six<|im_end|>"


def test_every_format_is_read(tmp_path, tokenizer):
    lines = [{"messages": CHAT}, {"prompt": "one", "answer": "two"}, {"text": "three\u2028four"}]
    chat = tmp_path / "data.jsonl"
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    chat.write_text(content, encoding="utf-8")
    assert [len(s.answers) for s in read_samples(chat, tokenizer)] == [2, 1, 1]
    text = tmp_path / "data.txt"
    text.write_text("one two\nthree\n\nfour\n")
    decoded = [tokenizer.decode(list(s.tokens)) for s in read_samples(text, tokenizer)]
    assert decoded == ["one two\nthree", "four"]


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[1, 2]",
        '{"prompt": "no answer"}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 5}]}',
        '{"messages": [{"role": "user", "content": "no answer"}]}',
        '{"text": ""}',
    ],
)
def test_the_error_for_an_invalid_line_names_file_and_line(tmp_path, tokenizer, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one two"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        read_samples(path, tokenizer)
    assert f"{path}:2: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_the_error_for_a_missing_or_binary_file_names_it(tmp_path, tokenizer, content):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.jsonl"):
        read_samples(path, tokenizer)


def samples(count: int) -> list[Sample]:
    return [Sample(tuple(range(3 + i % 40)), ((1, 3),)) for i in range(count)]


def test_batches_contain_every_sample_and_each_has_one_rounded_length():
    batches = group(samples(100), tokens=64, rng=Random(0))
    for batch in batches:
        [length] = {16 * math.ceil(len(sample.tokens) / 16) for sample in batch}
        assert len(batch) == max(1, 64 // length)
    assert sum(len(batch) for batch in batches) >= 100


def test_batches_of_many_tokens_are_padded_to_multiples_of_64():
    samples = [Sample((0,) * (3 + i % 400), ((1, 3),)) for i in range(800)]
    for batch in group(samples, tokens=8192, rng=Random(0)):
        shape = AnchorCollator(2, 8192)(batch, Random(0))[0].shape
        assert shape[1] % 64 == 0 and shape[0] == 8192 // shape[1]


def test_a_stream_of_batches_continues_from_a_saved_position():
    """Also in a later epoch."""

    def stream(position: tuple[int, int] = (0, 0)) -> BatchStream:
        return BatchStream(
            lambda epoch: samples(20 + epoch),
            lambda batch, rng: (len(batch), rng.random()),
            tokens=64,
            seed=1,
            position=position,
        )

    uninterrupted = stream()
    batches = []
    positions = []
    for _ in range(40):
        positions.append(uninterrupted.position)
        batches.append(uninterrupted.next())
    assert positions[-1][0] >= 1, "all batches are of the first epoch"
    for i in (1, 7, 25, 39):
        assert stream(positions[i]).next() == batches[i]

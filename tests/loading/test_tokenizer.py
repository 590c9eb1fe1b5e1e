"""Tokenizers of repositories that come with their own code, which we never run."""

import json
import random
from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import pytest
from test_gguf_tokenizer import PROMPTS
from tinymodels import LINES, refusal, save_target, tokenizer
from tokenizers import Regex, pre_tokenizers

from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load_target
from dflash_mlx.loading.tokenizer_loader import _KIMI_PATTERN, kimi_tokenizer, read_tokenizer
from dflash_mlx.loop import generate

CODE = "raise SystemExit('code of a model was run')\n"
TEXTS = [
    *LINES,
    *PROMPTS,
    "你好，世界！It's 中文 and English混合",
    "aaaaaaa  \n\n  a1234567 ÀÉ'LL ß",
    "",
]


def trained_ranks() -> dict[bytes, int]:
    """Train a tokenizer as tiktoken does: 256 bytes, then the merged pairs in their order."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [single_bytes(word) for text in TEXTS for word in cut(text)]
    while len(ranks) < 400:
        counts: dict[bytes, int] = {}
        for word in words:
            for left, right in zip(word, word[1:], strict=False):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        if counts[best] < 2:
            break
        ranks.setdefault(best, len(ranks))
        words = [merged(word, {best: 0}) for word in words]
    return ranks


def single_bytes(word: str) -> list[bytes]:
    return [bytes([byte]) for byte in word.encode()]


def cut(text: str) -> list[str]:
    """The words of a text, by the pattern."""
    splitter = pre_tokenizers.Split(Regex(_KIMI_PATTERN), "isolated")
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def merged(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """Merge as tiktoken does: the leftmost pair of the lowest rank, as long as there is one."""
    parts = list(parts)
    no_rank = 10**9
    while True:
        pair_ranks = [ranks.get(left + right, no_rank) for left, right in pairwise(parts)]
        lowest = min(pair_ranks, default=no_rank)
        if lowest == no_rank:
            return parts
        first = pair_ranks.index(lowest)
        parts[first : first + 2] = [parts[first] + parts[first + 1]]


def encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    """The token ids that tiktoken gives a text."""
    ids = []
    for word in cut(text):
        whole = word.encode()
        parts = [whole] if whole in ranks else merged(single_bytes(word), ranks)
        ids += [ranks[part] for part in parts]
    return ids


def save_ranks(folder: Path, ranks: dict[bytes, int]) -> Path:
    lines = [f"{b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    return folder / "tiktoken.model"


def test_texts_are_encoded_as_tiktoken_encodes_them(tmp_path: Path) -> None:
    ranks = trained_ranks()
    built = kimi_tokenizer(save_ranks(tmp_path, ranks), {})
    random.seed(0)
    letters = "ab 1中'\nÉ."
    made = ["".join(random.choices(letters, k=40)) for _ in range(100)]
    for text in (*TEXTS, *made):
        ids = built.encode(text).ids
        assert ids == encoded(text, ranks), text
        assert built.decode(ids) == text


def test_special_tokens_have_the_ids_after_those_of_the_ranks(tmp_path: Path) -> None:
    ranks = trained_ranks()
    size = len(ranks)
    named = {
        str(size): {"content": "[BOS]"},
        str(size + 3): {"content": "<think>", "special": False},
    }
    built = kimi_tokenizer(save_ranks(tmp_path, ranks), {"added_tokens_decoder": named})
    assert built.encode("[BOS]a<think>").ids == [size, ranks[b"a"], size + 3]
    assert built.token_to_id("<|reserved_token_" + f"{size + 1}|>") == size + 1
    assert built.get_vocab_size() == size + 258
    assert built.decode([size, ranks[b"a"], size + 3]) == "a<think>"


def as_kimi(folder: Path, name: str = "TikTokenTokenizer") -> Path:
    """Save the folder's byte-level tokenizer as Kimi's: its tokens, in their order, as ranks."""
    byte_of_letter = {letter: bytes([byte]) for byte, letter in byte_letters().items()}
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"] for token in content["added_tokens"]}
    vocabulary = content["model"]["vocab"]
    tokens = sorted((token for token in vocabulary if token not in added), key=vocabulary.get)
    ranks = {}
    for rank, token in enumerate(tokens):
        ranks[b"".join(byte_of_letter[letter] for letter in token)] = rank
    save_ranks(folder, ranks)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": name,
        "auto_map": {"AutoTokenizer": [f"tokenization_kimi.{name}", None]},
        "added_tokens_decoder": {str(len(ranks)): {"content": "<|end|>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_kimi.py").write_text(CODE)
    return folder


def byte_letters() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters: dict[int, str] = bytes_to_unicode()
    return letters


@pytest.mark.parametrize("has_json", [True, False], ids=["with tokenizer.json", "alone"])
def test_a_folder_with_kimis_tokenizer_runs_no_code(tmp_path: Path, has_json: bool) -> None:
    folder = as_kimi(save_target(tmp_path, "llama"))
    if not has_json:
        (folder / "tokenizer.json").unlink()
    target = load_target(str(folder))
    assert target.tokenizer.encode("what is 37") and target.tokenizer.has_chat_template
    assert target.tokenizer.eos_token_ids == {target.tokenizer.convert_tokens_to_ids("<|end|>")}
    messages = [{"role": "user", "content": "what is 37"}]
    answer = generate(target, None, messages, max_tokens=8)
    assert answer.text == target.tokenizer.decode(answer.tokens)


def test_tokenizer_json_is_read_if_the_tokenizers_class_is_unknown(tmp_path: Path) -> None:
    folder = save_target(tmp_path, "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "MyTokenizer",
        "auto_map": {"AutoTokenizer": ["my.MyTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "my.py").write_text(CODE)
    actual = read_tokenizer(Folder(folder))
    for text in PROMPTS:
        assert actual.encode(text) == tokenizer().encode(text)
    assert actual.eos_token == tokenizer().eos_token


@pytest.mark.parametrize("file", ["tiktoken.model", "qwen.tiktoken", "tokenizer.model"])
def test_the_error_about_an_unknown_tokenizer_names_its_class(tmp_path: Path, file: str) -> None:
    """The first QWen and ChatGLM have such tokenizers; ChatGLM's ranks are in tokenizer.model."""
    folder = as_kimi(save_target(tmp_path, "llama"), "TheirTokenizer")
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").rename(folder / file)
    message = refusal(ConfigError, load_target, folder)
    assert "TheirTokenizer" in message and "code is not run" in message
    assert ("tiktoken's" in message) == (file != "tokenizer.model")


@pytest.mark.parametrize("lines", ["YQ== 0\nYg== 2\n", "YQ== 0 1\n", "!! 0\n", "YQ== x\n"], ids=str)
def test_the_error_about_a_broken_list_of_ranks_names_the_file(tmp_path: Path, lines: str) -> None:
    folder = as_kimi(save_target(tmp_path, "llama"))
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_text(lines)
    assert "tiktoken.model: cannot be read" in refusal(ConfigError, load_target, folder)

"""The tokenizer that a GGUF file's metadata describes, as files that transformers loads.

Byte-level BPE ("gpt2"): the file has its tokens and merges, and names the pre-tokenizer
(`tokenizer.ggml.pre`, in splits.toml). SentencePiece's BPE: the file has its tokens, and their
scores ("llama"), of which the best is merged first, or its merges ("gemma4").
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Container, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ...errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
_KEY = "tokenizer.ggml."
_SPACE = "▁"
# Control tokens that end a turn, whatever else the file names.
_ENDS = {"<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>"}


def build(path: object, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises `ConfigError` for an unknown kind."""
    model = metadata.get(f"{_KEY}model")
    if model not in _MODELS:
        raise ConfigError(
            f"{path}: its tokenizer is {str(model)[:40]!r}; of GGUF files, byte-level BPE (gpt2) "
            "and SentencePiece's BPE (llama, gemma4) are read."
        )
    tokens, types = vocabulary(path, metadata)
    tokenizer = _MODELS[model](path, metadata)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, own in zip(tokens, types, strict=True)
            if own == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    if _adds_bos(metadata):
        start = special_id(path, metadata, "bos", tokens)
        if start is None:
            raise ConfigError(f"{path}: add_bos_token is set, but no bos_token_id.")
        template = processors.TemplateProcessing(
            single=f"{tokens[start]} $A",
            pair=f"{tokens[start]} $A {tokens[start]} $B",
            special_tokens=[(tokens[start], start)],
        )
        spans = [processors.ByteLevel(trim_offsets=False)] if model == "gpt2" else []
        tokenizer.post_processor = processors.Sequence([*spans, template])
    return tokenizer


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether texts begin with a bos token."""
    usual = metadata.get(f"{_KEY}model") != "gpt2" or "bos" in _split(metadata)
    default = usual and f"{_KEY}bos_token_id" in metadata
    return metadata.get(f"{_KEY}add_bos_token", default) is True


def _split(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """How words are cut, by splits.toml; empty for an unknown name."""
    rows = tomllib.loads(files(__package__).joinpath("splits.toml").read_text("utf-8"))["split"]
    pre = metadata.get(f"{_KEY}pre")
    return next((row for row in rows if pre in row["names"]), {})


def _byte_level(path: object, metadata: Mapping[str, Any]) -> Tokenizer:
    """BPE over bytes, without its added tokens. Raises `ConfigError`."""
    split = _split(metadata)
    if not split:
        pre = str(metadata.get(f"{_KEY}pre"))[:40]
        raise ConfigError(f"{path}: its pre-tokenizer is {pre!r}, which is not known.")
    tokens, _ = vocabulary(path, metadata)
    pairs = _merges(path, metadata, {*tokens})
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges="whole" in split))
    if "nfc" in split:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in split["patterns"]]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="gpt2" in split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(path: object, metadata: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece's BPE, without its added tokens. Raises `ConfigError`.

    A space before each word is written as another character, before the first one too unless the
    file says no. Characters without a token are encoded as bytes.
    """
    tokens, types = vocabulary(path, metadata)
    ids = {token: number for number, token in enumerate(tokens)}
    if metadata[f"{_KEY}model"] == "gemma4":
        pairs = _merges(path, metadata, ids.keys())
    else:
        scores: Any = metadata.get(f"{_KEY}scores")
        if not _are(float, scores) or len(scores) != len(tokens):
            raise ConfigError(f"{path}: {_KEY}scores does not have a number for each token.")
        own = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
        pairs = [
            (token[:middle], token[middle:])
            for _, token in sorted(zip(scores, tokens, strict=True), key=lambda pair: -pair[0])
            if token in own
            for middle in range(1, len(token))
            if token[:middle] in own and token[middle:] in own
        ]
    unknown = special_id(path, metadata, "unknown", tokens)
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    name = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(
        models.BPE(ids, pairs, unk_token=name, fuse_unk=True, byte_fallback=BYTE in types)
    )
    spaces, texts = normalizers.Replace(" ", _SPACE), decoders.Replace(_SPACE, " ")
    steps = [texts, decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(f"{_KEY}add_space_prefix", True) is True:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


_MODELS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _sentence_piece}


def save(path: object, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises `ConfigError`."""
    build(path, metadata).save(str(folder / "tokenizer.json"))
    tokens, _ = vocabulary(path, metadata)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = special_id(path, metadata, theirs, tokens)
        if number is not None:
            settings[f"{ours}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ConfigError(f"{path}: tokenizer.chat_template is no text.")
        settings["chat_template"] = template
    content = json.dumps(settings, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(content + "\n", encoding="utf-8")


def end_tokens(path: object, metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text, a turn or a message. Raises `ConfigError`."""
    tokens, types = vocabulary(path, metadata)
    found = {special_id(path, metadata, name, tokens) for name in ("eos", "eot", "eom")}
    found |= {
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL and token in _ENDS
    }
    ends = sorted(number for number in found if number is not None)
    if not ends:
        raise ConfigError(f"{path}: there is no {_KEY}eos_token_id, so no text would end.")
    return ends


def vocabulary(path: object, metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """The tokens and their types. Raises `ConfigError`."""
    tokens = _texts(path, metadata, "tokens")
    types = metadata.get(f"{_KEY}token_type", [NORMAL] * len(tokens))
    if not _are(int, types) or len(types) != len(tokens):
        raise ConfigError(f"{path}: {_KEY}token_type does not have a number for each token.")
    if len({*tokens}) < len(tokens):
        raise ConfigError(f"{path}: a token is in {_KEY}tokens twice.")
    return tokens, types


def special_id(
    path: object, metadata: Mapping[str, Any], name: str, tokens: list[str]
) -> int | None:
    """The id of a special token; None without one. Raises `ConfigError` for one out of range."""
    number = metadata.get(f"{_KEY}{name}_token_id")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise ConfigError(f"{path}: {_KEY}{name}_token_id is not a token's number.")
    return number


def _merges(
    path: object, metadata: Mapping[str, Any], tokens: Container[str]
) -> list[tuple[str, str]]:
    pairs = []
    for line in _texts(path, metadata, "merges"):
        # Tokens contain no space: it is written as another character.
        left, _, right = line.partition(" ")
        if left not in tokens or right not in tokens or left + right not in tokens:
            raise ConfigError(f"{path}: the merge {line[:40]!r} is not of tokens.")
        pairs.append((left, right))
    return pairs


def _texts(path: object, metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of texts in the metadata. Raises `ConfigError`."""
    found: Any = metadata.get(_KEY + name)
    if not _are(str, found):
        raise ConfigError(f"{path}: {_KEY}{name} is missing, or not a list of texts.")
    return list(found)


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(v) is kind for v in values)

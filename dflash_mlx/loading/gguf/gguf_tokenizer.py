"""The tokenizer that a GGUF file's metadata describes, as files that transformers loads.

Byte-level BPE ("gpt2"): the file has its tokens and merges, and names the pre-tokenizer
(`tokenizer.ggml.pre`, in splits.toml). SentencePiece's BPE: the file has its tokens, and their
scores ("llama"), of which the best is merged first, or its merges ("gemma4").
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
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
from ...validation import TOKENIZER_ERRORS, ErrorWrapper

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
_KEY = "tokenizer.ggml."
_SPACE = "▁"
# Control tokens that end a text, whatever else the file names: llama.cpp's list, of which we leave
# out "</s>", which is HTML to Gemma. Files have no generation_config.json, so this stands for it.
_ENDS = {
    "<eos>",  # Gemma's, like the next three
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|im_end|>",  # Qwen's, like the next
    "<|endoftext|>",
    "<|eot_id|>",  # Llama 3's, like the next two
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",  # Phi's
    "<|return|>",  # gpt-oss's, like the next
    "<|call|>",
    "<|flush|>",  # Solar's, like the next
    "<|calls|>",
    "[EOS]",  # Kimi's, like the next
    "[EOT]",
    "<EOT>",  # CodeLlama's, like the next
    "_<EOT>",
    "<｜end▁of▁sentence｜>",  # DeepSeek's
    "<end_of_utterance>",  # SmolVLM's
    "[e~[",  # MiniMax's
}
# This token ends an answer, unless the vocabulary has a token of `_ENDS_AFTER_MESSAGES`: then an
# answer has several messages, and this token ends only one of them.
_END_OF_MESSAGE = "<|end|>"
_ENDS_AFTER_MESSAGES = {"<|return|>", "<|flush|>"}


class TokenizerFields:
    """What a file says about its tokenizer, by the names after `tokenizer.ggml.`.

    Attributes:
        tokens, types: of the vocabulary.

    Raises `ConfigError` for an impossible vocabulary.
    """

    def __init__(self, path: object, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        with ErrorWrapper(ConfigError, f"{path}: the vocabulary is broken", TOKENIZER_ERRORS):
            self.tokens: list[str] = metadata[f"{_KEY}tokens"]
            self.types: list[int] = self("token_type", [NORMAL] * len(self.tokens))
            if len(set(self.tokens)) < len(self.tokens) or len(self.types) != len(self.tokens):
                raise ValueError("it lists a token twice, or one without a type")

    def __call__(self, name: str, default: Any = None) -> Any:
        """A value, or the default without it."""
        return self.metadata.get(_KEY + name, default)

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None without one. Raises `ConfigError` for no token's id."""
        number = self(f"{name}_token_id")
        if number is not None and number not in range(len(self.tokens)):
            raise ConfigError(f"{self.path}: {_KEY}{name}_token_id is not a token's number.")
        return None if number is None else int(number)

    def of_kind(self, kind: int) -> list[str]:
        """The tokens of a type."""
        pairs = zip(self.tokens, self.types, strict=True)
        return [token for token, token_kind in pairs if token_kind == kind]

    def merges(self) -> list[tuple[str, str]]:
        """The merged pairs. A space separates them, because tokens use another character for it."""
        pairs = (line.partition(" ") for line in self.metadata[f"{_KEY}merges"])
        return [(left, right) for left, _, right in pairs]

    @property
    def split(self) -> dict[str, Any]:
        """The row of splits.toml that says how to split words; empty for an unknown name."""
        rows = tomllib.loads(files(__package__).joinpath("splits.toml").read_text("utf-8"))["split"]
        return next((row for row in rows if self("pre") in row["names"]), {})

    @property
    def adds_bos(self) -> bool:
        """Whether texts begin with a bos token.

        Gemma 4's always do, whatever the file says: llama.cpp also overrides it.
        """
        has_bos = self("bos_token_id") is not None
        if self("model") == "gemma4" and has_bos:
            return True
        usual = self("model") != "gpt2" or "bos" in self.split
        return self("add_bos_token", usual and has_bos) is True


def build(path: object, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises `ConfigError` for an unknown kind, or a broken one."""
    fields = TokenizerFields(path, metadata)
    model = str(fields("model"))
    if model not in _MODELS:
        raise ConfigError(
            f"{path}: the tokenizer is {model[:40]!r}, which is not supported. Supported "
            "tokenizers are byte-level BPE (gpt2) and SentencePiece's BPE (llama, gemma4)."
        )
    with ErrorWrapper(ConfigError, f"{path}: its tokenizer cannot be read", TOKENIZER_ERRORS):
        tokenizer = _MODELS[model](fields)
    for kind, add in (
        (CONTROL, tokenizer.add_special_tokens),
        (USER_DEFINED, tokenizer.add_tokens),
    ):
        special = kind == CONTROL
        tokens = fields.of_kind(kind)
        add([AddedToken(token, special=special, normalized=False) for token in tokens])
    if fields.adds_bos:
        bos_id = fields.special_id("bos")
        if bos_id is None:
            raise ConfigError(f"{path}: add_bos_token is set, but bos_token_id is missing.")
        bos = fields.tokens[bos_id]
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
        byte_level = [processors.ByteLevel(trim_offsets=False)] if model == "gpt2" else []
        tokenizer.post_processor = processors.Sequence([*byte_level, template])
    return tokenizer


def _byte_level(fields: TokenizerFields) -> Tokenizer:
    """BPE over bytes, without its added tokens. Raises `ConfigError`."""
    split = fields.split
    if not split:
        pre = str(fields("pre"))[:40]
        raise ConfigError(f"{fields.path}: its pre-tokenizer is {pre!r}, which is not known.")
    ids = {token: number for number, token in enumerate(fields.tokens)}
    tokenizer = Tokenizer(models.BPE(ids, fields.merges(), ignore_merges="whole" in split))
    if "nfc" in split:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split["patterns"]]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="gpt2" in split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(fields: TokenizerFields) -> Tokenizer:
    """SentencePiece's BPE, without its added tokens. Raises `ConfigError`.

    The space before a word is written as another character. Unless the file says otherwise, the
    first word has one as well. Characters without a token are encoded as bytes.
    """
    tokens = fields.tokens
    types = fields.types
    if fields("model") == "gemma4":
        pairs = fields.merges()
    else:
        scores = fields.metadata[f"{_KEY}scores"]
        normal = set(fields.of_kind(NORMAL))
        scored = sorted(zip(scores, tokens, strict=True), key=lambda pair: -pair[0])
        pairs = []  # all ways to make a token of two others, those of the best-scored token first
        for token in [token for _, token in scored if token in normal]:
            for middle in range(1, len(token)):
                if token[:middle] in normal and token[middle:] in normal:
                    pairs.append((token[:middle], token[middle:]))
    unknown = fields.special_id("unknown")
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    ids = {token: number for number, token in enumerate(tokens)}
    name = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(
        models.BPE(ids, pairs, unk_token=name, fuse_unk=True, byte_fallback=BYTE in types)
    )
    replace_spaces = normalizers.Replace(" ", _SPACE)
    restore_spaces = decoders.Replace(_SPACE, " ")
    steps = [restore_spaces, decoders.ByteFallback(), decoders.Fuse()]
    if fields("add_space_prefix", True) is True:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace_spaces])
        steps.append(decoders.Strip(" ", 1, 0))  # the space that was prepended
    else:
        tokenizer.normalizer = replace_spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


_MODELS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _sentence_piece}


def save(path: object, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises `ConfigError`."""
    (folder / "tokenizer.json").write_text(build(path, metadata).to_str(), encoding="utf-8")
    fields = TokenizerFields(path, metadata)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": fields.adds_bos,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = fields.special_id(theirs)
        if number is not None:
            settings[f"{ours}_token"] = fields.tokens[number]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ConfigError(f"{path}: tokenizer.chat_template is not a string.")
        settings["chat_template"] = template
    content = json.dumps(settings, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(content + "\n", encoding="utf-8")


def end_tokens(path: object, metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text, a turn or a message. Raises `ConfigError`."""
    fields = TokenizerFields(path, metadata)
    ids = {fields.special_id(name) for name in ("eos", "eot", "eom")}
    ends = _ENDS & {*fields.of_kind(CONTROL), *fields.of_kind(USER_DEFINED)}
    if _ENDS_AFTER_MESSAGES & ends:
        ends.discard(_END_OF_MESSAGE)
    ids |= {fields.tokens.index(token) for token in ends}
    ids.discard(None)
    if not ids:
        raise ConfigError(f"{path}: there is no {_KEY}eos_token_id, so no text would end.")
    return sorted(number for number in ids if number is not None)

"""What a file or folder is, by its first bytes and its header. Needs no MLX, and no weights.

Every command that takes a path asks here, so a mix-up is named by what the path holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..drafter.networks import ARCHITECTURES, ASSISTANTS, DRAFTER_FIELDS, needs_target
from ..errors import DataError, DFlashError
from ..validation import UTF8, path_kind, read_json

MODEL = "model"
DRAFTER = "drafter"
ADAPTER = "adapter"
OTHER = "other"
ADAPTER_CONFIG = "adapter_config.json"
BEGINNING = 4096  # bytes of a file that are read to recognize it
_MAX_HEADER = 2**26  # bytes of a safetensors header
_GGUF = b"GGUF"
# First bytes -> what a file is.
_MAGIC = {
    b"PK\x03\x04": "a zip archive or a PyTorch checkpoint (.bin, .pt); safetensors are read",
    b"\x80\x02": "a PyTorch checkpoint (.bin, .pt); safetensors are read",
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself (git lfs pull)",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a gzip archive",
    b"\x93NUMPY": "a NumPy array",
    b"%PDF": "a PDF",
    b"<!doctype html": "a web page, as a failed download leaves one",
    b"<html": "a web page, as a failed download leaves one",
}
# `general.architecture` of GGUF files that draft -> what they are.
GGUF_DRAFTERS = {
    "dflash": "a DFlash drafter",
    "dflash-draft": "a DFlash drafter in the form of older forks",
    "dspark": "a DSpark drafter",
    "eagle3": "an EAGLE-3 head, which drafts",
    "gemma4-assistant": "a Gemma 4 assistant, which drafts",
}
_GGUF_TYPES = {
    "adapter": (ADAPTER, "a LoRA adapter"),
    "mmproj": (OTHER, "a projector for images"),
    "imatrix": (OTHER, "an importance matrix"),
}
# Names of architectures that only drafters have, also of kinds that are not read here.
_DRAFTS = re.compile(r"draft|dflash|dspark|eagle-?3|medusa|speculator|lilicorr", re.IGNORECASE)
# Targets may also have these: a block of diffusion, a kind of layer.
_WEAK_FIELDS = frozenset({"block_size", "mask_token_id"})
# The part of a tensor's name by which weights are recognized as a drafter's or an adapter's.
_TELLING_PART = re.compile(r"(^|\.)(hidden_norm|fc|d2t|lora_[abAB])\b")
_BINARY = "a binary file of an unknown kind"
_TEXT = "a text file"
_JSON = "a JSON file"
_EMPTY = "an empty file"


class Contents(NamedTuple):
    """What a path holds.

    Attributes:
        kind: `MODEL`, `DRAFTER`, `ADAPTER`, or `OTHER` for anything else.
        words: the same with its article, for a message: "a PEFT adapter".
    """

    kind: str
    words: str


def read_contents(path: Path) -> Contents:
    """What a file or folder is. A path that cannot be read is `OTHER`, with the reason in words."""
    try:
        kind = path_kind(path)
        if kind == "folder":
            return _of_folder(path)
        if kind == "other":
            return Contents(OTHER, "a pipe or a device")  # opening one may take what is in it
        with path.open("rb") as file:
            start = file.read(BEGINNING)
    except OSError as error:
        return Contents(OTHER, f"not readable ({error.strerror})")
    if start.startswith(_GGUF):
        return _of_gguf(path)
    if _is_safetensors(start):
        return _of_safetensors(path)
    return Contents(OTHER, _describe(start))


def check_is_text(path: Path) -> None:
    """Raise `DataError` for a folder or a file that is not text. Pipes are not opened."""
    words = read_contents(path).words
    if path.is_dir() or (path.is_file() and words not in (_TEXT, _JSON, _EMPTY)):
        raise DataError(f"{path} is {words}, not text.")


def config_contents(config: Mapping[str, Any]) -> Contents:
    """What a config.json describes."""
    if needs_target(config):
        assistant = config["model_type"] in ASSISTANTS
        words = "a Gemma 4 assistant" if assistant else "an MTP head"
        return Contents(DRAFTER, f"{words}, which drafts")
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    labels = [config.get("speculators_model_type"), *names, config.get("model_type")]
    labels = [label for label in labels if isinstance(label, str)]
    draft_labels = [label for label in labels if label in ARCHITECTURES or _DRAFTS.search(label)]
    if draft_labels or (DRAFTER_FIELDS - _WEAK_FIELDS) & config.keys():
        label = (draft_labels or labels or [""])[0]
        return Contents(DRAFTER, f"a drafter ({label})" if label else "a drafter")
    kind = config.get("model_type")
    return Contents(MODEL, f"a model ({kind})" if isinstance(kind, str) else "a model")


def _of_folder(path: Path) -> Contents:
    config = path / "config.json"
    if config.is_file():
        with suppress(DFlashError):
            return config_contents(read_json(config))
        return Contents(OTHER, "a folder whose config.json cannot be read")
    if (path / ADAPTER_CONFIG).is_file():
        with suppress(DFlashError):
            if "peft_type" in read_json(path / ADAPTER_CONFIG):
                return Contents(ADAPTER, "a PEFT adapter")
        return Contents(ADAPTER, "an adapter of mlx_lm.lora")
    if (path / "model_index.json").is_file():
        return Contents(OTHER, "a pipeline of diffusers")
    if not any(path.iterdir()):
        return Contents(OTHER, "an empty folder")
    if (path / "tokenizer.json").is_file() or (path / "tokenizer_config.json").is_file():
        return Contents(OTHER, "a folder with a tokenizer, and no config.json in it")
    return Contents(OTHER, "a folder with no config.json in it")


def _of_gguf(path: Path) -> Contents:
    try:
        from .gguf.header import read_general

        metadata = read_general(path)
    except (ImportError, DFlashError):  # loading names what is wrong
        return Contents(MODEL, "a GGUF file")
    architecture = str(metadata.get("general.architecture"))[:40]
    # Projectors for images may name only their architecture.
    kind = "mmproj" if architecture == "clip" else metadata.get("general.type")
    if kind in _GGUF_TYPES:
        contents_kind, words = _GGUF_TYPES[kind]
        return Contents(contents_kind, f"{words} in GGUF ({architecture})")
    if architecture in GGUF_DRAFTERS:
        return Contents(DRAFTER, f"{GGUF_DRAFTERS[architecture]} in GGUF ({architecture})")
    return Contents(MODEL, f"a model in GGUF ({architecture})")


def _is_safetensors(start: bytes) -> bool:
    """Whether a file begins with a header's plausible length (8 bytes) and a JSON object."""
    return len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**40


def _of_safetensors(path: Path) -> Contents:
    """What weights are, by the tensor names in their header.

    Where the folder has a config.json, that says more.
    """
    with suppress(OSError, ValueError), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        names = json.loads(file.read(min(size, _MAX_HEADER)))
        marks = {match[2] for match in map(_TELLING_PART.search, names) if match}
        if marks & {"lora_A", "lora_B"}:
            return Contents(ADAPTER, "weights of a PEFT adapter (safetensors)")
        if marks & {"lora_a", "lora_b"}:
            return Contents(ADAPTER, "weights of an adapter of mlx_lm.lora (safetensors)")
        if "hidden_norm" in marks or "d2t" in marks:
            return Contents(DRAFTER, "weights of a drafter (safetensors)")
    return Contents(OTHER, "weights (safetensors)")


def _describe(start: bytes) -> str:
    """What a file is in words, by its first bytes."""
    if not start:
        return _EMPTY
    for magic, words in _MAGIC.items():
        if start.lower().startswith(magic.lower()):
            return words
    try:
        text = start.decode(UTF8)
    except UnicodeDecodeError as error:
        # In the last 4 bytes, only a character that `BEGINNING` cuts may be at fault.
        if error.start < len(start) - 4:
            return _BINARY if b"\0" in start else "a file that is not UTF-8"
        text = start[: error.start].decode(UTF8)
    return _JSON if text.lstrip().startswith(("{", "[")) else _TEXT

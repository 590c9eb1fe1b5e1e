"""A target's tokenizer. Code of a repository is never run.

Kimi's repositories have no tokenizer.json but tiktoken.model, a list of base64 tokens with their
ranks, and a class of their own, whose pattern and special tokens are written down here
(moonshotai/Kimi-K2.5, tokenization_kimi.py). How ranks become merges: huggingface.co/docs,
"Tiktoken and interaction with Transformers".
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..errors import ConfigError, ModelNotFoundError
from ..validation import TOKENIZER_ERRORS, ErrorWrapper, brief, read_json
from .folder import Folder
from .reading import TOKENIZER_FILE_ERRORS

RANKS = "tiktoken.model"
SETTINGS = "tokenizer_config.json"
KIMI = "TikTokenTokenizer"  # the class of tokenization_kimi.py
FAST = "PreTrainedTokenizerFast"  # reads any tokenizer.json
_KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_KIMI_SPECIAL = 258  # ids after the ranks that are special tokens, named or reserved
# Files that mlx-lm needs in a tokenizer's folder in addition to tokenizer.json and its settings.
_OTHER_FILES = ("config.json", "generation_config.json", "*.jinja", "special_tokens_map.json")


def read_tokenizer(folder: Folder) -> Any:
    """mlx-lm's tokenizer of a folder. Raises: `ModelNotFoundError`, `ConfigError`."""
    path = folder.path
    settings = read_json(path / SETTINGS) if (path / SETTINGS).is_file() else {}
    name = settings.get("tokenizer_class")
    has_ranks = (path / RANKS).is_file()
    # Not `name in dir(transformers)`, which takes longer than loading a small model.
    with ErrorWrapper(ConfigError, f"{path}: the tokenizer cannot be read", TOKENIZER_FILE_ERRORS):
        is_known = not isinstance(name, str) or hasattr(transformers, name)
    if (path / "tokenizer.json").exists() and is_known:
        return _load(path, folder)
    if (path / "tokenizer.json").exists():
        return _load_as(folder, settings, (path / "tokenizer.json").read_bytes())
    if has_ranks and name == KIMI:
        with ErrorWrapper(ConfigError, f"{path / RANKS}: cannot be read", TOKENIZER_ERRORS):
            content = kimi_tokenizer(path / RANKS, settings).to_str()
        return _load_as(folder, settings, content.encode())
    uses_tiktoken = has_ranks or any(path.glob("*.tiktoken"))
    if uses_tiktoken or not is_known:
        form = "tiktoken's with a class" if uses_tiktoken else "a class"
        raise ConfigError(
            f"{path}: its tokenizer is {form} of the repository, {brief(name)}, whose code is not "
            f"run. Only Kimi's ({KIMI}) is supported: add a tokenizer.json."
        )
    if (path / "tokenizer.model").exists():
        return _load(path, folder)
    raise ModelNotFoundError(f"{path}: there is no tokenizer.json, the tokenizer is missing.")


def _load(path: Path, folder: Folder) -> Any:
    """mlx-lm's tokenizer of the files in `path`, with the end tokens of a model's folder."""
    # Otherwise transformers asks at the terminal whether to run the model's own code, and warns
    # of texts that the target can read.
    extra = {"trust_remote_code": False, "model_max_length": sys.maxsize}
    error_prefix = f"{folder.path}: the tokenizer cannot be read"
    with ErrorWrapper(ConfigError, error_prefix, TOKENIZER_FILE_ERRORS):
        return load_tokenizer(path, extra, eos_token_ids=folder.end_tokens)


def _load_as(folder: Folder, settings: dict[str, Any], tokenizer: bytes) -> Any:
    """The tokenizer of a tokenizer.json, without the class that the settings name."""
    plain = {name: value for name, value in settings.items() if name != "auto_map"}
    # tokenizer.json has the added tokens and their ids.
    plain.pop("added_tokens_decoder", None)
    with TemporaryDirectory() as view:
        for pattern in _OTHER_FILES:
            for file in folder.path.glob(pattern):
                Path(view, file.name).symlink_to(file.resolve())
        Path(view, "tokenizer.json").write_bytes(tokenizer)
        Path(view, SETTINGS).write_text(json.dumps(plain | {"tokenizer_class": FAST}))
        return _load(Path(view), folder)


def kimi_tokenizer(file: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a Kimi model's tiktoken.model.

    Args:
        file: lines of a token in base64 and its rank.
        settings: tokenizer_config.json; `added_tokens_decoder` names the special tokens.

    Raises `ValueError` or `LookupError` for a broken file.
    """
    ranks: dict[bytes, int] = {}
    for line in file.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
    if set(ranks.values()) != set(range(len(ranks))):
        raise ValueError("the ranks are not 0, 1, 2 and so on")
    vocabulary = {_letters(token): rank for token, rank in ranks.items()}
    model = models.BPE(vocabulary, _merges(ranks), ignore_merges=True)
    tokenizer = Tokenizer(model)
    cut = pre_tokenizers.Split(Regex(_KIMI_PATTERN), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_letters])
    tokenizer.decoder = decoders.ByteLevel()
    entries = settings.get("added_tokens_decoder") or {}
    last_id = max((int(number) for number in entries), default=0)
    special = []
    for number in range(len(ranks), max(len(ranks) + _KIMI_SPECIAL, last_id + 1)):
        entry = entries.get(str(number), {})
        content = entry.get("content", f"<|reserved_token_{number}|>")
        special.append(AddedToken(content, special=entry.get("special", True), normalized=False))
    tokenizer.add_tokens(special)
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The pairs that make each token, in the order of the tokens' ranks."""
    pairs = []
    for token, rank in ranks.items():
        for middle in range(1, len(token)):
            left = token[:middle]
            right = token[middle:]
            left_rank = ranks.get(left)
            right_rank = ranks.get(right)
            if left_rank is not None and right_rank is not None:
                pairs.append((rank, left_rank, right_rank, left, right))
    return [(_letters(left), _letters(right)) for *_, left, right in sorted(pairs)]


def _byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself if printable, else a letter after Latin-1."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + number) for number, byte in enumerate(unprintable)}


_LETTERS = _byte_letters()


def _letters(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)

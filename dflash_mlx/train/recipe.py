"""The settings of a training run, and the folder that belongs to it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ConfigError, DataError, OutputError, SettingsError
from ..settings import SEED_BITS
from ..targets import Target
from ..validation import read_json
from .initial import KINDS

# The settings that prompts and answers depend on.
OF_ANSWERS = frozenset(
    ("target", "data", "synthesize", "keep_answers", "max_tokens", "rows", "turn_tokens", "seed")
)
EPOCHS = 6  # unless steps or hours are given, as in arXiv 2602.06036


@dataclass(frozen=True)
class Recipe:
    """The settings of `train`.

    Attributes:
        data: a file of prompts, conversations or texts; see `dataset`.
        synthesize: the number of user turns that the target writes instead.
        keep_answers: learn the file's answers instead of the target's.
        kind, block_size, layers, causal: see `draft_config`.
        draft_vocab: the number of tokens that it can draft, the commonest; None is all.
        steps, hours: length of the training; without either, `EPOCHS` epochs. `hours` includes the
            prompts and answers, but at least half of them are for training.
        anchors, tokens, learning_rate, optimizer, seed: see `DrafterSettings`.
        max_tokens, rows: see `AnswerSettings`.
        bits: 4, 6 or 8 to quantize the stored drafter; None stores bf16.
        held_out: number of samples for evaluation.
    """

    data: Path | None = None
    synthesize: int | None = None
    keep_answers: bool = False
    kind: str = "dflash"
    block_size: int = 8
    layers: int | None = None
    causal: bool = False
    draft_vocab: int | None = None
    warm_start: str | None = None
    steps: int | None = None
    hours: float | None = None
    anchors: int = 64
    tokens: int = 1024
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    max_tokens: int = 256
    rows: int = 24
    turn_tokens: int = 128
    bits: int | None = None
    held_out: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.data is None) == (self.synthesize is None):
            raise SettingsError(
                "Give either a file (--data) or a number of prompts that the target writes "
                "(--synthesize N)."
            )
        if self.steps is not None and self.hours is not None:
            raise SettingsError("Give steps or hours, not both.")
        if self.keep_answers and self.data is None:
            raise SettingsError("--keep-answers needs --data.")
        for name in ("hours", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{name} is {value}: it must be above 0.")
        if self.seed >= 2**SEED_BITS:
            raise SettingsError(f"seed is {self.seed}: it must be below 2**{SEED_BITS}.")
        if self.bits not in (None, 4, 6, 8):
            raise SettingsError(f"A drafter is stored in 4, 6 or 8 bits, not {self.bits}.")
        if self.kind not in KINDS:
            raise SettingsError(f"The kind is one of {', '.join(KINDS)}, not {self.kind!r}.")
        if self.block_size < 2:
            raise SettingsError(f"A block has at least two rows, not {self.block_size}.")


def claim_folder(work: Path, target: Target, recipe: Recipe) -> None:
    """Write recipe.json. Raises `SettingsError` if the folder belongs to another recipe.

    As long as the folder has answers only, settings of the training may still change.
    """
    now = {**asdict(recipe), "data": None, "target": _identity(target)}
    if recipe.data is not None:
        try:
            now["data"] = hashlib.sha256(recipe.data.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"{recipe.data}: cannot be read ({error.strerror}).") from error
    now = json.loads(json.dumps(now))
    path = work / "recipe.json"
    # A run that failed at its data leaves only its recipe.
    made = {file.name for file in work.iterdir() if file.stem != path.stem}
    if path.exists() and made:
        try:
            then = read_json(path)
        except ConfigError as error:
            raise ConfigError(f"{path}: damaged; delete {work} to start again.") from error
        bound = OF_ANSWERS if made <= {"turns.jsonl", "answers.jsonl"} else now.keys() | then.keys()
        differing = sorted(k for k in bound if now.get(k) != then.get(k))
        if differing:
            named = ", ".join(differing)
            raise SettingsError(
                f"{work} was started with other settings ({named}): use the same settings or "
                "another --out, or delete it."
            )
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise OutputError.because(path, error) from error


def _identity(target: Target) -> str:
    """A hash of the target's config and some of its weights."""
    digest = hashlib.sha256(json.dumps(target.config, sort_keys=True, default=str).encode())
    digest.update(np.array(target.norm_weight().astype(mx.float32)).tobytes())
    return digest.hexdigest()

"""What `train` does, and which unfinished run it belongs to."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ConfigError, DataError, OutputError, SettingsError
from ..settings import SEED_BITS
from ..targets import Target
from ..validation import read_json
from .losses import Mix
from .shape import check_kind

TARGET = "target"  # of warm_start: the target's own layers
OPTIONS = {  # of the command line, where they are not called as the fields are
    "bits": "--store-bits",
    "held_out": "held_out",
    "max_tokens": "--answer-tokens",
    "mix": "--loss",
    "occurring": "--whole-vocabulary",
    "target": "--model",
    "turn_tokens": "turn_tokens",
}
# What prompts and answers depend on, and nothing that is made of them.
OF_ANSWERS = frozenset(
    ("target", "data", "synthesize", "keep_answers", "max_tokens", "rows", "turn_tokens", "seed")
)
EPOCHS = 6  # where neither steps nor hours are given, as in arXiv 2602.06036


@dataclass(frozen=True)
class Recipe:
    """What `train` does.

    Attributes:
        data: a file of prompts, conversations or texts; see `data`.
        synthesize: instead, how many user turns the target writes itself.
        keep_answers: learn the file's answers, instead of the target's own to its prompts.
        kind, block_size, layers, causal, draft_tokens: see `draft_shape`.
        steps, hours: how long to train; without either, `EPOCHS` times over the data. Of the hours,
            writing prompts and answers takes its part, half of them at most.
        anchors, tokens, learning_rate, optimizer, mix, occurring, seed: see `DrafterSettings`.
        cache_features: keep the target's features on disk.
        max_tokens, rows: of answers, see `Answering`.
        bits: 4, 6 or 8 stores the drafter so; None in bf16.
        held_out: samples that are measured on and never trained on.
    """

    data: Path | None = None
    synthesize: int | None = None
    keep_answers: bool = False
    kind: str = "dflash"
    block_size: int = 8
    layers: int | None = None
    causal: bool = False
    draft_tokens: int | None = None
    warm_start: str | None = None
    steps: int | None = None
    hours: float | None = None
    anchors: int = 64
    tokens: int = 1024
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    mix: Mix = field(default_factory=lambda: Mix(cross_entropy=0.5, kl=0.5))
    occurring: bool = True
    cache_features: bool = False
    max_tokens: int = 256
    rows: int = 24
    turn_tokens: int = 128
    bits: int | None = None
    held_out: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.data is None) == (self.synthesize is None):
            raise SettingsError(
                "Train on a file (--data) or on what the target writes "
                "(--synthesize N), on one of them."
            )
        if self.keep_answers and self.data is None:
            raise SettingsError("--keep-answers goes with --data: it learns the file's answers.")
        if self.steps is not None and self.hours is not None:
            raise SettingsError("Give steps or hours, not both.")
        least = {
            "synthesize": 2,
            "steps": 1,
            "anchors": 1,
            "tokens": 16,
            "max_tokens": 2,  # one that ends at its first token has nothing to draft
            "rows": 1,
            "turn_tokens": 4,
            "held_out": 1,
            "layers": 1,
            "draft_tokens": 16,
            "seed": 0,
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise SettingsError(f"{name} is {value}: it is at least {limit}.")
        if self.seed >= 2**SEED_BITS:
            raise SettingsError(f"seed is {self.seed}: it is below 2**{SEED_BITS}.")
        for name in ("hours", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{name} is {value}: it is a number above 0.")
        if self.bits not in (None, 4, 6, 8):
            raise SettingsError(f"A drafter is stored in 4, 6 or 8 bits, not {self.bits}.")
        check_kind(self.kind, self.block_size, self.draft_tokens)


def option_of(field: str) -> str:
    """What the command line calls a field; its own name where it has no option."""
    return OPTIONS.get(field, f"--{field.replace('_', '-')}")


def claim(work: Path, target: Target, recipe: Recipe) -> None:
    """Write down what this folder is for. Raises `SettingsError` if it is for something else.

    As long as there are answers alone, the training may still become another.
    """
    now = {**asdict(recipe), "data": None, "target": _identity(target)}
    if recipe.data is not None:
        try:
            now["data"] = hashlib.sha256(recipe.data.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"{recipe.data}: cannot be read ({error.strerror}).") from error
    now = json.loads(json.dumps(now))
    path = work / "recipe.json"
    # A command that failed at its data leaves its recipe and nothing to go on with.
    made = {file.name for file in work.iterdir() if file.stem != path.stem}
    if path.exists() and made:
        try:
            then = read_json(path)
        except ConfigError as error:
            raise ConfigError(f"{path}: damaged; delete {work} to start again.") from error
        bound = OF_ANSWERS if made <= {"turns.jsonl", "answers.jsonl"} else now.keys() | then.keys()
        differing = sorted(k for k in bound if now.get(k) != then.get(k))
        if differing:
            named = ", ".join(map(option_of, differing))
            raise SettingsError(
                f"{work} was begun with other settings ({named}): use the same, or "
                "another --out, or delete it."
            )
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise OutputError.because(path, error) from error


@contextmanager
def sole_use(work: Path) -> Iterator[None]:
    """A folder that no other training works in meanwhile; the lock ends with whoever holds it.

    Raises `SettingsError` where another one does. A file system without locks refuses nobody.
    """
    number = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"{work}: another training is at work there: wait for it, or use another --out."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise OutputError.because(work, error) from error
        yield
    finally:
        os.close(number)


def _identity(target: Target) -> str:
    """What tells targets apart: the config, and some of the weights."""
    digest = hashlib.sha256(json.dumps(target.config, sort_keys=True, default=str).encode())
    digest.update(np.array(target.norm_weight().astype(mx.float32)).tobytes())
    return digest.hexdigest()

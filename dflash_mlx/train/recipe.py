"""The settings of a training run, and the folder that belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError, OutputError, SettingsError
from ..settings import MAX_SEED, check_fields, instance_of, setting, with_field_docs
from ..validation import MAX_INT32, path_kind, read_json
from .initial import KINDS

if TYPE_CHECKING:
    from ..targets import Target

# The settings that prompts and answers depend on.
ANSWER_SETTINGS = frozenset(
    ("target", "data", "synthesize", "keep_answers", "max_tokens", "rows", "turn_tokens", "seed")
)
# The default learning rate of each optimizer.
RATES = {"adamw": 1e-3, "muon": 0.02}
# The number of epochs if neither steps nor hours are given, as in arXiv 2602.06036.
EPOCHS = 6


@with_field_docs
@dataclass(frozen=True)
class Recipe:
    """The settings of `train`. Raises `SettingsError`."""

    data: Path | None = setting(
        None,
        "JSON lines with prompts, chats or texts, or a .txt file.",
        kind=Path,
        convert=instance_of(Path),
        allowed="a path",
        metavar="FILE",
    )
    synthesize: int | None = setting(
        None,
        "Let the model write N prompts itself.",
        kind=int,
        minimum=2,
        maximum=MAX_INT32,
        metavar="N",
    )
    keep_answers: bool = setting(
        False,
        "Learn the file's answers, not the model's own.",
        kind=bool,
        options=("--keep-answers",),
    )
    max_tokens: int = setting(
        256,
        "End an answer after N tokens.",
        kind=int,
        minimum=2,
        maximum=MAX_INT32,
        metavar="N",
        options=("--answer-tokens",),
    )
    rows: int = setting(
        24,
        "How many answers are generated together.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
        metavar="N",
    )
    turn_tokens: int = setting(
        128,
        "End a prompt that the model writes after N tokens.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
    )
    kind: str = setting(
        "dflash",
        "dflash, dflash2 or dspark.",
        kind=str,
        metavar="KIND",
        choices=tuple(KINDS),
    )
    block_size: int = setting(
        8,
        "Tokens per block: a known one, and N - 1 drafts.",
        kind=int,
        minimum=2,
        maximum=MAX_INT32,
        metavar="N",
    )
    layers: int | None = setting(
        None,
        "Drafter layers. Default: 1 + an eighth of the model's.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
        metavar="N",
    )
    causal: bool = setting(
        False,
        "Let each draft position see only earlier ones.",
        kind=bool,
        options=("--causal",),
    )
    draft_vocab: int | None = setting(
        None,
        "Draft only the answers' N commonest tokens.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
        metavar="N",
    )
    warm_start: str | None = setting(
        None,
        "Start from this drafter.",
        kind=str,
        metavar="NAME",
    )
    bits: int | None = setting(
        None,
        "Bits of the stored drafter. Default: 16.",
        kind=int,
        metavar="4|6|8",
        choices=(4, 6, 8),
        options=("--store-bits",),
    )
    steps: int | None = setting(
        None,
        "Training steps. Default: six epochs.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
        metavar="N",
    )
    hours: float | None = setting(
        None,
        "Train for H hours, at most half of which go to prompts and answers.",
        kind=float,
        minimum=1e-9,
        maximum=1e9,
        metavar="H",
        allowed="above 0",
    )
    anchors: int = setting(
        64,
        "Blocks that a step learns from each sequence.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
        metavar="N",
    )
    tokens: int = setting(
        1024,
        "Tokens in each of the two batches of a step.",
        kind=int,
        minimum=16,
        maximum=MAX_INT32,
        metavar="N",
    )
    learning_rate: float = setting(
        None,
        "Peak learning rate. Default: the optimizer's.",
        kind=float,
        minimum=1e-30,
        maximum=1e30,
        metavar="R",
        allowed="above 0",
    )
    keep_features: bool = setting(
        False,
        "Keep the model's hidden states on disk instead of computing them again.",
        kind=bool,
        options=("--keep-features",),
    )
    optimizer: str = setting(
        "adamw",
        "adamw or muon.",
        kind=str,
        metavar="NAME",
        choices=tuple(RATES),
    )
    held_out: int = setting(
        32,
        "How many samples are held out for evaluation.",
        kind=int,
        minimum=1,
        maximum=MAX_INT32,
    )
    seed: int = setting(
        0,
        "Seed of everything random.",
        kind=int,
        minimum=0,
        maximum=MAX_SEED,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.learning_rate is None:
            object.__setattr__(self, "learning_rate", RATES[self.optimizer])
        if (self.data is None) == (self.synthesize is None):
            raise SettingsError(
                "Give either a file (--data) or a number of prompts that the target writes "
                "(--synthesize N)."
            )
        if self.steps is not None and self.hours is not None:
            raise SettingsError("Give steps or hours, not both.")
        if self.keep_answers and self.data is None:
            raise SettingsError("--keep-answers needs --data.")


def claim_folder(work: Path, target: Target, recipe: Recipe) -> None:
    """Write recipe.json. Raises `SettingsError` if the folder belongs to another recipe.

    As long as the folder contains only answers, the settings of the training may change.
    """
    settings = {**asdict(recipe), "data": None, "target": _identity(target)}
    if recipe.data is not None:
        try:
            settings["data"] = hashlib.sha256(recipe.data.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"{recipe.data}: cannot be read ({error.strerror}).") from error
    settings = json.loads(json.dumps(settings))
    path = work / "recipe.json"
    # A run that failed at its data leaves only its recipe.
    existing = {file.name for file in work.iterdir() if file.stem != path.stem}
    if existing and path_kind(path) is not None:
        earlier = read_json(path)
        compared: AbstractSet[str] = settings.keys() | earlier.keys()
        if existing <= {"turns.jsonl", "answers.jsonl"}:
            compared = ANSWER_SETTINGS
        differing = sorted(name for name in compared if settings.get(name) != earlier.get(name))
        if differing:
            names = ", ".join(differing)
            raise SettingsError(
                f"{work} was started with other settings ({names}): use the same settings or "
                "another --out, or delete it."
            )
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise OutputError.because(path, error) from error


def _identity(target: Target) -> str:
    """A hash of the target's config and some of its weights."""
    import mlx.core as mx
    import numpy as np

    digest = hashlib.sha256(json.dumps(target.config, sort_keys=True, default=str).encode())
    digest.update(np.array(target.norm_weight().astype(mx.float32)).tobytes())
    return digest.hexdigest()

"""The options of `dflash-mlx train`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import named

DATA, SHAPE, TRAINING, OUTPUT = "Data", "Drafter", "Training", "Output"  # what --help shows
FROM_TARGET = "target"  # of --warm-start


class Kind(StrEnum):
    """Kinds of drafters that can be trained."""

    dflash = "dflash"
    dflash2 = "dflash2"
    dspark = "dspark"


class Optimizer(StrEnum):
    """See `train.optimizers`."""

    adamw = "adamw"
    muon = "muon"


class Stored(StrEnum):
    """Bits of a stored weight."""

    four = "4"
    six = "6"
    eight = "8"


def _value(group: str, metavar: str, help: str, **limits: Any) -> Any:
    return typer.Option(metavar=metavar, help=help, rich_help_panel=group, **limits)


def _flag(name: str, group: str, help: str) -> Any:
    return typer.Option(name, metavar="", help=help, rich_help_panel=group)


Out = Annotated[
    Path,
    _value(OUTPUT, "DIR", "Where the drafter goes, and what is needed to go on.", parser=named),
]
Data = Annotated[
    Path | None,
    _value(DATA, "FILE", "JSON lines of prompts, conversations or texts; or a .txt file."),
]
Synthesize = Annotated[
    int | None, _value(DATA, "N", "Instead, let the model write N prompts itself.", min=2)
]
KeepAnswers = Annotated[
    bool, _flag("--keep-answers", DATA, "Learn the file's answers, not the model's own.")
]
AnswerTokens = Annotated[int, _value(DATA, "N", "End an answer after N tokens.", min=2)]
Rows = Annotated[int, _value(DATA, "N", "Answers that are generated at once.", min=1)]
KindOf = Annotated[Kind, _value(SHAPE, "KIND", "dflash, dflash2 or dspark.")]
BlockSize = Annotated[int, _value(SHAPE, "N", "Rows of a block, the first one given.", min=2)]
Layers = Annotated[
    int | None, _value(SHAPE, "N", "By default one for every eight of the model's, and one.", min=1)
]
Causal = Annotated[bool, _flag("--causal", SHAPE, "Rows of a block see only rows before them.")]
WarmStart = Annotated[
    str | None,
    _value(SHAPE, "NAME", "Start from a drafter, or from the model's own layers (target)."),
]
StoreBits = Annotated[
    Stored | None, _value(SHAPE, "4|6|8", "Store the drafter in so many bits, not in 16.")
]
Steps = Annotated[
    int | None, _value(TRAINING, "N", "Steps; by default six times over the data.", min=1)
]
Hours = Annotated[
    float | None, _value(TRAINING, "H", "As many steps as fit beside the answers.", min=0)
]
Anchors = Annotated[int, _value(TRAINING, "N", "Blocks of each sequence in a step.", min=1)]
Tokens = Annotated[int, _value(TRAINING, "N", "Tokens of half a step, padding too.", min=16)]
Rate = Annotated[
    float | None, _value(TRAINING, "R", "Peak learning rate; by default the optimizer's.", min=0)
]
OptimizerOf = Annotated[Optimizer, _value(TRAINING, "NAME", "adamw or muon.")]
Loss = Annotated[
    str,
    _value(TRAINING, "CE,KL,TV", "Parts of cross entropy, KL divergence and total variation."),
]
WholeVocabulary = Annotated[
    bool,
    _flag("--whole-vocabulary", TRAINING, "Learn against every token, not those that occur."),
]
Seed = Annotated[int, _value(TRAINING, "N", "Of everything that is random.", min=0)]
Json = Annotated[bool, _flag("--json", OUTPUT, "Print JSON lines and nothing else.")]

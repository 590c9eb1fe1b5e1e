"""What was learnt of a pair's drafts, kept beside its costs from one start to the next.

Costs are this machine's and can be measured before anything is decoded. How often drafts are right
is found out by drafting, and each start that begins with guesses pays for it anew: a drafter that
is right in half of all places is given blocks of 8 rows at first where 4 would bring more.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from .beliefs import WARMTHS, Beliefs

FORMAT = 2  # of the file of beliefs, and of the levels that they are about
WEIGHT = 0.5  # of what another start has learnt: its texts may have been of another kind
# What Python raises for a file's content that is not what was written.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def beliefs_file(costs: Path) -> Path:
    """Where the beliefs are whose pair's costs are in a file."""
    return costs.with_name(f"beliefs-{costs.name}")


def keep_beliefs(path: Path, beliefs: Mapping[int, Beliefs]) -> None:
    """Write what is believed, by the class of temperatures, for the next start.

    Of a class that was not drafted in what the last start knew is written as it was.
    """
    classes = {
        str(warmth): of.evidence(1.0 if of.drafts else 1 / WEIGHT) for warmth, of in beliefs.items()
    }
    keep_json(path, {"format": FORMAT, "beliefs": classes})


def read_beliefs(path: Path, slots: int) -> dict[int, Beliefs]:
    """What `keep_beliefs` wrote, of drafts of so many slots; nothing where that is not there."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return {}
        known = {
            int(warmth): Beliefs(slots, evidence, WEIGHT)
            for warmth, evidence in content["beliefs"].items()
        }
        if not all(0 <= warmth <= len(WARMTHS) for warmth in known):
            raise ValueError("no class of temperatures")
        return known
    except (IsADirectoryError, *UNREADABLE):
        what = "how often drafts are right is learnt anew"
        warnings.warn(f"dflash-mlx: {path} is damaged: {what}.", stacklevel=3)
        return {}
    except OSError:  # nothing is kept yet, or not here
        return {}


def keep_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in one move. A folder that cannot be written costs the next start some seconds."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{get_ident()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(content))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

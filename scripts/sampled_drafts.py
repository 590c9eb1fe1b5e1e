"""How many tokens a round brings at a temperature, by the way in which drafts are chosen.

    python scripts/sampled_drafts.py [--model NAME] [--limit N] [--max-tokens N] [--stock-blas]

Ways: with the learnt s of `Sharpness`, with s = 1, the argmax of q, noise of the drafter's own, and
speculative sampling by rejection, whose text is another one than plain decoding's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiment import experiment, options_of

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import Drafter
from dflash_mlx.policy.fixed import FixedWidth
from dflash_mlx.sharpness import Sharpness

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
    target: dm.Target, drafter: Drafter, prompts: Sequence[list[int]], max_tokens: int
) -> Iterator[SampledRow]:
    """A row for each of `TEMPERATURES`, over prompts given as token ids."""
    for temperature in TEMPERATURES:
        yield _row(target, drafter, prompts, max_tokens, temperature)


def _row(
    target: dm.Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    max_tokens: int,
    temperature: float,
) -> SampledRow:
    # These import MLX, which comes after the BLAS.
    from contestants import Independent
    from rejection import rejection_rounds

    from dflash_mlx.generation import max_block_size
    from dflash_mlx.settings import SamplingSettings

    learnt = Sharpness()
    ways = {
        "learnt": (drafter, FixedWidth(learnt)),
        "one": (drafter, FixedWidth(Sharpness((1.0,)))),
        "argmax": (drafter, FixedWidth(Sharpness((FAVOURITES,)))),
        "independent": (Independent(drafter), FixedWidth()),
    }
    rounds = dict.fromkeys([*ways, "rejection"], 0)
    tokens = identical = 0
    width = max_block_size(drafter)
    for number, prompt in enumerate(prompts):
        seed = SEED + number
        settings: dict[str, Any] = {"temperature": temperature, "seed": seed}
        settings["max_tokens"] = max_tokens
        plain = dm.generate(target, None, prompt, **settings)
        tokens += len(plain.tokens)
        same = True
        for name, (drafts, ranking) in ways.items():
            drafted = dm.generate(
                target, drafts, prompt, policy=ranking, block_size=width, **settings
            )
            rounds[name] += drafted.stats.rounds
            same &= drafted.tokens == plain.tokens
        identical += same
        rounds["rejection"] += rejection_rounds(
            target,
            drafter,
            prompt,
            len(plain.tokens),
            SamplingSettings(temperature, seed=seed),
            width,
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


def main() -> None:
    """Count and print."""
    options = options_of(__doc__, limit=8, max_tokens=128)
    target, drafter, prompts = experiment(options)
    for row in sampled_rows(target, drafter, prompts, options.max_tokens):
        print(
            f"T = {row.temperature}: learnt s {row.learnt:.2f} (s = {row.sharpness:g}), "
            f"s = 1 {row.one:.2f}, argmax {row.argmax:.2f}, independent {row.independent:.2f}, "
            f"rejection {row.rejection:.2f}; {row.share_of_best:.3f} of the best, "
            f"{row.identical}/{row.prompts} identical",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""What a trained drafter reaches, and its model card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dflash_mlx
from dflash_mlx.errors import OutputError
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.machine.facts import machine

if TYPE_CHECKING:
    from dflash_mlx import Target
    from dflash_mlx.train.recipe import Recipe
    from dflash_mlx.train.run import Trained

MEASURED, MAX_TOKENS = 16, 256  # held-out prompts, and tokens of each answer


@dataclass(frozen=True)
class Scores:
    """A drafter on held-out prompts, greedy, with whole blocks."""

    prompts: int
    identical: int  # answers equal to those of plain decoding
    tokens_per_round: float  # acceptance length over all prompts
    speedup: float  # over plain decoding, all prompts together


def measure_held_out(target: Target, out: Path) -> Scores:
    """Answer the prompts of held_out.jsonl plainly and with the stored drafter."""
    from dflash_mlx.bench.measure import Comparison, warm_up

    drafter = dflash_mlx.load_drafter(str(out))
    warm_up(target, drafter)
    lines = (out / "held_out.jsonl").read_text(encoding="utf-8").split("\n")
    prompts = [json.loads(line)["ids"] for line in lines if line][:MEASURED]
    runs = []
    for ids in prompts:
        runs.append(Comparison(target, drafter, ids, max_tokens=MAX_TOKENS))
        runs[-1].run_pair()
    plain, drafted = ([getattr(r, way)[0].stats for r in runs] for way in ("plain", "drafted"))
    tokens = sum(stats.round_tokens for stats in drafted)
    rounds = sum(stats.rounds for stats in drafted)
    seconds = [sum(stats.decode_seconds for stats in way) for way in (plain, drafted)]
    return Scores(
        prompts=len(runs),
        identical=sum(run.first_difference is None for run in runs),
        tokens_per_round=tokens / max(rounds, 1),
        speedup=seconds[0] / max(seconds[1], 1e-9),
    )


def write_card(
    target: Target,
    recipe: Recipe,
    done: Trained,
    scores: Scores,
    hours: float,
    blas: BlasInfo,
    out: Path,
) -> None:
    """Write README.md: what the drafter reaches, and how it was trained. Raises `OutputError`."""
    plan, config = done.plan, done.config
    data = f"the file {recipe.data.name}" if recipe.data else "prompts written by the target"
    answers = "the file's answers" if recipe.keep_answers else "the target's own greedy answers"
    settings = {k: v for k, v in asdict(recipe).items() if v is not None and k != "data"}
    lines = [
        f"# A drafter for {Path(target.name).name}",
        "",
        "It drafts tokens that the target verifies, so the text stays the target's own.",
        "",
        f"    dflash-mlx generate --model {target.name} --draft {out} 'Hello'",
        "",
        "## Results",
        "",
        "| held-out prompts | tokens per step | speedup | identical to plain decoding |",
        "|---|---|---|---|",
        f"| {scores.prompts} | {scores.tokens_per_round:.2f} | {scores.speedup:.2f}x |"
        f" {scores.identical} of {scores.prompts} |",
        "",
        f"Greedy, at most {MAX_TOKENS} tokens, blocks of {config['block_size']} rows, on: "
        + ", ".join(f"{name} {value}" for name, value in machine(blas).items())
        + ".",
        "",
        "## Training",
        "",
        f"{plan.samples:,} samples with {plan.answer_tokens:,} tokens of answers: {data}, with "
        f"{answers}. {plan.steps:,} steps of {plan.tokens_of_step:,} tokens; the last run took "
        f"{hours:.2f} hours.",
        "",
        *(f"- {name}: {value}" for name, value in settings.items()),
        "",
    ]
    try:
        (out / "README.md").write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise OutputError.because(out / "README.md", error) from error

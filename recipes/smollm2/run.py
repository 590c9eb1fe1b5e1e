"""The recipe of SmolLM2's drafter: prompts, answers and their features, training, scores.

    cd recipes && python -m smollm2 OUT --work FOLDER --data FOLDER

It goes on from the drafter in the package; `--fresh` begins with random weights. Interrupted? Run
it again: whole chunks of answers and the checkpoint are kept, and the bits are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.load import drafter_folder, load_drafter, load_target
from dflash_mlx.train.dataset import Sample
from dflash_mlx.train.drafter import DrafterSettings, save_drafter, train_drafter
from dflash_mlx.train.fit import StepReport
from dflash_mlx.train.losses import LossWeights

from .write import say, write_chunks

MODEL = "smollm2"
CHUNKS, STEPS, RATE, SEED = 3, 260, 0.006, 68
HELD_OUT = 40
STORED = {"group_size": 32, "bits": 4}


def split(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Held-out conversations, and those to learn from."""
    chosen = {*Random(SEED).sample(range(len(samples)), min(HELD_OUT, len(samples) // 10))}
    held_out = [sample for i, sample in enumerate(samples) if i in chosen]
    return held_out, [sample for i, sample in enumerate(samples) if i not in chosen]


def say_step(report: StepReport) -> None:
    """Print a step's loss, and the held-out scores where there are some."""
    line = f"step {report.step}/{report.steps} loss {report.loss:.3f} tau {report.metric:.2f}"
    if report.held_out_loss is not None:
        line += f" held out {report.held_out_loss:.4f} {report.held_out_metric:.3f}"
    say(line)


def average_with(drafter: DFlash, start: DFlash) -> None:
    """Average the trained matrices with those before training.

    New answers alone make it forget: on prompts that neither saw, the average drafts better than
    both (dflash_mlx/smollm2/README.md).
    """
    before = dict(tree_flatten(start.parameters()))
    learnt = tree_flatten(drafter.trainable_parameters())
    drafter.load_weights([(n, (w + before[n]) / 2) for n, w in learnt], strict=False)


def main() -> None:
    """Run what is not done yet."""
    parser = argparse.ArgumentParser(description="Train the drafter of SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=Path, help="folder of the drafter")
    parser.add_argument("--work", type=Path, required=True, help="folder of answers and checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="folder of training splits")
    parser.add_argument("--start", default=MODEL, help="the drafter to go on from")
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    target, start = load_target(MODEL), load_drafter(options.start, kernels="off")
    dequantize_model(start)
    raw: dict[str, Any] = dict(drafter_folder(options.start, Hub()).config)
    samples = write_chunks(target, start, options.data, options.work, SEED, options.chunks)
    held_out, training = split(samples)
    say(
        f"{len(training)} conversations, {sum(len(s.tokens) for s in training)} tokens, "
        f"{sum(b - a for s in training for a, b in s.answers)} of answers"
    )
    settings = DrafterSettings(
        steps=options.steps,
        tokens=1024,
        anchors=32,
        learning_rate=RATE,
        optimizer="muon",
        loss_weights=LossWeights(cross_entropy=0.5, kl=0.5),
        seed=SEED,
        every=max(1, options.steps // 4),
    )
    unquantized = {key: value for key, value in raw.items() if key != "quantization"}
    drafter = train_drafter(
        target,
        DraftConfig.from_dict(unquantized),
        lambda epoch: training,
        settings,
        held_out,
        options.work / "checkpoint.safetensors",
        say_step,
        start,
        options.work / "features",
    )
    average_with(drafter, start)
    save_drafter(drafter, unquantized | {"quantization": STORED}, options.out)


if __name__ == "__main__":
    main()

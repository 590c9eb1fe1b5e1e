"""The recipe of SmolLM2's drafter: prompts, answers and their features, training.

    cd recipes && python -m smollm2 OUT --work FOLDER --data FOLDER

Interrupted? Run it again: whole chunks of answers and the checkpoint are kept, and the bits are the
same. Several processes may write the answers of a seed each: `--answers-only --seeds 68`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from mlx_lm.utils import dequantize_model

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.loading.load import load_target
from dflash_mlx.targets import Target
from dflash_mlx.train.dataset import Sample
from dflash_mlx.train.drafter import DrafterSettings, common_tokens, save_drafter, train_drafter
from dflash_mlx.train.fit import StepReport
from dflash_mlx.train.initial import KINDS, draft_config, tap_layers
from dflash_mlx.train.losses import LossWeights

from .answers import ROWS
from .write import say, write_chunks

MODEL = "smollm2"
MASK = 0  # a token that no text has
SEEDS = range(68, 76)  # of the answers
CHUNKS = 4  # of each seed
STEPS = 2000
TOKENS = 4096  # of half a step; on a GPU, 16,384 are faster and take 23 GB
ANCHORS = 64  # blocks of each conversation in a step
RATE = 0.02  # Muon's peak learning rate
HEAD = 8192  # tokens that can be drafted: those that the answers have most often
HELD_OUT = 200  # questions, or a tenth of them if there are fewer than 2,000
STORED = {"group_size": 32, "bits": 4}


def open_target() -> Target:
    """SmolLM2 in f32 on every device, so that rounding decides as little as it can."""
    target = load_target(MODEL, kernels="off")
    model = dequantize_model(target.model)
    model.set_dtype(mx.float32)
    return Target(model, target.tokenizer, target.config, target.name)


def split(samples: list[Sample], stops: Sequence[int]) -> tuple[list[Sample], list[Sample]]:
    """Held-out conversations, and those to learn from: no first question is in both.

    `stops` are the tokens that end a turn.
    """
    by_question: dict[tuple[int, ...], list[Sample]] = {}
    for sample in dict.fromkeys(samples):
        ends = [i for i, token in enumerate(sample.tokens) if token in stops]
        question = sample.tokens[: ends[1]]  # the system's turn and the user's first
        by_question.setdefault(question, []).append(sample)
    count = min(HELD_OUT, len(by_question) // 10)
    chosen = {*Random(MODEL).sample([*by_question], count)}
    held_out: list[Sample] = []
    training: list[Sample] = []
    for question, conversations in by_question.items():
        side = held_out if question in chosen else training
        side += conversations
    return held_out, training


def say_step(report: StepReport) -> None:
    """Print a step's loss, and the held-out scores where there are some."""
    line = f"step {report.step}/{report.steps} loss {report.loss:.3f} tau {report.metric:.2f}"
    if report.held_out_loss is not None:
        line += f" held out {report.held_out_loss:.4f} {report.held_out_metric:.3f}"
    say(line)


def shape(
    target: Target, kind: str, layers: int, block: int, training: list[Sample]
) -> dict[str, Any]:
    """The config.json of the drafter, whose own head has the most common tokens of `training`."""
    count = len(common_tokens(training, HEAD))
    head = {"draft_vocab_size": count, "tie_word_embeddings": False}
    return draft_config(target, kind, block, MASK, layers) | head


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Train the drafter of SmolLM2-135M-Instruct.")
    parser.add_argument("out", type=Path, help="folder of the drafter")
    parser.add_argument("--work", type=Path, required=True, help="folder of answers and features")
    parser.add_argument("--data", type=Path, required=True, help="folder of training splits")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="of each seed")
    parser.add_argument("--rows", type=int, default=ROWS, help="answers written together")
    parser.add_argument("--answers-only", action="store_true")
    parser.add_argument("--kind", choices=sorted(KINDS), default="dspark")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block", type=int, default=7, help="rows of a block")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of half a step")
    return parser.parse_args()


def main() -> None:
    """Run what is not done yet."""
    options = parsed()
    target = open_target()
    layers = tap_layers(target.num_layers)
    samples = []
    for seed in options.seeds:
        samples += write_chunks(
            target, layers, options.data, options.work, seed, options.chunks, options.rows
        )
    if options.answers_only:
        return
    held_out, training = split(samples, target.tokenizer.eos_token_ids)
    say(
        f"{len(training)} conversations, {sum(len(s.tokens) for s in training)} tokens, "
        f"{sum(b - a for s in training for a, b in s.answers)} of answers"
    )
    settings = DrafterSettings(
        steps=options.steps,
        tokens=options.tokens,
        anchors=ANCHORS,
        learning_rate=RATE,
        optimizer="muon",
        loss_weights=LossWeights(cross_entropy=0.5, kl=0.5),
        seed=SEEDS[0],
        every=max(1, options.steps // 8),
    )
    raw = shape(target, options.kind, options.layers, options.block, training)
    options.out.mkdir(parents=True, exist_ok=True)
    drafter = train_drafter(
        target,
        DraftConfig.from_dict(raw),
        lambda epoch: training,
        settings,
        held_out,
        options.out / "checkpoint.safetensors",
        say_step,
        kept=options.work / "features",
    )
    save_drafter(drafter, raw | {"quantization": STORED}, options.out)


if __name__ == "__main__":
    main()

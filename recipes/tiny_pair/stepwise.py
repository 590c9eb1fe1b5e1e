"""Drafters of the embedded target that draft token by token, to compare with its DFlash.

A head of the MTP kind and a smaller language model, a few minutes of one core each:

    cd recipes && python -m tiny_pair.stepwise OUT --work FOLDER
    dflash-mlx bench --draft OUT/mtp        dflash-mlx bench --draft OUT/small
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

from dflash_mlx.machine.blas import use_fast_blas

if __name__ == "__main__":
    use_fast_blas(flush_denormals=True)  # before anything imports MLX

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.drafter.mtp import LAYOUTS, MTPHead
from dflash_mlx.loading.load import load_target
from dflash_mlx.targets import Target
from dflash_mlx.train.dataset import Arrays, BatchStream, Sample
from dflash_mlx.train.fit import Loss, Parameters, fit, make_optimizer

from .pair import TARGET_CONFIG, epochs
from .progress import Printer
from .target import collate, new_model, next_token_loss, save_model

SEED = 900_000
STEPS = 200
TOKENS = 1536  # of a micro-batch; two make a step
RATE = 0.02  # Muon's
PASSES = (1.0, 0.7, 0.5)  # weights of the losses of a head's first, second and third token
SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 256, "head_dim": 32}


def head_loss(head: MTPHead, target: Target) -> Loss:
    """A loss function for `fit`, of a batch from `collate`.

    It returns the mean loss of `PASSES`, and the share of first tokens that are right. Each pass
    reads the outputs of the one before it, as drafting does; its rows see each other and not the
    rows of earlier passes.
    """

    def loss(parameters: Parameters, ids: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
        head.update(parameters)
        _, taps = target.features(ids, head.tap_layers)
        features = mx.stop_gradient(head.fuse(taps))
        total = mx.array(0.0)
        share = mx.array(0.0)
        for step, weight in enumerate(PASSES, 1):
            # Row i reads the feature at token i and token i + step, and predicts the next token.
            rows = ids.shape[1] - 1 - step
            following = ids[:, step : step + rows]
            labels = ids[:, step + 1 :]
            counted = weights[:, step : step + rows]
            features = head.advance(features[:, :rows], following, head.make_cache(), target)
            logits = target.head(features)
            entropy = nn.losses.cross_entropy(logits, labels) * counted
            total += weight * entropy.sum() / counted.sum()
            if step == 1:
                right = (mx.argmax(logits, axis=-1) == labels) * counted
                share = mx.stop_gradient(right.sum() / counted.sum())
        return total / sum(PASSES), share

    return loss


def train(loss: Loss, start: Any, target: Target, name: str, work: Path) -> Parameters:
    """Fit parameters to the corpus; an interrupted run resumes."""
    samples = epochs(target.tokenizer, SEED)

    def batches(samples: list[Sample], rng: Random) -> Arrays:
        return collate(samples, rng)

    return fit(
        loss,
        start,
        make_optimizer("muon", RATE, STEPS),
        lambda position: BatchStream(samples, batches, TOKENS, SEED, position),
        STEPS,
        work / f"{name}.safetensors",
        Printer(name, "right"),
        every=50,
    )


def train_head(target: Target, out: Path, work: Path) -> None:
    """Train a head, and save it with the weight names of Qwen's heads."""
    layout = LAYOUTS["qwen3"]
    mx.random.seed(SEED)
    head = MTPHead(target, layout)
    head.update(train(head_loss(head, target), head.trainable_parameters(), target, "mtp", work))
    theirs = {ours: name for name, ours in layout.names.items()}
    weights = {}
    for name, array in tree_flatten(head.parameters()):
        ours = next(prefix for prefix in theirs if prefix and name.startswith(prefix))
        stored = f"{layout.prefix}{theirs[ours]}{name.removeprefix(ours)}"
        weights[stored] = array.astype(mx.bfloat16)
    folder = out / "mtp"
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_mtp"}) + "\n")


def train_small(target: Target, out: Path, work: Path) -> None:
    """Train a smaller language model with the target's tokenizer."""
    config = TARGET_CONFIG | SMALL
    model = new_model(config, SEED)
    start = model.trainable_parameters()
    model.update(train(next_token_loss(model), start, target, "small", work))
    save_model(model, config, out / "small")
    folder = Path(__file__).parents[2] / "dflash_mlx" / "tiny" / "target"
    for file in folder.glob("*token*.json"):
        shutil.copy(file, out / "small")


def main() -> None:
    """Train what is not there yet."""
    parser = argparse.ArgumentParser(description="Train stepwise drafters of the embedded target.")
    parser.add_argument("out", type=Path, help="folder of the drafters")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    target = load_target("tiny", kernels="off")
    for name, stage in (("mtp", train_head), ("small", train_small)):
        if (options.out / name / "model.safetensors").exists():
            print(f"kept as it is: {options.out / name}", file=sys.stderr)
        else:
            stage(target, options.out, options.work)


if __name__ == "__main__":
    main()

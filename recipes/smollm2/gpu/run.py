"""Training from the shipped weights until a time, with checkpoints that are scored as stored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file

import dflash_mlx

from .acceptance import acceptance
from .drafter import NOT_TRAINED, Batch, Drafter, start_weights
from .features import Features, Sample, epoch, training_batches
from .figures import Figures
from .optimizer import rate_share
from .stored import Weights, load, rounded_to_stored, save
from .target import SmolLM2
from .training import Training

SHIPPED = Path(dflash_mlx.__file__).parent / "smollm2"
HELD_OUT_TOKENS = 8192  # of a batch
REPORT = 20  # steps between two lines of losses
# The last checkpoint has RESERVE times as long as the one before it took, and RESERVE seconds.
RESERVE = 2
PART = 15 * 2**20  # bytes of a file of unquantized weights
# Weights are scored as trained, and mixed: these shares of the trained ones with shipped ones.
SHARES = (1.0, 0.5)


class Run:
    """A training run.

    Args:
        out: the folder of the drafter, of figures and of work/training.pt, from which it goes on.
        target: the model.
        layers: of the drafter.
        seed: of the order of the data, and of new layers.
        figures: hears of everything.
    """

    def __init__(
        self, out: Path, target: SmolLM2, layers: int, seed: int, figures: Figures
    ) -> None:
        self._out = out
        self._target = target
        self._seed = seed
        self._figures = figures
        self._layers = layers
        config, weights = load(SHIPPED)
        self._config = config
        self._shipped = {name: weight.to(target.device) for name, weight in weights.items()}
        self._group = config["quantization"]["group_size"]
        self._best_file = out / "work" / "best.json"
        self._best = 0.0
        if self._best_file.exists():
            self._best = float(json.loads(self._best_file.read_text()))

    def read(
        self, suites: dict[str, list[Sample]], held_out: list[Sample], training: list[Sample]
    ) -> None:
        """Compute the target's features of all samples that are scored or trained on."""
        layers = self._config["dflash_config"]["target_layer_ids"]
        self._suites = {
            name: Features(self._target, layers, samples) for name, samples in suites.items()
        }
        self._held_out = Features(self._target, layers, held_out)
        self._training = Features(self._target, layers, training)
        self._scales = self._training.tap_scales()
        agreement = {
            name: round(features.agreement(), 4) for name, features in self._suites.items()
        }
        self._figures.add("features", agreement=agreement)

    def score_shipped(self) -> None:
        """Score the shipped drafter on the same answers."""
        self._shipped_scores = self._scores(self._config, self._shipped)
        self._figures.add("shipped", acceptance=self._shipped_scores)

    def train(
        self, tokens: int, anchors: int, peak: float, deadline: float, checkpoint: float
    ) -> None:
        """Train until a time, which the learning rate follows, too.

        Args:
            tokens, anchors: of a step, and of each sequence.
            peak: of the learning rate.
            deadline: the time.monotonic() at which everything is written.
            checkpoint: seconds between checkpoints.
        """
        config, weights = start_weights(
            self._config, self._shipped, self._scales, self._layers, self._seed
        )
        training = Training(Drafter(config, self._target, self._scales), weights)
        state = self._out / "work" / "training.pt"
        if state.exists():
            training.restore(state)
        random = Random(f"{self._seed} {training.steps}")
        batches = training_batches(self._training, tokens, anchors, random)
        needed = self._checkpoint(training, config, anchors)
        before = training.seconds
        start = time.monotonic()
        saved = start
        while time.monotonic() < (end := deadline - RESERVE * (needed + 1)):
            training.seconds = before + time.monotonic() - start
            progress = training.seconds / (training.seconds + end - time.monotonic())
            self._step(training, batches, peak * rate_share(progress))
            if time.monotonic() - saved > checkpoint:
                training.save(state)
                needed = self._checkpoint(training, config, anchors)
                saved = time.monotonic()
        training.save(state)
        self._checkpoint(training, config, anchors)
        self._save_unquantized(training.result())

    def _step(self, training: Training, batches: Iterator[Batch], rate: float) -> None:
        loss, tau = training.step([next(batches)], rate)
        if training.steps % REPORT == 0:
            self._figures.add(
                "step",
                step=training.steps,
                rate=round(rate, 5),
                loss=round(float(loss), 4),
                tau=round(float(tau), 3),
            )

    def _checkpoint(self, training: Training, config: dict, anchors: int) -> float:
        """Score the weights, and save them if they are the best. Returns the seconds this took."""
        start = time.monotonic()
        loss, tau = self._held_out_loss(training, anchors)
        figures = {"step": training.steps, "held_out_loss": loss, "held_out_tau": tau}
        trained = training.result()
        for share in SHARES if config == self._config else SHARES[:1]:
            weights = trained if share == 1 else self._mixed(trained, share)
            scores = self._scores(config, weights)
            ratios = [scores[name] / self._shipped_scores[name] for name in scores]
            mean = sum(ratios) / len(ratios)
            self._figures.add(
                "checkpoint",
                **figures,
                share=share,
                acceptance=scores,
                over_shipped=round(mean, 4),
                lowest_suite=round(min(ratios), 4),
            )
            if mean > self._best:
                self._best = mean
                save(config, weights, self._out / "drafter")
                self._best_file.write_text(json.dumps(mean))
        return time.monotonic() - start

    def _mixed(self, trained: Weights, share: float) -> Weights:
        """The shipped weights and the trained ones, averaged with a weight of `share` for these."""
        return {
            name: weight if name in NOT_TRAINED else weight.lerp(trained[name], share)
            for name, weight in self._shipped.items()
        }

    @torch.no_grad()
    def _held_out_loss(self, training: Training, anchors: int) -> tuple[float, float]:
        """Mean loss and tau on held-out answers, at the same anchors each time."""
        values = []
        for batch in epoch(self._held_out, HELD_OUT_TOKENS, anchors, Random(0)):
            slots = training.drafter(training.weights, batch)
            values.append(torch.stack([slots.loss(), slots.tau()]))
        loss, tau = torch.stack(values).mean(dim=0).tolist()
        return round(loss, 4), round(tau, 4)

    def _scores(self, config: dict, weights: Weights) -> dict[str, float]:
        """Tokens per step of each suite, with the weights as they are stored."""
        drafter = Drafter(config, self._target, torch.ones_like(self._scales))
        stored = rounded_to_stored(weights, self._group)
        scores = {}
        for name, features in self._suites.items():
            tokens, steps = acceptance(drafter, stored, features)
            scores[name] = round(tokens / steps, 3)
        return scores

    def _save_unquantized(self, weights: Weights) -> None:
        """Write the trained weights in bf16, in files of at most `PART` bytes."""
        parts: list[Weights] = [{}]
        size = 0
        for name, weight in weights.items():
            if name in NOT_TRAINED:
                continue
            if size + 2 * weight.numel() > PART:
                parts.append({})
                size = 0
            parts[-1][name] = weight.bfloat16().cpu().contiguous()
            size += 2 * weight.numel()
        for number, part in enumerate(parts):
            save_file(part, self._out / f"unquantized-{number}.safetensors")

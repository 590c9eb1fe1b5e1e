"""Steps of training, and its state, which can be stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .drafter import FUSION, NOT_TRAINED, Batch, Drafter
from .optimizer import Optimizer
from .stored import Weights


class Training:
    """A drafter in training.

    Args:
        drafter: the network.
        weights: what it begins with, for taps divided by their scales.
    """

    def __init__(self, drafter: Drafter, weights: Weights) -> None:
        self.drafter = drafter
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self.steps = 0
        self.seconds = 0.0
        self._trained = [name for name in weights if name not in NOT_TRAINED]
        trained = {name: self.weights[name].requires_grad_() for name in self._trained}
        self._optimizer = Optimizer(trained)

    def step(self, batches: Sequence[Batch], rate: float) -> tuple[Tensor, Tensor]:
        """One step on the mean gradient of batches; returns their mean loss and tau."""
        trained = [self.weights[name] for name in self._trained]
        losses = []
        taus = []
        sums = [torch.zeros_like(weight) for weight in trained]
        for batch in batches:
            slots = self.drafter(self.weights, batch)
            loss = slots.loss()
            for total, part in zip(sums, torch.autograd.grad(loss, trained), strict=True):
                total += part / len(batches)
            losses.append(loss.detach())
            taus.append(slots.tau())
        self._optimizer.update(dict(zip(self._trained, sums, strict=True)), rate)
        self.steps += 1
        return torch.stack(losses).mean(), torch.stack(taus).mean()

    def result(self) -> Weights:
        """The trained weights, for taps that are not divided by their scales."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return weights | {FUSION: weights[FUSION] / self.drafter.scales}

    def save(self, path: Path) -> None:
        """Write the state, whole or not at all."""
        unfinished = path.with_suffix(".part")
        state: dict[str, Any] = {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "scales": self.drafter.scales,
            "optimizer": self._optimizer.state,
            "steps": self.steps,
            "seconds": self.seconds,
        }
        torch.save(state, unfinished)
        unfinished.replace(path)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Continue from a state that `save` has written."""
        state = torch.load(path, map_location=self.drafter.target.device)
        if state["weights"].keys() != self.weights.keys():
            raise SystemExit(f"{path} has other --layers: delete it, or use another folder.")
        for name, weight in state["weights"].items():
            self.weights[name].copy_(weight)
        self.drafter = replace(self.drafter, scales=state["scales"])  # the weights are made for it
        self._optimizer.state = state["optimizer"]
        self.steps = state["steps"]
        self.seconds = state["seconds"]

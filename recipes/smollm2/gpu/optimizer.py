"""MLX's Muon and AdamW in PyTorch, as dflash_mlx/train/fit.py puts them together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .stored import Weights

ADAM_SHARE = 0.15  # of Muon's learning rate
BETAS = (0.9, 0.98)
MOMENTUM = 0.95
MAX_NORM = 1.0
WARM_UP = 0.04
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton and Schulz's iteration


def rate_share(progress: float) -> float:
    """The share of the peak rate: a linear warm-up, then cosine decay to 2%.

    Args:
        progress: from 0 to 1, the share of the training that is done.
    """
    if progress < WARM_UP:
        return progress / WARM_UP
    done = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """Muon for matrices, AdamW without weight decay for vectors.

    Args:
        weights: what is trained; they are changed in place.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.state = {
            name: [torch.zeros_like(weight) for _ in range(1 if weight.ndim == 2 else 2)]
            for name, weight in weights.items()
        }

    @torch.no_grad()
    def update(self, gradients: Weights, rate: float) -> None:
        """One step, with the gradients' common norm clipped."""
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()
        clip = (MAX_NORM / (norm.sqrt() + 1e-6)).clamp(max=1.0)
        for name, weight in self._weights.items():
            gradient = gradients[name] * clip
            if weight.ndim == 2:
                self._muon(weight, gradient, self.state[name][0], rate)
            else:
                self._adam(weight, gradient, self.state[name], ADAM_SHARE * rate)

    def _muon(self, weight: Tensor, gradient: Tensor, moment: Tensor, rate: float) -> None:
        moment.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(torch.lerp(gradient, moment, MOMENTUM))
        weight -= rate * max(1, weight.shape[0] / weight.shape[1]) ** 0.5 * update

    def _adam(self, weight: Tensor, gradient: Tensor, moments: list[Tensor], rate: float) -> None:
        mean, square = moments
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient.square(), 1 - BETAS[1])
        weight -= rate * mean / (square.sqrt() + 1e-8)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        products = x @ x.T
        x = a * x + (b * products + c * products @ products) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x

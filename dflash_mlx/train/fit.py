"""The training loop of target and drafter: optimizer, clipping, checkpoints, the best parameters.

It is reproducible: the schedule counts steps, not seconds, and a run that was interrupted and
resumed ends with bitwise the same parameters. On a CPU the micro-batches of a step run on streams
of their own, one core each.

Muon (K. Jordan and others, 2024) orthogonalizes the update of every hidden matrix. On the embedded
target it needs less than half of AdamW's steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import SettingsError, WeightsError
from ..machine.saving import save_arrays
from ..memory import SPAN, compute
from ..validation import path_kind
from .dataset import BatchStream

BETAS = [0.9, 0.98]
# With Muon, the parameters that AdamW updates have this share of Muon's learning rate.
ADAM_SHARE = 0.15
# The gradient of a step is the mean of this many batches.
MICRO_BATCHES = 2
# Gradients are clipped to this norm.
MAX_NORM = 1.0


def schedule(peak: float, steps: int, warmup: float = 0.04) -> Callable[[mx.array], mx.array]:
    """Linear warm-up over a share of the steps, then cosine decay to 2% of the peak."""
    rise = max(1, round(steps * warmup))
    fall = optim.cosine_decay(peak, max(1, steps - rise), peak * 0.02)
    return optim.join_schedules([optim.linear_schedule(peak / rise, peak, rise), fall], [rise])


def is_hidden_matrix(name: str, weight: mx.array) -> bool:
    """Whether Muon applies: a matrix that is neither an embedding, a codebook nor a head."""
    tables = ("embed", "codebook", "lm_head")
    return weight.ndim == 2 and not any(table in name for table in tables)


def make_optimizer(name: str, learning_rate: float, steps: int) -> optim.Optimizer:
    """Make the optimizer: "adamw", which the papers use for drafters, or "muon".

    With "muon", Muon updates the hidden matrices, and AdamW updates embeddings and vectors at a
    share of the learning rate.

    Raises `SettingsError` for another name.
    """
    peak = schedule(learning_rate, steps)
    if name == "adamw":
        return optim.AdamW(peak, betas=BETAS, weight_decay=0.02)
    if name != "muon":
        raise SettingsError(f"optimizer is {name!r}: choose adamw or muon.")
    rest = optim.AdamW(schedule(learning_rate * ADAM_SHARE, steps), betas=BETAS, weight_decay=0.0)
    matrices = optim.Muon(peak, weight_decay=0.0)
    return optim.MultiOptimizer([matrices, rest], [is_hidden_matrix])


Parameters = dict[str, Any]
Loss = Callable[..., tuple[mx.array, mx.array]]
Validation = Callable[[Parameters], tuple[float, float]]


@dataclass(frozen=True)
class StepReport:
    """Progress after a step."""

    step: int
    steps: int
    loss: float
    metric: float
    held_out_loss: float | None = None
    held_out_metric: float | None = None


Progress = Callable[[StepReport], None]


@dataclass
class TrainingState:
    """What a checkpoint stores in addition to arrays."""

    step: int = 0
    position: tuple[int, int] = (0, 0)
    best_loss: float = float("inf")


def fit(
    loss: Loss,
    parameters: Parameters,
    optimizer: optim.Optimizer,
    batches: Callable[[tuple[int, int]], BatchStream],
    steps: int,
    checkpoint: Path | None = None,
    progress: Progress = lambda report: None,
    validate: Validation | None = None,
    every: int = 0,
) -> Parameters:
    """Minimize `loss` and return the trained parameters.

    Args:
        loss: (parameters, *arrays of a batch) -> (loss, one metric to display).
        parameters: a tree of arrays to start from.
        optimizer: a new optimizer. Its learning rate may be a schedule.
        batches: position -> a stream that starts there.
        steps: optimizer steps, each of `MICRO_BATCHES` batches.
        checkpoint: a file; if it exists, training resumes from it.
        validate: parameters -> (held-out loss, metric). With it the best parameters are returned.
        every: steps between validations, and checkpoints; 0 is never.

    Raises `WeightsError` for a checkpoint of other parameters, `OutputError` if none can be
    written, and `SettingsError` if the loss is not finite.
    """
    optimizer.init(parameters)
    state = TrainingState()
    best = parameters
    if checkpoint is not None and path_kind(checkpoint) is not None:
        parameters, best, state = restore(checkpoint, parameters, optimizer)
    source = batches(state.position)
    gradient = mx.compile(mx.value_and_grad(loss))
    update = compiled_update(optimizer)
    streams = [micro_batch_stream() for _ in range(MICRO_BATCHES)]
    pending = [source.next() for _ in streams]
    while state.step < steps:
        state.position = source.position
        results = []
        for stream, arrays in zip(streams, pending, strict=True):
            with mx.stream(stream):
                results.append(gradient(parameters, *arrays))
        parameters, mean, metric = update(parameters, results)
        mx.async_eval(parameters, optimizer.state, mean, metric)
        state.step += 1
        if state.step < steps:
            pending = [source.next() for _ in streams]  # while the step computes
        compute(parameters, optimizer.state)
        if state.step % SPAN == 0:
            mx.clear_cache()
        report = StepReport(state.step, steps, loss=float(mean), metric=float(metric))
        _check_finite(report)
        pauses = every > 0 and state.step % every == 0
        if validate and pauses:
            held_out_loss, held_out_metric = validate(parameters)
            report = replace(report, held_out_loss=held_out_loss, held_out_metric=held_out_metric)
            if held_out_loss < state.best_loss:
                best = parameters
                state.best_loss = held_out_loss
        progress(report)
        if checkpoint and pauses:
            save(checkpoint, parameters=parameters, best=best, optimizer=optimizer, state=state)
    return best if state.best_loss < float("inf") else parameters


def _check_finite(report: StepReport) -> None:
    """Raise `SettingsError` if the loss is not finite."""
    if not isfinite(report.loss):
        raise SettingsError(
            f"Training diverged: the loss of step {report.step} is {report.loss}. Lower "
            "--learning-rate and use another folder."
        )


def micro_batch_stream() -> mx.Stream:
    """A new stream on the CPU, the default stream on a GPU."""
    if mx.default_device() == mx.cpu:
        return mx.new_stream(mx.cpu)
    return mx.default_stream(mx.default_device())


def compiled_update(
    optimizer: optim.Optimizer,
) -> Callable[..., tuple[Parameters, mx.array, mx.array]]:
    """A compiled function: mean gradient of the micro-batches, clip, update."""

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def update(parameters: Parameters, results: list) -> tuple[Parameters, mx.array, mx.array]:
        gradients = [gradient for _, gradient in results]
        # Rounding depends on the memory layout, which a checkpoint does not store.
        mean = tree_map(lambda *parts: mx.contiguous(mean_array(parts)), *gradients)
        mean, _ = optim.clip_grad_norm(mean, MAX_NORM)
        values = [value for value, _ in results]
        loss, metric = (mean_array(parts) for parts in zip(*values, strict=True))
        updated = dict(tree_flatten(optimizer.apply_gradients(mean, parameters)))
        # MultiOptimizer reorders the tree, and the norm's rounding depends on the order.
        ordered = [(name, updated[name]) for name, _ in tree_flatten(parameters)]
        return tree_unflatten(ordered), loss, metric

    return update


def mean_array(parts: Sequence[mx.array]) -> mx.array:
    """The mean of arrays of one shape, summed left to right."""
    return reduce(mx.add, parts) / len(parts)


def save(
    path: Path,
    parameters: Parameters,
    best: Parameters,
    optimizer: optim.Optimizer,
    state: TrainingState,
) -> None:
    """Write a checkpoint atomically."""
    trees = {"parameters": parameters, "optimizer": optimizer.state}
    if state.best_loss < float("inf"):
        trees["best"] = best
    save_arrays(path, dict(tree_flatten(trees)), {"state": json.dumps(asdict(state))})


def restore(
    path: Path, parameters: Parameters, optimizer: optim.Optimizer
) -> tuple[Parameters, Parameters, TrainingState]:
    """Load a checkpoint into the optimizer; returns (parameters, best so far, state)."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded

    def tree(prefix: str, like: Any) -> Any:
        # In the original order, because rounding of sums depends on it.
        stored = []
        for name, expected in tree_flatten(like):
            array = arrays.get(f"{prefix}.{name}")
            if array is None or array.shape != expected.shape:
                raise WeightsError(
                    f"{path} is a checkpoint of another model: delete it or use another file."
                )
            stored.append((name, array))
        return tree_unflatten(stored)

    resumed = tree("parameters", parameters)
    optimizer.state = tree("optimizer", optimizer.state)
    state = TrainingState(**json.loads(metadata["state"]))
    best = tree("best", parameters) if state.best_loss < float("inf") else resumed
    return resumed, best, state

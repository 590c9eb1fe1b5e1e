"""The training loop shared by the target and the drafter: gradients, clipping, checkpoints, early
stop.

It is reproducible: the schedule counts steps, never seconds, and a run that was interrupted and
resumed ends with bitwise the parameters of one that was not. The micro-batches of a step run side
by side on CPU streams of their own, one core each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import SettingsError, WeightsError
from ..machine.saving import save_arrays
from .batches import BatchStream

Parameters = dict[str, Any]
Loss = Callable[..., tuple[mx.array, mx.array]]
Validation = Callable[[Parameters], tuple[float, float]]


@dataclass(frozen=True)
class FitSettings:
    """How long to train and what to do on the way.

    Attributes:
        steps: optimizer steps of the whole schedule.
        micro_batches: batches whose mean gradient makes one step.
        clip: the gradient is scaled down to this norm.
        save_every, validate_every: steps between checkpoints and validations; 0 is never.
        patience: validations without an improvement after which training stops; 0 is never.
    """

    steps: int
    micro_batches: int = 2
    clip: float = 1.0
    save_every: int = 0
    validate_every: int = 0
    patience: int = 0


@dataclass(frozen=True)
class Report:
    """What a progress display gets after every step."""

    step: int
    steps: int
    loss: float
    metric: float
    held_out_loss: float | None = None
    held_out_metric: float | None = None


class Progress(Protocol):
    """Called after every step; the library prints nothing itself."""

    def __call__(self, report: Report) -> None: ...


@dataclass
class State:
    """Everything besides arrays that a checkpoint remembers."""

    step: int = 0
    position: tuple[int, int] = (0, 0)
    best_loss: float = float("inf")
    stale: int = 0


def fit(
    loss: Loss,
    parameters: Parameters,
    optimizer: optim.Optimizer,
    batches: Callable[[tuple[int, int]], BatchStream],
    settings: FitSettings,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    validate: Validation | None = None,
) -> Parameters:
    """Minimise `loss` and return the trained parameters.

    Args:
        loss: (parameters, *arrays of a batch) -> (loss, one metric to display).
        parameters: a tree of arrays, the starting point.
        optimizer: fresh; its learning rate may be a schedule.
        batches: a stream that starts at the given position.
        checkpoint: a file; when it exists, training resumes from it.
        validate: parameters -> held-out loss, for early stopping (the best parameters are
            returned), and the metric.

    Raises `WeightsError` for a checkpoint of other parameters, `OutputError` where none can be
    written, and `SettingsError` where the loss is no number any more.
    """
    optimizer.init(parameters)
    state, best = State(), parameters
    if checkpoint is not None and checkpoint.exists():
        parameters, best, state = restore(checkpoint, parameters, optimizer)
    stream = batches(state.position)
    gradient = mx.compile(mx.value_and_grad(loss))
    update = compiled_update(optimizer, settings.clip)
    lanes = [new_lane() for _ in range(settings.micro_batches)]
    pending = [stream.next() for _ in lanes]
    while state.step < settings.steps:
        state.position, results = stream.position, []
        for lane, arrays in zip(lanes, pending, strict=True):
            with mx.stream(lane):
                results.append(gradient(parameters, *arrays))
        parameters, mean, metric = update(parameters, results)
        mx.async_eval(parameters, optimizer.state, mean, metric)
        state.step += 1
        if state.step < settings.steps:
            pending = [stream.next() for _ in lanes]  # while the step computes
        mx.eval(parameters, optimizer.state)
        if not isfinite(float(mean)):
            raise SettingsError(
                f"Training diverged: the loss of step {state.step} is {float(mean)}. Lower "
                "--learning-rate, and begin in another folder."
            )
        held_out = apart = None
        if validate and settings.validate_every and state.step % settings.validate_every == 0:
            held_out, apart = validate(parameters)
            if held_out < state.best_loss:
                best, state.best_loss, state.stale = parameters, held_out, 0
            else:
                state.stale += 1
        if progress:
            values = float(mean), float(metric)
            progress(Report(state.step, settings.steps, *values, held_out, apart))
        if checkpoint and settings.save_every and state.step % settings.save_every == 0:
            save(checkpoint, parameters, best, optimizer, state)
        if settings.patience and state.stale >= settings.patience:
            break
    return best if state.best_loss < float("inf") else parameters


def new_lane() -> mx.Stream:
    """A stream for one micro-batch: a thread of its own on the CPU, the default one on a GPU."""
    if mx.default_device() == mx.cpu:
        return mx.new_stream(mx.cpu)
    return mx.default_stream(mx.default_device())


def compiled_update(
    optimizer: optim.Optimizer, clip: float
) -> Callable[..., tuple[Parameters, mx.array, mx.array]]:
    """One optimizer step from the micro-batches' results: mean, clip, apply."""

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def update(parameters: Parameters, results: list) -> tuple[Parameters, mx.array, mx.array]:
        gradients = [gradient for _, gradient in results]
        # A checkpoint forgets memory layouts, and products round by layout: so keep only one.
        mean = tree_map(lambda *parts: mx.contiguous(mean_of(parts)), *gradients)
        mean, _ = optim.clip_grad_norm(mean, clip)
        values = [value for value, _ in results]
        loss, metric = (mean_of(parts) for parts in zip(*values, strict=True))
        updated = dict(tree_flatten(optimizer.apply_gradients(mean, parameters)))
        # MultiOptimizer returns them in an order of its own, and a norm rounds by the order, too.
        ordered = [(name, updated[name]) for name, _ in tree_flatten(parameters)]
        return tree_unflatten(ordered), loss, metric

    return update


def mean_of(parts: Sequence[mx.array]) -> mx.array:
    """The mean of arrays of one shape, summed from left to right."""
    return reduce(mx.add, parts) / len(parts)


def save(
    path: Path, parameters: Parameters, best: Parameters, optimizer: optim.Optimizer, state: State
) -> None:
    """Write a checkpoint; the file is replaced in one move, so a crash leaves the old one."""
    trees = {"parameters": parameters, "optimizer": optimizer.state}
    if state.best_loss < float("inf"):
        trees["best"] = best
    save_arrays(path, dict(tree_flatten(trees)), {"state": json.dumps(asdict(state))})


def restore(
    path: Path, parameters: Parameters, optimizer: optim.Optimizer
) -> tuple[Parameters, Parameters, State]:
    """Read a checkpoint into the optimizer; returns (parameters, best so far, state)."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded

    def tree(prefix: str, like: Any) -> Any:
        # In the order of the original: sums over a tree round by its order.
        found = [(name, arrays.get(f"{prefix}.{name}"), a.shape) for name, a in tree_flatten(like)]
        if any(array is None or array.shape != shape for _, array, shape in found):
            raise WeightsError(
                f"{path} is a checkpoint of another model: delete it or use another file."
            )
        return tree_unflatten([(name, array) for name, array, _ in found])

    resumed = tree("parameters", parameters)
    optimizer.state = tree("optimizer", optimizer.state)
    state = State(**json.loads(metadata["state"]))
    state.position = (state.position[0], state.position[1])
    best = tree("best", parameters) if state.best_loss < float("inf") else resumed
    return resumed, best, state

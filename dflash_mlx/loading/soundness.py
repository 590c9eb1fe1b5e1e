"""Whether loaded weights are what a model computes with: their types, their values, one forward.

Nothing here changes a text. It refuses models whose text would be silently another one: numbers
that were stored as integers, NaN that no token can follow from, fields of a config that only
the first forward stumbles over.
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ConfigError, WeightsError
from ..proposal import Proposal
from ..targets import Target
from ..validation import ErrorWrapper


def check_types(name: str, model: nn.Module, integers: Collection[str] = ()) -> None:
    """Raise `WeightsError` for integers and truth values where the model has fractions.

    Quantized layers pack their weights into unsigned integers, beside scales. `integers` are the
    paths of what else are whole numbers, such as a table of expert ids.
    """
    weights = dict(tree_flatten(model.parameters()))
    for path, value in weights.items():
        layer, _, part = path.rpartition(".")
        quantized = any(f"{layer}.{scale}" in weights for scale in ("scales", "weight_scale"))
        allowed = path in integers or mx.issubdtype(value.dtype, mx.floating)
        if quantized and part == "weight":
            allowed = value.dtype in (mx.uint32, mx.uint8)
        elif quantized and part == "scales":
            allowed = allowed or value.dtype == mx.uint8
        if not allowed:
            kind = str(value.dtype).removeprefix("mlx.core.")
            raise WeightsError(
                f"{name}: the tensor {path} is stored as {kind}, which is not a type of weights."
            )


def check_finite(name: str, model: nn.Module) -> None:
    """Raise `WeightsError` for a weight that is NaN or infinite. Reads every weight once."""
    for path, value in tree_flatten(model.parameters()):
        # Tensor by tensor: the truth values of all of them would take a quarter of the model.
        if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
            raise WeightsError(
                f"{name}: the tensor {path} has weights that are NaN or infinite; "
                "download it again."
            )


def check_runs(target: Target) -> None:
    """Read a few tokens and throw them away. Raises `ConfigError` where that fails or gives NaN."""
    wrong = f"{target.name}: the model that config.json describes does not run"
    with ErrorWrapper(ConfigError, wrong):
        session = target.start()
        for _ in session.prefill([0, 0]):
            pass
        logits, _ = session.verify(Proposal([0, 0]))
        broken = mx.isnan(logits).any().item()
        session.commit([0])
    if broken:
        raise ConfigError(f"{wrong} (its logits are NaN).")

"""What loading asks of those who spread a target over machines."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.nn as nn

from ..targets import Target


class Spread(Protocol):
    """The machines that share a target, such as a `cluster.Cluster`.

    Attributes:
        size: how many.
    """

    size: int

    def shard(self, name: str, model: nn.Module) -> None:
        """Leave a model this machine's part, before its weights are read."""

    def open(self, model: nn.Module, tokenizer: Any, config: dict[str, Any], name: str) -> Target:
        """What `Target` is made of, for this machine's part; it has been seen to run."""

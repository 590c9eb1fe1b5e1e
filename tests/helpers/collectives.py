"""Counting what goes between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

OPERATIONS = ("all_sum", "all_gather", "send", "recv_like")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The operations over ranks that are built inside, by their names."""
    own = {name: getattr(mx.distributed, name) for name in OPERATIONS}
    count: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*of: Any, **settings: Any) -> mx.array:
            count[name] += 1
            return own[name](*of, **settings)

        return call

    try:
        for name in OPERATIONS:
            setattr(mx.distributed, name, counting(name))
        yield count
    finally:
        for name, function in own.items():
            setattr(mx.distributed, name, function)

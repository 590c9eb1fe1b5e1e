"""What rounds would cost at best where machines share a target: a prediction, as `roofline`'s.

All machines run a forward on their shards at the same time, and wait for each other in the sums of
mlx-lm's sharding, one after the other. Rank 0 drafts alone, and tells the others of each forward in
one message. So a round takes

    forward(rows) on a shard + sums(rows) + message + draft(rows) on rank 0

and a token without drafts forward(1) + sums(1) + message. MLX's own kernels run over machines.
What a backend adds in waiting for the device before each sum is not known, and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cluster.shards import split_by_heads
from ..cluster.wire import WORDS
from ..drafter.config import DraftConfig
from ..drafter.dspark import network_for
from ..kernels.choose import stock_seconds
from ..kernels.shapes import Matrix, dtype_of, matrices
from ..machine.chips import Chip
from ..machine.links import Link
from ..targets.internals import own_head, text_model
from ..validation import text_config
from .roofline import WIDEST, Shapes, chance, shapes_of

MESSAGE_BYTES = 4 * WORDS  # int32
NORM_BYTES = 4  # sums of squares are f32


class Seat(NamedTuple):
    """One of several ranks, for sharding what is never run."""

    number: int
    ranks: int

    def rank(self) -> int:
        """As of a group of MLX."""
        return self.number

    def size(self) -> int:
        """As of a group of MLX."""
        return self.ranks


class Exchange(NamedTuple):
    """What all machines do together in a forward.

    Attributes:
        width: numbers of each row that are summed, or gathered.
        size: bytes of a number.
        gathers: whether the machines' parts are put side by side instead.
    """

    width: int
    size: int
    gathers: bool = False

    def seconds(self, rows: int, link: Link, machines: int) -> float:
        """Of so many rows."""
        bytes_ = rows * self.width * self.size
        return (link.gathering if self.gathers else link.summing)(bytes_, machines)


@dataclass(frozen=True)
class Shard:
    """Rank 0's part of a model.

    Attributes:
        machines: how many share it.
        shapes: what a forward of the part reads.
        exchanges: of a forward, and how many there are of each.
        head: the whole head, which rank 0 has for drafts.
    """

    machines: int
    shapes: Shapes
    exchanges: Counter[Exchange]
    head: Sequence[Matrix]

    def waiting(self, rows: int, link: Link) -> float:
        """Seconds that a forward's exchanges and the message before it take."""
        sums = sum(n * e.seconds(rows, link, self.machines) for e, n in self.exchanges.items())
        return sums + link.summing(MESSAGE_BYTES, self.machines)

    def computing(self, rows: int, chip: Chip) -> float:
        """Seconds that a machine computes in a forward, with MLX's kernels."""
        rest = chip.reading(self.shapes.other + self.shapes.context)
        return rest + sum(stock_seconds(chip, matrix, rows) for matrix in self.shapes.matrices)


@dataclass(frozen=True)
class SharedRound:
    """The prediction for one width.

    Attributes:
        rows: tokens verified at once; 1 is plain decoding.
        compute_ms, link_ms, draft_ms: of the machines' forward, their waiting, rank 0's drafter.
        tokens: expected of a round.
        speedup: over plain decoding on the same machines.
        tokens_per_second: a ceiling.
    """

    rows: int
    compute_ms: float
    link_ms: float
    draft_ms: float
    tokens: float
    speedup: float
    tokens_per_second: float


def shared_rounds(
    shard: Shard, drafter: Sequence[Matrix], chip: Chip, link: Link, acceptance: float
) -> list[SharedRound]:
    """The prediction for rounds of 1 to 16 rows.

    Args:
        shard: rank 0's; the others' are as large.
        drafter: its matrices, its head among them; () where it is not known.
        chip: of every machine.
        link: between them.
        acceptance: output tokens a round at 16 rows, as of `roofline.rounds`.

    Raises `SettingsError` for an acceptance outside 1..16.
    """
    share = chance(acceptance)
    plain = shard.computing(1, chip) + shard.waiting(1, link)
    found = []
    for rows in range(1, WIDEST + 1):
        compute, wait = shard.computing(rows, chip), shard.waiting(rows, link)
        draft = sum(stock_seconds(chip, one, rows) for one in drafter) if rows > 1 else 0.0
        tokens = sum(share**slot for slot in range(rows))
        whole = compute + wait + draft
        found.append(
            SharedRound(
                rows=rows,
                compute_ms=1e3 * compute,
                link_ms=1e3 * wait,
                draft_ms=1e3 * draft,
                tokens=tokens,
                speedup=tokens * plain / whole,
                tokens_per_second=tokens / whole,
            )
        )
    return found


def fastest(rounds: Sequence[SharedRound]) -> SharedRound:
    """The width to choose, and the narrowest of those within a hundredth of the best."""
    best = max(one.tokens_per_second for one in rounds)
    return next(one for one in rounds if one.tokens_per_second >= 0.99 * best)


def shard_of(
    model: nn.Module, config: dict[str, Any], context: int, machines: int, name: str
) -> Shard:
    """Rank 0's shard of an mlx-lm model, which is split by mlx-lm itself and never computed.

    Raises `SettingsError` for a model that mlx-lm does not split so, or not so often.
    """
    whole = [matrix for path, _, matrix in matrices(model, config) if _is_head(path)]
    if machines > 1:
        seat: Any = Seat(0, machines)
        split_by_heads(name, model, seat)
    shapes = shapes_of(model, config, context)
    return Shard(machines, shapes, Counter(exchanges(model, config)), whole)


def exchanges(model: nn.Module, config: dict[str, Any]) -> Iterator[Exchange]:
    """What a forward of a sharded model does with the other machines, in any order.

    mlx-lm shards in three ways: linear layers that end in a sum, modules that were given the group
    and end in one (experts, recurrences) or gather the slices of their head, and norms over heads.
    """
    hidden = text_config(config)["hidden_size"]
    size = _activation_bytes(model)
    for _, module in model.named_modules():
        if isinstance(module, nn.ShardedToAllLinear | nn.QuantizedShardedToAllLinear):
            yield Exchange(module.weight.shape[0], size)
        elif getattr(module, "sharding_group", None) is not None:
            head = own_head(module)
            if head is None:
                yield Exchange(hidden, size)
            else:
                columns = head.weight.shape[0] * module.sharding_group.size()
                yield Exchange(columns, size, gathers=True)
        elif "weight" in module and module.weight.ndim == 1 and hasattr(module, "group"):
            yield Exchange(1, NORM_BYTES)


def drafter_matrices(config: DraftConfig, head: Sequence[Matrix]) -> list[Matrix]:
    """What a draft multiplies by, bfloat16: its network, and the target's head if it has none.

    Args:
        config: of the drafter.
        head: of the target, whole.
    """
    network = network_for(config)(config, ())
    network.set_dtype(mx.bfloat16)
    own = [(path, matrix) for path, _, matrix in matrices(network, {})]
    has_head = any(_is_head(path) for path, _ in own)
    return [matrix for _, matrix in own] + ([] if has_head else list(head))


def _is_head(path: str) -> bool:
    return path.endswith(("lm_head", "embed_tokens"))


def _activation_bytes(model: nn.Module) -> int:
    """Bytes of a number that is summed: of what the layers compute in."""
    layer = next(
        module
        for _, module in text_model(model).named_modules()
        if "weight" in module and module.weight.ndim == 2
    )
    return int(dtype_of(layer).size)

"""How rounds are timed, of one request or of many, with chains or with trees; `costs` keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..drafter.protocol import Drafter
    from ..target import Target, TargetSession

DEPTHS = (64, 1024)  # tokens of context; attention is linear in between and beyond
REPEATS = 4  # in a row, and twice; their median counts, as decoding has no lucky rounds only
TOKEN = 1  # what the text that is drafted for consists of

Round = Callable[[int], Sequence[float]]  # rows -> the seconds of each part of a round


def time_rounds(
    target: Target, rows: Sequence[int], room: int, begin: Callable[[int], Round]
) -> list[dict[int, dict[int, float]]]:
    """The median seconds of each part of rounds: context -> rows -> seconds.

    Rounds of one width follow each other, as they do in decoding: a width that differs from the
    last one's is slower by up to a fifth (on a CPU, for a small model). The second time the widths
    come in the other order, so that a machine that slows down meanwhile favours none.

    Args:
        target: how long its contexts are.
        rows: what rounds are told apart by. Each adds a token to the context.
        room: rows beyond the context that a round may have.
        begin: what plays rounds after so many tokens of context.
    """
    parts: list[dict[int, dict[int, float]]] = []
    deepest = target.context_length - room - 2 * len(rows) * (REPEATS + 1)
    for depth in sorted({max(2, min(depth, deepest)) for depth in DEPTHS}):
        play, samples = begin(depth), {row: list[Sequence[float]]() for row in rows}
        for row in [*rows, *reversed(rows)]:
            play(row)  # warms up
            samples[row] += [play(row) for _ in range(REPEATS)]
        seconds = {
            row: [median(part) for part in zip(*of, strict=True)] for row, of in samples.items()
        }
        parts = parts or [{} for _ in seconds[rows[0]]]
        for at, part in enumerate(parts):
            part[depth] = {row: each[at] for row, each in seconds.items()}
    return parts


def started(
    target: Target, drafter: Drafter, depth: int, kv_bits: int | None
) -> tuple[TargetSession, Any]:
    """Sessions of a pair, after so many tokens."""
    from ..sampling import Sampler

    session, drafting = target.start(drafter.tap_layers, kv_bits), drafter.start(target, Sampler())
    for _, taps in session.prefill([TOKEN] * depth):
        drafting.extend(taps)
    return session, drafting

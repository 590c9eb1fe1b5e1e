"""How rounds are timed, of one request or of many, with chains or with trees; `costs` keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..drafter.protocol import Drafter
    from ..target import Target, TargetSession

DEPTHS = (64, 1024)  # tokens of context; attention is linear in between and beyond
REPEATS = 4  # in a row, and twice; their median counts, as decoding has no lucky rounds only
SECONDS = 3.0  # that all rounds of a depth take, or two of each width where these take longer
TOKEN = 1  # what the text that is drafted for consists of

Round = Callable[[int], Sequence[float]]  # rows -> the seconds of each part of a round


def time_rounds(
    target: Target,
    rows: Sequence[int],
    room: int,
    begin: Callable[[int], Round],
    depths: Sequence[int] | None = None,
) -> list[dict[int, dict[int, float]]]:
    """The median seconds of each part of rounds: context -> rows -> seconds.

    Rounds of one width follow each other, as they do in decoding: a width that differs from the
    last one's is slower by up to a fifth (on a CPU, for a small model). The second time the widths
    come in the other order, so that a machine that slows down meanwhile favours none. Somebody
    waits for all this: a width that has had its share of `SECONDS` is timed once.

    Args:
        target: how long its contexts are.
        rows: what rounds are told apart by. Each adds a token to the context.
        room: rows beyond the context that a round may have.
        begin: what plays rounds after so many tokens of context.
        depths: these; None are `DEPTHS`.
    """
    parts: list[dict[int, dict[int, float]]] = []
    share = SECONDS / (2 * len(rows))  # of a width, each time
    deepest = target.context_length - room - 2 * len(rows) * (REPEATS + 1)
    for depth in sorted({max(2, min(depth, deepest)) for depth in depths or DEPTHS}):
        play, samples = begin(depth), {row: list[Sequence[float]]() for row in rows}
        for row in [*rows, *reversed(rows)]:
            if samples[row] and sum(samples[row][-1]) > share:
                continue
            play(row)  # warms up
            end = time.perf_counter() + share
            for _ in range(REPEATS):
                samples[row].append(play(row))
                if time.perf_counter() >= end:
                    break
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

"""How rounds are timed, of one request or of many, with chains or with trees; `costs` keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from ..drafter.protocol import Drafter
    from ..targets import Target, TargetSession

DEPTHS = (64, 1024)  # tokens of context; attention is linear in between and beyond
PASSES = 4  # over all widths
REPEATS = 2  # rounds in a row of each; medians count, as decoding has no lucky rounds only
SLOW = 0.03  # seconds of rounds that follow others of any width, and one in a pass
SECONDS = 4.0  # that all rounds of a depth take, or two of each width where these take longer
UNREAD = 64  # tokens whose features a draft reads first, to find out what each adds
STRETCH = 8  # plain rounds in a row that are begun ahead, or each on its own
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
    last one's is slower by up to a fifth (on a CPU, for a small model). Widths come several times,
    every second time in the other order, and what each takes is compared with what the others took
    in that pass: so a machine whose pace changes meanwhile favours none. Somebody waits for all
    this: a width that has had its share of `SECONDS` is timed no more.

    Args:
        target: how long its contexts are.
        rows: what rounds are told apart by. Each adds a token to the context.
        room: rows beyond the context that a round may have.
        begin: what plays rounds after so many tokens of context.
        depths: these; None are `DEPTHS`.
    """
    parts: list[dict[int, dict[int, float]]] = []
    share = SECONDS / len(rows)
    deepest = target.context_length - room - PASSES * len(rows) * (REPEATS + 1)
    for depth in sorted({max(2, min(depth, deepest)) for depth in depths or DEPTHS}):
        play, spent = begin(depth), dict.fromkeys(rows, 0.0)
        passes: list[dict[int, list[Sequence[float]]]] = []
        for order in (rows, rows[::-1]) * (PASSES // 2):
            samples = dict[int, list[Sequence[float]]]()
            for row in order:
                if not passes or spent[row] < share:
                    before = passes[0][row] if passes else None
                    samples[row], seconds = _visit(play, row, before)
                    spent[row] += seconds
            if samples:
                passes.append(samples)
        typical = _typical(passes)
        parts = parts or [{} for _ in typical[rows[0]]]
        for at, part in enumerate(parts):
            part[depth] = {row: typical[row][at] for row in rows}
    return parts


def _visit(
    play: Round, row: int, before: Sequence[Sequence[float]] | None
) -> tuple[list[Sequence[float]], float]:
    """Some rounds of a width, which were like those `before`, and the seconds of all this."""
    clock, slow = time.perf_counter(), before is not None and sum(before[0]) >= SLOW
    if not slow:
        play(row)  # warms up
    samples = [play(row)]
    while len(samples) < REPEATS and sum(samples[0]) < SLOW:
        samples.append(play(row))
    return samples, time.perf_counter() - clock


def _typical(passes: Sequence[dict[int, list[Sequence[float]]]]) -> dict[int, list[float]]:
    """The seconds of each part of a round of each width, from its samples in some passes."""
    took = [{row: median(map(sum, of)) for row, of in each.items()} for each in passes]
    paces = [median(each[row] / took[0][row] for row in each) for each in took]
    typical = median(paces)
    scaled: dict[int, list[list[float]]] = {row: [] for row in passes[0]}
    for pace, each in zip(paces, passes, strict=True):
        for row, samples in each.items():
            scaled[row] += [[part * typical / pace for part in parts] for parts in samples]
    return {row: [median(part) for part in zip(*of, strict=True)] for row, of in scaled.items()}


def seconds_of_draft(drafting: Any, rows: int) -> float:
    """Seconds that a session takes for a draft of so many rows, computed."""
    import mlx.core as mx

    clock = time.perf_counter()
    tokens = drafting.propose(TOKEN, rows).tokens
    if isinstance(tokens, mx.array):
        mx.eval(tokens)
    return time.perf_counter() - clock


def started(
    target: Target, drafter: Drafter, depth: int, kv_bits: int | None
) -> tuple[TargetSession, Any]:
    """Sessions of a pair, after so many tokens."""
    from ..sampling import Sampler

    session, drafting = target.start(drafter.tap_layers, kv_bits), drafter.start(target, Sampler())
    for _, taps in session.prefill([TOKEN] * depth):
        drafting.extend(taps)
    return session, drafting


def seconds_of_unread(target: Target, drafter: Drafter, kv_bits: int | None) -> float:
    """What each further token adds to a draft that reads its features first."""
    import mlx.core as mx

    from ..sampling import Sampler

    many = max(2, min(UNREAD, target.context_length // 2))
    session, drafting = target.start(drafter.tap_layers, kv_bits), drafter.start(target, Sampler())
    taps = mx.concatenate([taps for _, taps in session.prefill([TOKEN] * many)], axis=1)
    mx.eval(taps)
    samples: dict[int, list[float]] = {1: [], many: []}
    for _ in range(1 + PASSES):
        for count, seconds in samples.items():
            drafting.extend(taps[:, :count])
            seconds.append(seconds_of_draft(drafting, 2))
    few, more = (median(seconds[1:]) for seconds in samples.values())  # the first ones warm up
    return max(0.0, more - few) / (many - 1)


def time_ahead(target: Target, drafter: Drafter, kv_bits: int | None) -> float:
    """What a plain round takes that the one before it has begun, over one on its own; 1 at most.

    Stretches of both kinds take turns. What the drafter would read of them is computed, too.
    """
    import mlx.core as mx

    from ..proposal import Proposal
    from ..sampling import Sampler

    room = target.context_length - (2 * PASSES + 1) * (STRETCH + 1)
    depth = max(2, min(DEPTHS[0], room))
    sampler, (session, _) = Sampler(), started(target, drafter, depth, kv_bits)
    # On a CPU the host waits while a pass is begun: what is left to hide is less than chance.
    if not session.can_pipeline or mx.default_device() == mx.cpu:
        return 1.0

    def begun(token: mx.array) -> tuple[mx.array, mx.array]:
        """The next token of a round, and its features, which the device is at."""
        logits, taps = session.verify(proposal := Proposal(token))
        decision = sampler.decide(proposal, logits)
        session.commit([0])
        mx.async_eval(decision.values, taps)
        return decision.next_anchor, taps

    def stretch(ahead: bool) -> float:
        """Seconds of some rounds."""
        asked, clock = begun(mx.array([TOKEN])), time.perf_counter()
        for _ in range(STRETCH):
            following = begun(asked[0]) if ahead else None
            mx.eval(*asked)
            asked = following or begun(asked[0])
        mx.eval(*asked)
        return time.perf_counter() - clock

    stretch(True)  # warms up
    ratios, spent = list[float](), 0.0
    while len(ratios) < PASSES and spent < SECONDS / 2:
        ahead, alone = stretch(True), stretch(False)
        ratios, spent = [*ratios, ahead / alone], spent + ahead + alone
    return min(1.0, median(ratios))

"""What a round costs on this machine: measured before decoding, kept in the user's cache folder.

How many rows to verify at once depends on what rows cost, and that is a matter of the machine, the
model, its quantization and the version of MLX: from nearly nothing to nearly another forward each.
Nothing is timed while text is generated, so that a run can be repeated.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..drafter.protocol import Drafter, identity
from ..machine.folders import cache_folder
from ..proposal import Proposal
from .kept import UNREADABLE, keep_json
from .timing import (
    TOKEN,
    Round,
    seconds_of_draft,
    seconds_of_unread,
    started,
    time_ahead,
    time_rounds,
)

if TYPE_CHECKING:
    from ..targets import Target

# All of the narrow ones: a product of five rows may take longer than one of eight.
ROWS = (*range(1, 9), 12, 16)
DENT = 0.05  # by so much a wider round may be cheaper by chance; where it is by more, it is
FORMAT = 9  # of the cached file


@dataclass(frozen=True)
class Costs:
    """Seconds of a pair's forwards: context -> rows -> seconds.

    Attributes:
        verify: of the target over so many rows.
        draft: of the drafter, for a draft of so many rows (the anchor counts).
        unread: that a draft takes longer for each further token whose features it reads first.
        ahead: what a plain round takes that the one before it has begun (`Request.begin_next`),
            over one on its own: a ratio of at most 1, measured on a GPU; on a CPU it is 1.
        by_rounds: whether rounds that were run have corrected what was measured.
    """

    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, Mapping[int, float]]
    unread: float = 0.0
    ahead: float = 1.0
    by_rounds: bool = False

    def rounds(self, context: int, widest: int) -> list[float]:
        """Seconds of a round of 1, 2, ... `widest` rows at this depth, `evened`.

        A round of one row is plain decoding: it drafts nothing.
        """
        verify = _lines(self.verify, context, widest)
        draft = _lines(self.draft, context, widest)
        plain, *wider = verify
        drafted = [max(plain, v + d) for v, d in zip(wider, draft[1:], strict=True)]
        return [plain, *evened(drafted)]

    def forwards(self, context: int, widest: int) -> list[float]:
        """The target's part of these, `evened`, and never more than the whole."""
        verify = evened(_lines(self.verify, context, widest))
        rounds = self.rounds(context, widest)
        return [min(v, r) for v, r in zip(verify, rounds, strict=True)]

    def corrected(self, factors: Mapping[int, float], widest: int) -> Costs:
        """The same where rounds of so many rows take so many times as long as is said here.

        Between those widths nothing is kept: what lies there was measured when they were, and is
        as wrong. Wider ones keep their proportion to the widest of them. A draft takes what it did,
        but at most half of its round.
        """
        known = {row: factors[max(factors)] for row in range(max(factors), widest + 1)} | {
            **factors
        }
        known.setdefault(1, known[min(known)])
        verify: dict[int, dict[int, float]] = {}
        draft: dict[int, dict[int, float]] = {}
        for depth in self.verify:
            rounds, drafts = self.rounds(depth, widest), curve(self.draft, depth, widest)
            seconds = {row: factor * rounds[row - 1] for row, factor in known.items()}
            of_draft = {row: min(drafts[row - 1], seconds[row] / 2) for row in known} | {1: 0.0}
            verify[depth] = {row: seconds[row] - of_draft[row] for row in known}
            draft[depth] = of_draft
        return Costs(verify, draft, self.unread, self.ahead, by_rounds=True)


# (target, drafter, the most rows of a path, bits of keys and values) -> what rounds cost
Measurement = Callable[..., Costs]
# what is about to be measured, in words -> a context to be in until it is
Meanwhile = Callable[[str], AbstractContextManager[object]]


def curve(points: Mapping[int, Mapping[int, float]], context: int, widest: int) -> list[float]:
    """The cost of 1..`widest` rows at a depth, never falling; measured at one or two depths.

    A context shallower than these costs what the nearer one does.
    """
    return monotone(_lines(points, context, widest))


def _lines(points: Mapping[int, Mapping[int, float]], context: int, widest: int) -> list[float]:
    """The same on the straight lines between what was measured, as it was."""
    depths = sorted(points)
    fitted = [_fit(points[depth], widest) for depth in depths]
    if len(depths) == 1:
        return fitted[0]
    (near, far), span = fitted, depths[1] - depths[0]
    # A deeper context is never cheaper; where it was measured so, that was chance.
    slopes = [max(0.0, (b - a) / span) for a, b in zip(near, far, strict=True)]
    deeper = max(0, context - depths[0])
    return [a + s * deeper for a, s in zip(near, slopes, strict=True)]


def _fit(points: Mapping[int, float], widest: int) -> list[float]:
    """Of 1..`widest` rows: the lines between what was measured, the outer ones continued.

    Those that fall are not: what a few rows save says nothing of many.
    """
    rows = sorted(points)
    seconds = [points[row] for row in rows]
    if len(rows) == 1:
        return seconds * widest
    xs, ys, wanted = np.array(rows), np.array(seconds), np.arange(1, widest + 1)
    slopes = np.maximum(0.0, np.diff(ys) / np.diff(xs))
    before = slopes[0] * np.maximum(0, xs[0] - wanted)
    beyond = slopes[-1] * np.maximum(0, wanted - xs[-1])
    fitted: list[float] = (np.interp(wanted, xs, ys) - before + beyond).tolist()
    return fitted


def evened(values: Sequence[float]) -> list[float]:
    """What 1, 2, ... rows take, where wider ones are not cheaper by chance.

    Kernels are made for some numbers of rows, so four may take less than three. What is dearer than
    a wider one by more than `DENT` is that: it stays as it was measured, and nobody chooses it. The
    falls among the others are chance, and the closest sequence without is taken (least squares;
    pool adjacent violators).
    """
    least = _least_from(values)
    even = [at for at, value in enumerate(values) if value <= (1 + DENT) * least[at]]
    pools: list[tuple[float, int]] = []
    for at in even:
        pool = (values[at], 1)
        while pools and pools[-1][0] > pool[0]:
            (mean, count), (last, size) = pools.pop(), pool
            pool = ((mean * count + last * size) / (count + size), count + size)
        pools.append(pool)
    means = [mean for mean, count in pools for _ in range(count)]
    chance = dict(zip(even, means, strict=True))
    return [chance.get(at, value) for at, value in enumerate(values)]


def monotone(values: Sequence[float]) -> list[float]:
    """The same, and never falling: what a wider one does better costs what that does."""
    return _least_from(evened(values))


def _least_from(values: Sequence[float]) -> list[float]:
    """The least of each value and all those behind it."""
    return [*accumulate(reversed(values), min)][::-1]


def pair_costs(
    target: Target,
    drafter: Drafter,
    widest: int,
    kv_bits: int | None = None,
    again: bool = False,
    measured: Measurement | None = None,
    what: str = "a round",
    meanwhile: Meanwhile = nullcontext,
) -> tuple[Costs, Path | None]:
    """The costs of rounds of up to `widest` rows: from the cache folder, or measured now.

    Only the costs of drafters that have an `identity` are cached.

    Args:
        target, drafter: the pair.
        widest: the most rows of a round.
        kv_bits: of the target's keys and values, as in `stream_generate`.
        again: measure even if the cache knows, and let it know better.
        measured: what measures; None is `measure`, of chains.
        what: that is, in words.
        meanwhile: the context to be in while it does; nothing is entered for costs that are known.

    Returns the costs, and the file that keeps them from now on; None where none does.
    """
    measured, path = measured or measure, None
    if (named := identity(drafter)) is not None:
        mark = _fingerprint(target, named, widest, kv_bits)
        path = _cache_folder() / f"{measured.__name__}-{mark}.json"
    try:
        if path is not None and not again:
            return read_costs(path), path
    except OSError:
        pass  # not measured yet, or not here
    except UNREADABLE:
        warnings.warn(f"dflash-mlx: {path} is damaged: costs are measured anew.", stacklevel=3)
    with meanwhile(what):
        costs = measured(target, drafter, widest, kv_bits)
    if path is not None:
        keep_costs(path, costs)
    return costs, path


def keep_costs(path: Path, costs: Costs) -> None:
    """Write costs for the next start."""
    keep_json(path, asdict(costs))


def measure(target: Target, drafter: Drafter, widest: int, kv_bits: int | None = None) -> Costs:
    """Time the forwards of a pair. The drafter drafts for a text of one token, repeated."""
    from ..sampling import Sampler

    def begin(depth: int) -> Round:
        """Rounds of one request."""
        sampler, (session, drafting) = Sampler(), started(target, drafter, depth, kv_bits)

        def play(rows: int) -> tuple[float, float]:
            """Seconds of the verify and of the draft."""
            drafted, clock = seconds_of_draft(drafting, rows), time.perf_counter()
            proposal = Proposal([TOKEN] * rows)
            logits, taps = session.verify(proposal)
            sampler.choose(proposal, logits)
            session.commit([0])
            end = time.perf_counter()
            drafting.extend(taps[:, :1])
            return end - clock, drafted

        return play

    rows = rows_up_to(widest)
    verify, draft = time_rounds(target, rows, widest, begin)
    drafts = {depth: seconds | {1: 0.0} for depth, seconds in draft.items()}
    unread = seconds_of_unread(target, drafter, kv_bits)
    return Costs(verify, drafts, unread, time_ahead(target, drafter, kv_bits))


def rows_up_to(most: int, rows: Sequence[int] = ROWS) -> list[int]:
    """The widths, of these, that are measured where a round may have `most` rows; and that."""
    return [*rows[: bisect_left(rows, most)], most]


def read_costs(path: Path) -> Costs:
    """What `keep_costs` wrote. Raises `OSError`, or what Python raises for other content."""
    content = json.loads(path.read_text())
    verify, draft = (
        {
            int(depth): {int(row): float(seconds) for row, seconds in points.items()}
            for depth, points in content[part].items()
        }
        for part in ("verify", "draft")
    )
    unread, ahead = float(content["unread"]), float(content["ahead"])
    known = [*map(len, verify.values()), *map(len, draft.values())]
    if not 1 <= len(verify) <= 2 or not all(known) or verify.keys() != draft.keys():
        raise ValueError("depths without costs")
    if min(row for part in (verify, draft) for points in part.values() for row in points) < 0:
        raise ValueError("no rows")
    forwards, drafts = (
        [s for of in part.values() for s in of.values()] for part in (verify, draft)
    )
    if not all(0 < seconds < inf for seconds in forwards):
        raise ValueError("a forward takes some time")
    if not all(0 <= seconds < inf for seconds in (unread, *drafts)):
        raise ValueError("a draft takes no less than none")
    if not 0 < ahead <= 1:
        raise ValueError("what is begun ahead takes no longer")
    return Costs(verify, draft, unread, ahead, content.get("by_rounds") is True)


def _fingerprint(target: Target, identity: str, widest: int, kv_bits: int | None) -> str:
    """A name for everything that the costs depend on."""
    import mlx.core as mx

    chip = str(mx.device_info().get("device_name", ""))
    parts = [FORMAT, widest, kv_bits, platform.machine(), chip, str(mx.default_device()), _blas()]
    parts += [version("mlx"), version("mlx-lm"), target.name, target.num_layers]
    if target.wiring is not None:
        parts += [target.wiring.exact, repr(sorted(target.wiring.layers.items()))]
    # The bytes of the weights tell every quantization from the others.
    parts += [_bytes(target.model), identity]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _bytes(module: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(value.nbytes for _, value in tree_flatten(module.parameters()))


def _blas() -> str:
    """Whether a BLAS was put under MLX: then its entry point is visible to the whole process."""
    return "own" if hasattr(ctypes.CDLL(None), "cblas_sgemm") else "stock"


def _cache_folder() -> Path:
    return cache_folder("costs")

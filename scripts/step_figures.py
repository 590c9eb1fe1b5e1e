"""Steps whose graph is built anew against steps replayed from a trace, on this machine's device.

    python scripts/step_figures.py [--model tiny] [--rows 1,4,16] [--repeats 30] [--tokens 100]

On a GPU no step is replayed until somebody has timed it: this script switches it on for its own
process. Prints, for each number of rows, the milliseconds of a verification and commit either way
(medians of turns), whether the logits are equal to the bit, and which operations MLX has fused in
the trace only: a GPU compiles a library of each. Then plain decoding: tokens per second, and
whether the texts are equal.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import mlx.core as mx
from experiment import graph_nodes, in_turns, numbers, options_of

import dflash_mlx as dm
from dflash_mlx.proposal import Proposal

PROMPT = [token % 1000 + 10 for token in range(200)]  # token ids; what they say does not matter
BUILT = "this script builds each graph"  # why a target does not replay steps


class Verification(NamedTuple):
    """A timed verification.

    Attributes:
        seconds: it took, with its commit.
        logits: its result [rows, V].
        fused: the operations that MLX has fused in its graph.
    """

    seconds: float
    logits: mx.array
    fused: set[str]


class Way:
    """One of two ways to take a target's steps.

    Args:
        target: the target.
        replayed: whether its steps are replayed from a trace, or built anew.
    """

    def __init__(self, target: dm.Target, replayed: bool) -> None:
        self.target = target
        self.why_not = None if replayed else BUILT

    def begin(self) -> None:
        """Have the target take its steps this way from now on."""
        self.target.steps.why_not = self.why_not

    def verify(self, rows: int) -> Verification:
        """Verify this many rows. The third time is measured, because the second one is traced."""
        self.begin()
        session = self.target.start()
        list(session.prefill(PROMPT))
        proposal = Proposal(PROMPT[:rows])
        for _ in range(2):
            mx.eval(session.verify(proposal))
            session.commit([0])
        start = time.perf_counter()
        logits, _ = session.verify(proposal)
        mx.eval(logits)
        session.commit([0])
        seconds = time.perf_counter() - start
        lazy, _ = session.verify(proposal)
        fused = {kind for kind in graph_nodes(lazy) if kind.startswith("Compiled")}
        if self.target.steps.why_not != self.why_not:
            raise RuntimeError(self.target.steps.why_not)
        return Verification(seconds, logits, fused)

    def text(self, tokens: int) -> tuple[float, list[int]]:
        """Tokens per second of plain decoding, and the token ids of the text."""
        self.begin()
        start = time.perf_counter()
        answer = dm.generate(self.target, None, PROMPT, max_tokens=tokens)
        return len(answer.tokens) / (time.perf_counter() - start), answer.tokens


def main() -> None:
    """See the module's docstring."""
    args = options_of(__doc__, model="tiny", rows="1,4,16", repeats=30, tokens=100)
    target = dm.load_target(args.model)
    ways = {"built": Way(target, replayed=False), "replayed": Way(target, replayed=True)}
    for rows in numbers(args.rows):
        report_verifies(ways, rows, args.repeats)
    texts = in_turns(
        {name: lambda way=way: way.text(args.tokens) for name, way in ways.items()}, args.repeats
    )
    for name, results in texts.items():
        rate = statistics.median(rate for rate, _ in results)
        print(f"plain {name:8} {rate:7.1f} tokens per second")
    different = sum(
        built != replayed
        for (_, built), (_, replayed) in zip(texts["built"], texts["replayed"], strict=True)
    )
    print(f"texts that differ: {different} of {args.repeats}; traces: {target.steps.count}")


def report_verifies(ways: dict[str, Way], rows: int, repeats: int) -> None:
    """Print the figures of verifications of this many rows."""
    results: dict[str, list[Verification]] = in_turns(
        {name: lambda way=way: way.verify(rows) for name, way in ways.items()}, repeats
    )
    built = results["built"]
    replayed = results["replayed"]
    times = {
        name: statistics.median(turn.seconds for turn in turns) for name, turns in results.items()
    }
    equal = all(
        mx.array_equal(ours.logits, theirs.logits).item()
        for ours, theirs in zip(built, replayed, strict=True)
    )
    fused = replayed[-1].fused - built[-1].fused
    print(
        f"{rows:2} rows: built {1e3 * times['built']:.2f} ms, "
        f"replayed {1e3 * times['replayed']:.2f} ms "
        f"({times['replayed'] / times['built']:.2f}); logits {'equal' if equal else 'DIFFER'}; "
        f"{len(fused)} fused operations in the trace only",
        flush=True,
    )


if __name__ == "__main__":
    main()

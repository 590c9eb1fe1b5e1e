"""Requests that share forwards, and for comparison the same requests one by one."""

import gc
import random
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from families import random_prompt
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from oracle import random_tree

from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target, TargetSession
from dflash_mlx.targets.kv_slots import KVSlots
from dflash_mlx.targets.rows import Rows
from dflash_mlx.targets.span import Span

# MLX's reference BLAS sums every row alike; others choose how by the number of rows.
EXACT = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)
TOLERANCE = 5e-5
PROMPTS = (1, 45, 20, 33, 31, 3, 12, 32)  # windows of the families are 32 rows


def same(actual: mx.array, expected: mx.array) -> bool:
    """Bit for bit, where the machine's products allow it."""
    if EXACT:
        return mx.array_equal(actual, expected).item()
    return actual.shape == expected.shape and mx.allclose(actual, expected, atol=TOLERANCE).item()


def _state(cache: Any) -> Any:
    """The arrays of a cache, without the spare room after its rows."""
    return [*cache.keys_and_values(), cache.offset] if isinstance(cache, KVCache) else cache.state


def states_are_same(first: TargetSession, second: TargetSession) -> bool:
    """Whether all that two sessions' caches hold is the same."""
    states = [tree_flatten([_state(cache) for cache in each.cache]) for each in (first, second)]
    pairs = zip(*states, strict=True)
    return all(same(a[1], b[1]) if isinstance(a[1], mx.array) else a[1] == b[1] for a, b in pairs)


def by_proposal(proposals: Sequence[Proposal], logits: mx.array, taps: mx.array) -> list[Any]:
    """The logits and taps of each proposal's rows, of those of a forward."""
    ends = [*accumulate(map(len, proposals))]
    assert len(logits) == taps.shape[1] == ends[-1]
    pairs = mx.split(logits, ends[:-1]), mx.split(taps, ends[:-1], axis=1)
    return list(zip(*pairs, strict=True))


def memory() -> int:
    """Bytes in use, once nothing is on its way and no garbage is left."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


class SharedVerifier:
    """Verifies proposals of one target's requests together, as an engine does."""

    def __init__(self, target: Target):
        self.target = target
        sharing = target.sharing
        self.slots = KVSlots(() if sharing is None else sharing.slot_layers)

    def verify(
        self,
        sessions: Sequence[TargetSession],
        proposals: Sequence[Proposal],
        tokens: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The logits [R, V] and taps [1, R, K*D] of all rows."""
        spans = [Span(*request) for request in zip(sessions, proposals, strict=True)]
        return self.target.forward(Rows(spans, tokens, slots=self.slots))


class BatchAndSingles:
    """Requests that are verified together, each with a twin that is verified alone."""

    def __init__(self, target: Target, count: int, kv_bits: int | None = None, seed: int = 0):
        self.target = target
        self.verifier = SharedVerifier(target)
        self.random = random.Random(seed)
        layers = (0, target.num_layers - 1)
        bits = (None, kv_bits)
        self.together = [target.start(layers, bits[index % 2]) for index in range(count)]
        self.alone = [target.start(layers, bits[index % 2]) for index in range(count)]
        for member in range(count):
            for session in (self.together[member], self.alone[member]):
                prompt = random_prompt(PROMPTS[member % len(PROMPTS)], member)
                list(session.prefill(prompt))

    def proposals(self, members: Sequence[int], trees: bool) -> list[Proposal]:
        """A chain of each, or a tree of every other one."""
        proposals = []
        for member in members:
            rows = self.random.choice((1, 2, 5, 9))
            if trees and member % 2 and self.target.supports_trees:
                proposals.append(random_tree(self.random, max(rows, 3)))
            else:
                proposals.append(Proposal(random_prompt(rows, self.random.randrange(99))))
        return proposals

    def keep(self, proposal: Proposal) -> list[int]:
        """The rows of a proposal to commit, some of a path."""
        path = [0, *self.random.choice(proposal.paths())]
        return path[: self.random.randint(1, len(path))]

    def step(self, members: Sequence[int], trees: bool = False) -> None:
        """Verify some requests together and each alone, and commit: all must be the same."""
        proposals = self.proposals(members, trees)
        verified = self.verifier.verify([self.together[member] for member in members], proposals)
        each = by_proposal(proposals, *verified)
        for number, proposal, (logits, taps) in zip(members, proposals, each, strict=True):
            expected, features = self.alone[number].verify(proposal)
            assert same(logits, expected), f"logits of request {number}"
            assert same(taps, features), f"taps of request {number}"
            kept = self.keep(proposal)
            self.together[number].commit(kept)
            self.alone[number].commit(kept)

    def check_states(self) -> None:
        for member, (shared, single) in enumerate(zip(self.together, self.alone, strict=True)):
            assert shared.position == single.position and shared.intact
            shared.leave_slot()
            assert states_are_same(shared, single), f"caches of request {member}"

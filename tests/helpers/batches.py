"""Requests that share forwards, and the same requests one by one to compare them with."""

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

# MLX's reference BLAS computes each row in the same way; others depend on the number of rows.
EXACT = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu)
TOLERANCE = 5e-5
PROMPTS = (1, 45, 20, 33, 31, 3, 12, 32)  # lengths, around the families' windows of 32 rows


def same(actual: mx.array, expected: mx.array) -> bool:
    """Whether all bits are equal, or numbers are close where products depend on the rows."""
    if EXACT:
        return mx.array_equal(actual, expected).item()
    return actual.shape == expected.shape and mx.allclose(actual, expected, atol=TOLERANCE).item()


def _state(cache: Any) -> Any:
    """The arrays of a cache, without the spare room after its rows."""
    return [*cache.keys_and_values(), cache.offset] if isinstance(cache, KVCache) else cache.state


def states_are_same(first: TargetSession, second: TargetSession) -> bool:
    """Whether the contents of two sessions' caches are the same."""
    first_leaves = tree_flatten([_state(cache) for cache in first.cache])
    second_leaves = tree_flatten([_state(cache) for cache in second.cache])
    for (_, actual), (_, expected) in zip(first_leaves, second_leaves, strict=True):
        if isinstance(actual, mx.array):
            if not same(actual, expected):
                return False
        elif actual != expected:
            return False
    return True


def by_proposal(proposals: Sequence[Proposal], logits: mx.array, taps: mx.array) -> list[Any]:
    """Split the logits and taps of a forward's rows: a pair for each proposal."""
    ends = list(accumulate(len(proposal) for proposal in proposals))
    assert len(logits) == taps.shape[1] == ends[-1]
    logits_of_each = mx.split(logits, ends[:-1])
    taps_of_each = mx.split(taps, ends[:-1], axis=1)
    return list(zip(logits_of_each, taps_of_each, strict=True))


def memory() -> int:
    """Bytes in use, after all computations have ended and garbage is collected."""
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
        """A random chain for each member, or with `trees` a tree for every second one."""
        proposals = []
        for member in members:
            rows = self.random.choice((1, 2, 5, 9))
            if trees and member % 2 and self.target.supports_trees:
                proposals.append(random_tree(self.random, max(rows, 3)))
            else:
                proposals.append(Proposal(random_prompt(rows, self.random.randrange(99))))
        return proposals

    def rows_to_commit(self, proposal: Proposal) -> list[int]:
        """The first rows of a random path of a proposal."""
        path = [0, *self.random.choice(proposal.paths())]
        return path[: self.random.randint(1, len(path))]

    def step(self, members: Sequence[int], trees: bool = False) -> None:
        """Verify some requests together and each alone, assert equal results, and commit."""
        proposals = self.proposals(members, trees)
        verified = self.verifier.verify([self.together[member] for member in members], proposals)
        each = by_proposal(proposals, *verified)
        for number, proposal, (logits, taps) in zip(members, proposals, each, strict=True):
            expected, features = self.alone[number].verify(proposal)
            assert same(logits, expected), f"logits of request {number}"
            assert same(taps, features), f"taps of request {number}"
            kept = self.rows_to_commit(proposal)
            self.together[number].commit(kept)
            self.alone[number].commit(kept)

    def check_states(self) -> None:
        """Assert that the caches of each request are its twin's."""
        for member, (shared, single) in enumerate(zip(self.together, self.alone, strict=True)):
            assert shared.position == single.position and shared.intact
            shared.leave_slot()
            assert states_are_same(shared, single), f"caches of request {member}"

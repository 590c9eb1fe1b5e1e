"""A rank that plays the embedded pair with the others, and compares with one machine.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_pair.py TOKENS

Rank 0 prints JSON objects, for tests/test_cluster.py and scripts/cluster_check.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

import dflash_mlx as dm
from dflash_mlx.cluster.cluster import Cluster
from dflash_mlx.cluster.store import LeadingStore

QUESTION = "Let us add 47 and 38 digit by digit.\nOnes:"
LONG = [{"role": "user", "content": "Count. " * 150 + "What is 3 plus 4?"}]
TREE = 20


class Pairs:
    """The pair over all ranks, and beside it the same on one machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.target, self.drafter = dm.load("tiny", cluster=cluster)
        self.whole, self.own = dm.load("tiny")

    def same(self, *questions: Any, **settings: Any) -> dict[str, Any]:
        """The same requests on both; what the last one took."""
        shared: dict[str, Any] = dict(settings)
        if settings.pop("turns", False):
            shared = settings | {"conversation": dm.Conversation(self.target, self.drafter)}
        messages, equal = self.cluster.leader.messages, []
        for question in questions:
            alone = dm.generate(self.whole, self.own, question, **settings)
            found = dm.generate(self.target, self.drafter, question, **shared)
            equal.append(found.tokens == alone.tokens)
        stats = found.stats
        told = self.cluster.leader.messages - messages
        return {"equal": equal, "rounds": stats.rounds, "messages": told, "stats": vars(stats)}


def texts(pairs: Pairs) -> Iterator[dict[str, Any]]:
    for temperature in (0.0, 0.8):
        for tree in (None, TREE):
            settings = {"temperature": temperature, "seed": 7, "tree_budget": tree}
            found = pairs.same(QUESTION, max_tokens=24, **settings)
            yield {"what": "text", "temperature": temperature, "tree": tree} | found


def together(pairs: Pairs) -> dict[str, Any]:
    """Three requests in an engine, and two more that begin as one of them did."""
    requests = [
        (QUESTION, {"temperature": 0.0}),
        (LONG, {"temperature": 0.8, "seed": 1}),
        (QUESTION + " 5", {"temperature": 0.8, "seed": 2, "tree_budget": TREE}),
        (LONG, {"temperature": 0.0}),
        (LONG, {"temperature": 0.8, "seed": 1}),
    ]
    alone = [dm.generate(pairs.whole, pairs.own, q, max_tokens=12, **s) for q, s in requests]
    store = LeadingStore(pairs.target, pairs.drafter, memory=2**20)
    with dm.Engine(pairs.target, pairs.drafter, prefix=store) as engine:
        jobs = [engine.submit(q, max_tokens=12, **s) for q, s in requests[:3]]
        gone = engine.submit(QUESTION, max_tokens=200)
        next(gone)
        gone.cancel()
        found = [job.result() for job in jobs]
        for question, settings in requests[3:]:  # what they begin with is stored by now
            found.append(engine.submit(question, max_tokens=12, **settings).result())
            store.leave_room(2**20)  # and let go of
            store.leave_room(0)
        cancelled = gone.result().finish_reason
    return {
        "what": "together",
        "equal": [one.tokens == other.tokens for one, other in zip(found, alone, strict=True)],
        "reused": [one.stats.reused_tokens for one in found],
        "cancelled": cancelled,
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """The operations over all ranks that are built inside."""
    own, count = mx.distributed.all_sum, [0]

    def all_sum(*of: Any, **settings: Any) -> mx.array:
        count[0] += 1
        return own(*of, **settings)

    mx.distributed.all_sum = all_sum
    try:
        yield count
    finally:
        mx.distributed.all_sum = own


def collectives(pairs: Pairs, tokens: int) -> dict[str, Any]:
    """What so many tokens take, drafted and plain."""
    found: dict[str, Any] = {"what": "collectives", "tokens": tokens}
    settings: dict[str, Any] = {"max_tokens": tokens}
    for name, drafter in (("plain", None), ("drafted", pairs.drafter)):
        with counted() as count:
            result = dm.generate(pairs.target, drafter, [1, 2, 3, 4, 5], **settings)
        found[name] = {"sums": count[0], "tokens": len(result.tokens)}
        found[name]["rounds"] = result.stats.rounds
    return found


def main(tokens: int) -> None:
    cluster = Cluster()
    if cluster.rank:
        cluster.follow("tiny")
        return
    pairs = Pairs(cluster)
    for found in texts(pairs):
        print(json.dumps(found, default=str), flush=True)
    turns = [QUESTION, QUESTION + " 5 and", QUESTION + " 6"]
    done = {"what": "turns"} | pairs.same(*turns, turns=True, max_tokens=10)
    print(json.dumps(done, default=str), flush=True)
    print(json.dumps(together(pairs)), flush=True)
    print(json.dumps(collectives(pairs, tokens)), flush=True)
    cluster.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))

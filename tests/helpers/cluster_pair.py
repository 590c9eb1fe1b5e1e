"""A rank that plays the embedded pair with the others, and compares with one machine.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_rank.py pair texts turns together sums=256

Rank 0 prints JSON objects, for tests/cluster/test_cluster.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from clusters import STALL

import dflash_mlx as dm
from dflash_mlx.cluster.cluster import Cluster
from dflash_mlx.cluster.target import LeaderPrefixCache

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


QUESTION = "Let us add 47 and 38 digit by digit.\nOnes:"
LONG = [{"role": "user", "content": "Count. " * 20 + "What is 3 plus 4?"}]
CHUNK = 32  # tokens of what is kept of a prompt
TREE = 20


class Pairs:
    """The pair over all ranks, and beside it the same on one machine."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.target, self.drafter = dm.load(name, "tiny", cluster=cluster)
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


SHAPES = ((0.0, TREE), (0.8, None), (0.0, None), (0.8, TREE))


def texts(pairs: Pairs, shapes: Any = SHAPES) -> Iterator[dict[str, Any]]:
    """Greedy and with a seed, chains and trees."""
    for temperature, tree in shapes:
        settings = {"temperature": temperature, "seed": 7, "tree_budget": tree}
        found = pairs.same(QUESTION, max_tokens=16, **settings)
        yield {"what": "text", "temperature": temperature, "tree": tree} | found


def turns(pairs: Pairs) -> Iterator[dict[str, Any]]:
    """A conversation that goes on, and goes back."""
    asked = [QUESTION, QUESTION + " 5 and", QUESTION + " 6"]
    yield {"what": "turns"} | pairs.same(*asked, turns=True, max_tokens=3)


def together(pairs: Pairs) -> Iterator[dict[str, Any]]:
    """Requests of an engine, one that is cancelled, and two that begin as one of them did."""
    requests = [
        (LONG, {"temperature": 0.8, "seed": 1}),
        (QUESTION, {"temperature": 0.0, "tree_budget": TREE}),
        (LONG, {"temperature": 0.0}),
        (LONG, {"temperature": 0.8, "seed": 1}),
    ]
    alone = [dm.generate(pairs.whole, pairs.own, q, max_tokens=4, **s) for q, s in requests]
    store = LeaderPrefixCache(pairs.target, pairs.drafter, memory=2**26, chunk=CHUNK)
    with dm.Engine(pairs.target, pairs.drafter, prefix=store) as engine:
        jobs = [engine.submit(q, max_tokens=4, **s) for q, s in requests[:2]]
        gone = engine.submit(QUESTION, max_tokens=200, block_size=2)
        next(gone)
        gone.cancel()
        found = [job.result() for job in jobs]
        found.append(engine.submit(requests[2][0], max_tokens=4).result())
        store.clear()
        found.append(engine.submit(requests[3][0], max_tokens=4, **requests[3][1]).result())
        cancelled = gone.result().finish_reason
    yield {
        "what": "together",
        "equal": [one.tokens == other.tokens for one, other in zip(found, alone, strict=True)],
        "reused": [one.stats.reused_tokens for one in found],
        "cancelled": cancelled,
    }


def collectives(pairs: Pairs, tokens: int) -> Iterator[dict[str, Any]]:
    """What so many tokens take, drafted and plain."""
    found: dict[str, Any] = {"what": "collectives", "tokens": tokens}
    leader = pairs.cluster.leader  # which may beat while a busy machine drafts
    for name, drafter in (("plain", None), ("drafted", pairs.drafter)):
        sums = made = rounds = requests = 0
        while made < tokens:
            asked = f"What is {31 + requests} plus {47 + requests}?"
            question = [{"role": "user", "content": asked}]
            beats = leader.heartbeats
            with counted() as count:
                result = dm.generate(pairs.target, drafter, question, max_tokens=tokens - made)
            sums, made = (
                sums + count.total() - (leader.heartbeats - beats),
                made + len(result.tokens),
            )
            rounds, requests = rounds + result.stats.rounds, requests + 1
        found[name] = {"sums": sums, "tokens": made, "rounds": rounds, "requests": requests}
        found[name]["a forward"] = sums // (rounds + requests)
    yield found


@contextmanager
def split_by(size: int) -> Iterator[str]:
    """The pair's target, with as many heads as so many ranks divide.

    It has two heads of keys. Each of them twice, for half of the queries, is the same model.
    """
    if size == 2:
        yield "tiny"
        return
    with tempfile.TemporaryDirectory() as place:
        own, folder = Path(str(files("dflash_mlx") / "tiny/target")), Path(place) / "target"
        shutil.copytree(own, folder)
        config = json.loads((own / "config.json").read_text())
        heads, length = config["num_key_value_heads"], config["head_dim"]
        weights: Any = mx.load(str(own / "model.safetensors"))
        for path, weight in weights.items():
            if "k_proj" in path or "v_proj" in path:
                weight = weight.reshape(heads, length, -1)
                weights[path] = mx.repeat(weight, size // heads, axis=0).reshape(size * length, -1)
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": size}))
        yield str(folder)


def main(parts: list[str]) -> None:
    cluster = Cluster(STALL)
    with split_by(cluster.size) as target:
        if cluster.rank:
            cluster.follow(target)
            return
        pairs = Pairs(cluster, target)
    for part in parts:
        name, _, tokens = part.partition("=")
        shown = collectives(pairs, int(tokens)) if tokens else PARTS[name](pairs)
        for found in shown:
            print(json.dumps(found, default=str), flush=True)
    cluster.close()


PARTS = {
    "texts": texts,
    "two": lambda pairs: texts(pairs, SHAPES[:2]),
    "turns": turns,
    "together": together,
}

"""A rank that plays with the others, and compares with one machine, for test_cluster.py.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_rank.py --quick pair heads=llama stages

Its parts follow each other, so that it starts once. Rank 0 prints JSON objects, a line each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from families import CONFIGS, CharacterTokenizer, random_model, random_prompt, target_of
from request_set import RequestSet, SteppedEngine, TextOracle, TextOracleSession

import dflash_mlx as dm
from dflash_mlx.cluster.cluster import Cluster
from dflash_mlx.cluster.leader_target import LeaderPrefixStore
from dflash_mlx.drafter.lookup_drafter import LookupDrafter
from dflash_mlx.engine.shared_batch import BatchItem, SharedBatch
from dflash_mlx.errors import SettingsError
from dflash_mlx.targets import Target
from dflash_mlx.targets.taps import EMBEDDING, gathered

STALL = 40.0  # seconds for a rank to answer: the machine may be busy with other tests


def tell(**record: Any) -> None:
    print(json.dumps(record, default=str), flush=True)


QUESTION = "Let us add 47 and 38 digit by digit.\nOnes:"
LONG = [{"role": "user", "content": "Count. " * 20 + "What is 3 plus 4?"}]
CHUNK = 32  # tokens of what is kept of a prompt
TREE = 20


def pair() -> None:
    """The embedded pair: a tree, a chain with a seed, a conversation, and requests together."""
    cluster = Cluster(STALL)
    if cluster.rank:
        cluster.follow("tiny")
        return
    target, drafter = dm.load("tiny", "tiny", cluster=cluster)
    whole = dm.load("tiny")

    def same(*questions: Any, conversation: Any = None, **settings: Any) -> dict[str, Any]:
        """Answer the same requests on both targets, and return what the last one took."""
        equal = []
        for question in questions:
            alone = dm.generate(*whole, question, **settings)
            messages = cluster.leader.messages
            shared = settings | {"conversation": conversation}
            result = dm.generate(target, drafter, question, **shared)
            equal.append(result.tokens == alone.tokens)
        told = cluster.leader.messages - messages
        return {"equal": equal, "rounds": result.stats.rounds, "messages": told}

    for settings in ({"tree_budget": TREE}, {"temperature": 0.8, "seed": 7}):
        tell(what="text", **same(QUESTION, max_tokens=16, **settings))
    turns = QUESTION, QUESTION + " 5 and", QUESTION + " 6"  # goes on, and goes back
    goes_on = dm.Conversation(target, drafter)
    tell(what="turns", **same(*turns, conversation=goes_on, max_tokens=3))
    tell(what="together", **together(target, drafter, whole))
    cluster.close()


def together(target: Any, drafter: Any, whole: Any) -> dict[str, Any]:
    """Requests of an engine, one that is cancelled, and two that begin as one of them did."""
    requests: list[tuple[Any, dict[str, Any]]] = [
        (LONG, {"temperature": 0.8, "seed": 1}),
        (QUESTION, {"tree_budget": TREE}),
        (LONG, {}),
        (LONG, {"temperature": 0.8, "seed": 1}),
    ]
    alone = [dm.generate(*whole, asked, max_tokens=4, **more) for asked, more in requests]
    store = LeaderPrefixStore(target, drafter, memory=2**26, chunk=CHUNK)
    with dm.Engine(target, drafter, prefix=store) as engine:

        def submit(number: int) -> Any:
            asked, more = requests[number]
            return engine.submit(asked, max_tokens=4, **more)

        jobs = [submit(0), submit(1)]
        gone = engine.submit(QUESTION, max_tokens=200, block_size=2)
        next(gone)
        gone.cancel()
        results = [job.result() for job in jobs]
        results.append(submit(2).result())
        store.clear()
        results.append(submit(3).result())
        cancelled = gone.result().finish_reason
    return {
        "equal": [
            result.tokens == expected.tokens
            for result, expected in zip(results, alone, strict=True)
        ],
        "reused": [result.stats.reused_tokens for result in results],
        "cancelled": cancelled,
    }


WINDOWED = 40  # tokens of a prompt, more than the windows of the families
PROMPTS = [random_prompt(WINDOWED, 0), random_prompt(9, 1), random_prompt(20, 2)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 8},
    {"temperature": 0.8, "seed": 3, "max_tokens": 8},
    {"temperature": 0.8, "seed": 4, "max_tokens": 8},
]
# What the number of ranks has to divide. Where Qwen3.5 has fewer key heads, mlx-lm repeats them.
HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "o_groups")
KEY_HEADS = "num_key_value_heads"
REPEATED = ("qwen3_5", "qwen3_5_moe")


class Rounds(SharedBatch):
    """Counts the steps of an engine."""

    count = 0

    def verify(
        self, turns: Sequence[BatchItem], tokens: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        self.count += 1
        return super().verify(turns, tokens)


def widened(family: str, size: int) -> dict[str, int]:
    """A family's head counts, multiplied until `size` ranks divide them evenly."""
    config = CONFIGS[family]
    shape = config.get("text_config", config)
    names = HEADS if family in REPEATED else (*HEADS, KEY_HEADS)
    heads = {name: shape[name] for name in names if shape.get(name)}
    times = 1
    while any(count * times % size for count in heads.values()):
        times += 1
    return {name: count * times for name, count in heads.items()}


def play(family: str, by: str, quick: bool) -> None:
    """Decode with a tiny model of a family on all ranks, one request and several together.

    `quick` leaves out the second prompt, and chains of several requests.

    The taps of each step are computed from the caches of all ranks, so the same taps are the same
    caches.
    """
    cluster = Cluster(STALL, pipeline=by == "layers")
    wider = {} if by == "layers" else widened(family, cluster.size)
    model = random_model(family, **wider)
    try:
        cluster.shard(family, model)
    except SettingsError as error:
        if cluster.rank == 0:
            tell(family=family, refused=str(error))
        return
    mx.eval(model.parameters())
    target = cluster.open(model, CharacterTokenizer(), CONFIGS[family], family)
    if cluster.rank:
        cluster.work(target)
        return
    leader = cluster.leader
    channel = cluster.channel
    forwards = 0
    texts = {}
    with leader._lock:  # no heartbeat is on its way
        messages = leader.messages
        sums = channel.sums - leader.heartbeats
    local = target_of(random_model(family, **wider), family)
    crowd = RequestSet(local, list(zip(PROMPTS, SETTINGS, strict=True)))
    for index, shape in enumerate(("chain", "tree")[: 1 + target.supports_trees]):
        numbers = [index] if quick else [0, 1]
        for number in numbers:
            prompt, settings = crowd.requests[number]
            drafter = drafter_of(crowd, shape)
            result = dm.generate(target, drafter, prompt, **settings)
            texts[f"{shape} {number}"] = result.tokens == crowd.alone[number]
            forwards += 1 + result.stats.rounds
        if not quick or shape == "tree":
            batch = Rounds(target, None)
            texts[f"{shape}, three"] = three(
                target, crowd=crowd, drafter=drafter_of(crowd, shape), batch=batch
            )
            forwards += 4 + batch.count
    cluster.close()  # with a last message
    alone = drafter_of(crowd, shape)
    dm.generate(local, alone, prompt, **settings)
    off = [
        abs(heard - expected).max()
        for heard, expected in zip(drafter.heard, alone.heard, strict=True)
    ]
    tell(
        **{"family": family, "ranks": cluster.size, "texts": texts, "taps off by": max(off)},
        **{"forwards": forwards, "messages": leader.messages - messages},
        sums=channel.sums - leader.heartbeats - 1 - sums,
    )


class Listening(TextOracle):
    """Keeps what its sessions are told of the target's layers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heard: list[np.ndarray] = []

    def start(self, target: Any, sampler: Any) -> TextOracleSession:
        session = super().start(target, sampler)
        extend = session.extend

        def listen(taps: mx.array, kept: Any = None, tokens: Sequence[int] = ()) -> None:
            self.heard.append(np.array(taps if kept is None else gathered(taps, kept)))
            extend(taps, kept, tokens)

        session.extend = listen  # type: ignore[method-assign]
        return session


def drafter_of(crowd: RequestSet, shape: str) -> Listening:
    layers = crowd.target.num_layers
    drafter = crowd.oracle(0.8, (EMBEDDING, layers // 2, layers - 1), Listening)
    drafter.branches = shape == "tree"
    return drafter


def three(target: dm.Target, crowd: RequestSet, drafter: TextOracle, batch: SharedBatch) -> bool:
    """Three requests that join one after the other, and a fourth that is cancelled on its way."""
    played = SteppedEngine(target, drafter, batch)
    jobs = []
    for prompt, settings in crowd.requests:
        jobs.append(played.submit(prompt, block_size=6, **settings))
        played.scheduler.step()
        if len(jobs) == 2:
            gone = played.submit(crowd.requests[0][0], block_size=2, **crowd.requests[0][1])
            played.scheduler.step()
            gone.cancelled = True
    played.run()
    cut = gone.result()
    whole = [job.result().tokens for job in jobs] == crowd.alone
    begun = crowd.alone[0][: len(cut.tokens)] == cut.tokens
    return whole and begun and cut.finish_reason == "cancelled"


MIXED = "qwen3_next"
OF = CharacterTokenizer(), CONFIGS[MIXED], MIXED
PROMPT = random_prompt(80, 0)  # more than the last forward of a prefill reads
STORED = [PROMPT, [*PROMPT, *random_prompt(5, 1)], PROMPT[:70] + random_prompt(9, 2)]


def mixed_model() -> Any:
    return random_model(MIXED, num_hidden_layers=2, full_attention_interval=2)


def turns_and_prefixes(target: Target, store: type[dm.PrefixStore]) -> dict[str, list[Any]]:
    """Turns of a chat that goes on and goes back, and requests that begin alike."""
    drafter = LookupDrafter()
    settings = {"max_tokens": 6, "conversation": dm.Conversation(target, drafter)}
    turns = [dm.generate(target, drafter, prompt, **settings) for prompt in STORED]
    settings = {"max_tokens": 6, "prefix": store(target, None, memory=2**26, chunk=16)}
    begun = [dm.generate(target, None, prompt, **settings) for prompt in STORED]
    return {
        "tokens": [result.tokens for result in [*turns, *begun]],
        "reused": [result.stats.reused_tokens for result in [*turns, *begun]],
        "can be cut": [target.start().can_trim],
    }


def stages() -> None:
    """A pipeline whose rank 0 has attention alone, and the other one a recurrence alone.

    So what one of them can do with its caches, the other one cannot.
    """
    cluster = Cluster(STALL, pipeline=True)
    stage = mixed_model()
    cluster.shard(MIXED, stage)
    mx.eval(stage.parameters())
    target = cluster.open(stage, *OF)
    if cluster.rank:
        cluster.work(target)
        return
    spread = turns_and_prefixes(target, LeaderPrefixStore)
    local = turns_and_prefixes(Target(mixed_model(), *OF), dm.PrefixStore)
    tell(what="stages", spread=spread, own=local)
    cluster.close()


if __name__ == "__main__":
    for part in sys.argv[1:]:
        name, _, family = part.partition("=")
        if family:
            play(family, name, "--quick" in sys.argv)
        elif name in ("pair", "stages"):
            {"pair": pair, "stages": stages}[name]()

"""A rank of a cluster that decodes with the others, and compares with one machine.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_rank.py --quick pair heads=llama stages

test_cluster.py runs it. It runs the given parts one after the other, so that it starts only once.
Rank 0 prints JSON objects, one in a line.
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

STALL = 40.0  # seconds that a rank may take to answer, as other tests may keep the machine busy


def print_record(**record: Any) -> None:
    print(json.dumps(record, default=str), flush=True)


QUESTION = "Let us add 47 and 38 digit by digit.\nOnes:"
LONG = [{"role": "user", "content": "Count. " * 20 + "What is 3 plus 4?"}]
CHUNK = 32  # tokens in a block of the prefix store
TREE_ROWS = 20


def pair() -> None:
    """The embedded pair: a tree, a sampled chain, a conversation, and an engine's requests."""
    cluster = Cluster(STALL)
    if cluster.rank:
        cluster.follow("tiny")
        return
    target, drafter = dm.load("tiny", "tiny", cluster=cluster)
    local_pair = dm.load("tiny")

    def compare(*questions: Any, conversation: Any = None, **settings: Any) -> dict[str, Any]:
        """Answer questions on both targets: which texts are equal, and the last one's messages."""
        equal = []
        for question in questions:
            alone = dm.generate(*local_pair, question, **settings)
            messages = cluster.leader.messages
            result = dm.generate(target, drafter, question, conversation=conversation, **settings)
            equal.append(result.tokens == alone.tokens)
        sent = cluster.leader.messages - messages
        return {"equal": equal, "rounds": result.stats.rounds, "messages": sent}

    for settings in ({"tree_budget": TREE_ROWS}, {"temperature": 0.8, "seed": 7}):
        print_record(what="text", **compare(QUESTION, max_tokens=16, **settings))
    # The second turn continues the first one; the third replaces its end.
    turns = [QUESTION, QUESTION + " 5 and", QUESTION + " 6"]
    conversation = dm.Conversation(target, drafter)
    print_record(what="turns", **compare(*turns, conversation=conversation, max_tokens=3))
    print_record(what="together", **run_engine(target, drafter, local_pair))
    cluster.close()


def run_engine(target: Any, drafter: Any, local_pair: Any) -> dict[str, Any]:
    """Requests of an engine: two, a cancelled one, and two more with the first one's prompt."""
    requests: list[tuple[Any, dict[str, Any]]] = [
        (LONG, {"temperature": 0.8, "seed": 1}),
        (QUESTION, {"tree_budget": TREE_ROWS}),
        (LONG, {}),
        (LONG, {"temperature": 0.8, "seed": 1}),
    ]
    alone = [
        dm.generate(*local_pair, prompt, max_tokens=4, **settings) for prompt, settings in requests
    ]
    store = LeaderPrefixStore(target, drafter, memory=2**26, chunk=CHUNK)
    with dm.Engine(target, drafter, prefix=store) as engine:

        def submit(number: int) -> Any:
            prompt, settings = requests[number]
            return engine.submit(prompt, max_tokens=4, **settings)

        jobs = [submit(0), submit(1)]
        cancelled_job = engine.submit(QUESTION, max_tokens=200, block_size=2)
        next(cancelled_job)
        cancelled_job.cancel()
        results = [job.result() for job in jobs]
        results.append(submit(2).result())
        store.clear()
        results.append(submit(3).result())
        cancelled = cancelled_job.result().finish_reason
    return {
        "equal": [
            result.tokens == expected.tokens
            for result, expected in zip(results, alone, strict=True)
        ],
        "reused": [result.stats.reused_tokens for result in results],
        "cancelled": cancelled,
    }


PROMPTS = [  # the first one is longer than the windows of 32 rows
    random_prompt(40, 0),
    random_prompt(9, 1),
    random_prompt(20, 2),
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 8},
    {"temperature": 0.8, "seed": 3, "max_tokens": 8},
    {"temperature": 0.8, "seed": 4, "max_tokens": 8},
]
# Fields that the number of ranks has to divide. If Qwen3.5 has fewer key heads, mlx-lm repeats
# them.
HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "o_groups")
KEY_HEADS = "num_key_value_heads"
REPEATED = ("qwen3_5", "qwen3_5_moe")


class StepCounter(SharedBatch):
    """A batch that counts an engine's shared steps."""

    count = 0

    def verify(
        self, turns: Sequence[BatchItem], tokens: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        self.count += 1
        return super().verify(turns, tokens)


def divisible_heads(family: str, size: int) -> dict[str, int]:
    """A family's numbers of heads, multiplied until `size` ranks divide them evenly."""
    config = CONFIGS[family]
    shape = config.get("text_config", config)
    names = HEADS if family in REPEATED else (*HEADS, KEY_HEADS)
    heads = {name: shape[name] for name in names if shape.get(name)}
    times = 1
    while any(count * times % size for count in heads.values()):
        times += 1
    return {name: count * times for name, count in heads.items()}


def decode_family(family: str, by: str, quick: bool) -> None:
    """Decode with a tiny model of a family on all ranks: single requests, and three together.

    `by` is "heads" or "layers"; `quick` leaves out the second prompt and three chains together.

    The taps of a step are computed from the caches of all ranks. So if the taps are those of one
    machine, so are the caches.
    """
    cluster = Cluster(STALL, pipeline=by == "layers")
    heads = {} if by == "layers" else divisible_heads(family, cluster.size)
    model = random_model(family, **heads)
    try:
        cluster.shard(family, model)
    except SettingsError as error:
        if cluster.rank == 0:
            print_record(family=family, refused=str(error))
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
    with leader._lock:  # so that no heartbeat is sent meanwhile
        messages = leader.messages
        sums = channel.sums - leader.heartbeats
    local = target_of(random_model(family, **heads), family)
    request_set = RequestSet(local, list(zip(PROMPTS, SETTINGS, strict=True)))
    shapes = ["chain", "tree"] if target.supports_trees else ["chain"]
    for index, shape in enumerate(shapes):
        numbers = [index] if quick else [0, 1]
        for number in numbers:
            prompt, settings = request_set.requests[number]
            drafter = drafter_of(request_set, shape)
            result = dm.generate(target, drafter, prompt, **settings)
            texts[f"{shape} {number}"] = result.tokens == request_set.alone[number]
            forwards += 1 + result.stats.rounds
        if not quick or shape == "tree":
            batch = StepCounter(target, None)
            texts[f"{shape}, three"] = three_together_are_right(
                target, request_set=request_set, drafter=drafter_of(request_set, shape), batch=batch
            )
            forwards += 4 + batch.count  # four prompts, and the shared steps
    cluster.close()  # sends one more message
    local_drafter = drafter_of(request_set, shape)
    dm.generate(local, local_drafter, prompt, **settings)
    errors = [
        abs(taps - expected).max()
        for taps, expected in zip(drafter.taps, local_drafter.taps, strict=True)
    ]
    print_record(
        **{"taps off by": max(errors)},
        family=family,
        ranks=cluster.size,
        texts=texts,
        forwards=forwards,
        messages=leader.messages - messages,
        sums=channel.sums - leader.heartbeats - 1 - sums,
    )


class RecordingOracle(TextOracle):
    """An oracle that records the taps that its sessions get."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.taps: list[np.ndarray] = []

    def start(self, target: Any, sampler: Any) -> TextOracleSession:
        session = super().start(target, sampler)
        extend = session.extend

        def recording_extend(taps: mx.array, kept: Any = None, tokens: Sequence[int] = ()) -> None:
            self.taps.append(np.array(taps if kept is None else gathered(taps, kept)))
            extend(taps, kept, tokens)

        session.extend = recording_extend  # type: ignore[method-assign]
        return session


def drafter_of(request_set: RequestSet, shape: str) -> RecordingOracle:
    """A new oracle of the requests' texts, whose drafts are chains or trees."""
    layers = request_set.target.num_layers
    drafter = request_set.oracle(0.8, (EMBEDDING, layers // 2, layers - 1), RecordingOracle)
    drafter.branches = shape == "tree"
    return drafter


def three_together_are_right(
    target: dm.Target, request_set: RequestSet, drafter: TextOracle, batch: SharedBatch
) -> bool:
    """Whether three requests that join one by one, and a cancelled one, get their texts alone."""
    engine = SteppedEngine(target, drafter, batch)
    jobs = []
    for prompt, settings in request_set.requests:
        jobs.append(engine.submit(prompt, block_size=6, **settings))
        engine.scheduler.step()
        if len(jobs) == 2:
            cancelled_job = engine.submit(
                request_set.requests[0][0], block_size=2, **request_set.requests[0][1]
            )
            engine.scheduler.step()
            cancelled_job.cancelled = True
    engine.run()
    cancelled = cancelled_job.result()
    texts_are_equal = [job.result().tokens for job in jobs] == request_set.alone
    beginning = request_set.alone[0][: len(cancelled.tokens)]
    return (
        texts_are_equal and cancelled.tokens == beginning and cancelled.finish_reason == "cancelled"
    )


MIXED = "qwen3_next"
TARGET_ARGUMENTS = (CharacterTokenizer(), CONFIGS[MIXED], MIXED)
PROMPT = random_prompt(80, 0)  # more than the last forward of a prefill reads
STORED = [PROMPT, [*PROMPT, *random_prompt(5, 1)], PROMPT[:70] + random_prompt(9, 2)]


def mixed_model() -> Any:
    """A model of a recurrent layer and an attention layer."""
    return random_model(MIXED, num_hidden_layers=2, full_attention_interval=2)


def turns_and_prefixes(target: Target, store: type[dm.PrefixStore]) -> dict[str, list[Any]]:
    """Turns of a conversation, and requests with a store; prompts continue or branch."""
    drafter = LookupDrafter()
    conversation = dm.Conversation(target, drafter)
    prefix_store = store(target, None, memory=2**26, chunk=16)
    results = [
        dm.generate(target, drafter, prompt, max_tokens=6, conversation=conversation)
        for prompt in STORED
    ]
    results += [
        dm.generate(target, None, prompt, max_tokens=6, prefix=prefix_store) for prompt in STORED
    ]
    return {
        "tokens": [result.tokens for result in results],
        "reused": [result.stats.reused_tokens for result in results],
        "can be cut": [target.start().can_trim],
    }


def stages() -> None:
    """A pipeline whose rank 0 has an attention layer only, and the other one a recurrent layer.

    So the caches of one can be trimmed, and those of the other cannot.
    """
    cluster = Cluster(STALL, pipeline=True)
    stage = mixed_model()
    cluster.shard(MIXED, stage)
    mx.eval(stage.parameters())
    target = cluster.open(stage, *TARGET_ARGUMENTS)
    if cluster.rank:
        cluster.work(target)
        return
    spread = turns_and_prefixes(target, LeaderPrefixStore)
    local = turns_and_prefixes(Target(mixed_model(), *TARGET_ARGUMENTS), dm.PrefixStore)
    print_record(what="stages", spread=spread, own=local)
    cluster.close()


if __name__ == "__main__":
    for part in sys.argv[1:]:
        name, _, family = part.partition("=")
        if family:
            decode_family(family, name, "--quick" in sys.argv)
        elif name == "pair":
            pair()
        elif name == "stages":
            stages()

"""A rank that plays tiny models of several families with the others, and compares with one machine.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_rank.py families --quick llama

Rank 0 prints a JSON object a family, for tests/cluster/test_cluster.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from clusters import STALL
from crowd import Crowd, Knowing, KnowingSession, Played
from families import CONFIGS, Letters, random_model, random_prompt, target_of
from mlx.utils import tree_flatten

import dflash_mlx as dm
from dflash_mlx.cluster.cluster import Cluster
from dflash_mlx.engine.batch import BatchItem, SharedBatch
from dflash_mlx.errors import SettingsError
from dflash_mlx.targets import TargetSession, internals
from dflash_mlx.targets.taps import EMBEDDING, gathered

WINDOWED = 40  # tokens of a prompt, more than the windows of the families
TOKENS = 8
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": TOKENS},
    {"temperature": 0.8, "seed": 3, "max_tokens": TOKENS},
    {"temperature": 0.8, "seed": 4, "max_tokens": TOKENS},
]
PROMPTS = [random_prompt(WINDOWED, 0), random_prompt(9, 1), random_prompt(20, 2)]
# What the number of ranks has to divide. Where Qwen3.5 has fewer key heads, mlx-lm repeats them.
HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "o_groups")
KEY_HEADS = "num_key_value_heads"
PIPELINE, QUICK = "--pipeline", "--quick"
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
    """A family's numbers of heads, times what makes so many ranks divide them."""
    config = CONFIGS[family]
    shape = config.get("text_config", config)
    names = HEADS if family in REPEATED else (*HEADS, KEY_HEADS)
    heads = {name: shape[name] for name in names if shape.get(name)}
    times = next(n for n in range(1, size + 1) if not any(x * n % size for x in heads.values()))
    return {name: count * times for name, count in heads.items()}


def cached_heads(layer: Any) -> int:
    """Whose rows or states a layer's caches hold. Latents, and what is pooled, have no heads: 1."""
    attention = internals.attention_of(layer)
    if attention is None:
        return int(internals.mixer_of(layer).num_k_heads)
    return internals.key_heads(attention) if internals.has_key_projection(attention) else 1


def play(family: str, cluster: Cluster, pipeline: bool, quick: bool) -> None:
    """All of a family, as any rank; or, quickly, a chain alone, and trees alone and together."""
    wider = {} if pipeline else widened(family, cluster.size)
    model = random_model(family, **wider)
    heads = [cached_heads(layer) for layer in model.layers]
    try:
        cluster.shard(family, model)
    except SettingsError as error:
        if cluster.rank == 0:
            print(json.dumps({"family": family, "refused": str(error)}), flush=True)
        return
    mx.eval(model.parameters())
    target = cluster.open(model, Letters(), CONFIGS[family], family)
    if cluster.rank:
        objects = cluster.work(target).objects.values()
        last = [one for one in objects if isinstance(one, TargetSession)][-1]
        layers(cluster, target, last) if pipeline else shares(cluster, heads, last)
        return
    leader, channel, forwards = cluster.leader, cluster.channel, 0
    with leader._lock:  # no heartbeat is on its way
        messages, sums = leader.messages, channel.sums - leader.heartbeats
    own = target_of(random_model(family, **wider), family)
    crowd = Crowd(own, list(zip(PROMPTS, SETTINGS, strict=True)))
    found: dict[str, Any] = {"family": family, "ranks": cluster.size, "texts": {}}
    for at, shape in enumerate(("chain", "tree") if target.supports_trees else ("chain",)):
        drafter = drafter_of(crowd, shape)
        for number in (at,) if quick else (0, 1):
            (prompt, settings), text = crowd.requests[number], crowd.alone[number]
            conversation = dm.Conversation(target, drafter)
            drafter.heard.clear()
            result = dm.generate(target, drafter, prompt, conversation=conversation, **settings)
            found["texts"][f"{shape} at {settings['temperature']}"] = result.tokens == text
            forwards += 1 + result.stats.rounds
        last, heard = conversation.caches.target_session, list(drafter.heard)
        if quick and shape == "chain":
            continue
        together = Rounds(target, None)
        found["texts"][f"{shape}, three"] = three(target, crowd, drafter, together)
        forwards += 4 + together.count
    cluster.close()  # with a last message
    found["forwards"], found["messages"] = forwards, leader.messages - messages
    found["sums"] = channel.sums - leader.heartbeats - 1 - sums
    conversation = dm.Conversation(own, drafter)
    drafter.heard.clear()
    dm.generate(own, drafter, prompt, conversation=conversation, **settings)
    off = [abs(one - other).max() for one, other in zip(heard, drafter.heard, strict=True)]
    found["taps off by"] = float(max(off))
    if pipeline:
        found["caches"] = layers(cluster, target, last) == bits(conversation.caches.target_session)
    else:
        found["caches"] = shares(cluster, heads, last)
    print(json.dumps(found), flush=True)


class Listening(Knowing):
    """Keeps what its sessions are told of the target's layers."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.heard: list[np.ndarray] = []

    def start(self, target: Any, sampler: Any) -> KnowingSession:
        session = super().start(target, sampler)
        extend = session.extend

        def listen(taps: mx.array, kept: Any = None, tokens: Sequence[int] = ()) -> None:
            self.heard.append(np.array(taps if kept is None else gathered(taps, kept)))
            extend(taps, kept, tokens)

        session.extend = listen  # type: ignore[method-assign]
        return session


def drafter_of(crowd: Crowd, shape: str) -> Listening:
    known, layers = crowd.knowing(0.8), crowd.target.num_layers
    taps = (EMBEDDING, layers // 2, layers - 1)
    drafter = Listening(known.texts, known.vocab_size, known.p, taps)
    drafter.branches = shape == "tree"
    return drafter


def three(target: dm.Target, crowd: Crowd, drafter: Knowing, together: SharedBatch) -> bool:
    """Three requests that join one after the other, and a fourth that is cancelled on its way."""
    played = Played(target, drafter, together)
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
    return (
        whole
        and cut.finish_reason == "cancelled"
        and crowd.alone[0][: len(cut.tokens)] == (cut.tokens)
    )


def bits(session: TargetSession) -> list[list[int]]:
    """A number for each array of each layer's cache, the same for the same bits."""
    return [
        [zlib.crc32(np.array(leaf).tobytes()) & 0x7FFFFFFF for leaf in arrays_of(cache)]
        for cache in session.cache
    ]


def arrays_of(cache: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(cache.state) if isinstance(leaf, mx.array)]


def shares(cluster: Cluster, heads: Sequence[int], session: TargetSession) -> dict[str, Any]:
    """Whether the arrays of a session's caches have the same bits on just the ranks that hold the
    same heads, and how many arrays are of heads that more than one rank holds.
    """
    found: dict[str, Any] = {"arrays": 0, "shared": 0, "as held": True}
    for count, own in zip(heads, bits(session), strict=True):
        owners = [rank * min(count, cluster.size) // cluster.size for rank in range(cluster.size)]
        for one in own:
            held = cluster.channel.meet(one)
            pairs = set(zip(owners, held, strict=True))
            found["arrays"] += 1
            found["shared"] += count < cluster.size
            found["as held"] &= len(pairs) == len(set(owners)) == len(set(held))
    return found


def layers(cluster: Cluster, target: dm.Target, session: TargetSession) -> list[list[int]]:
    """The bits of all layers' caches, of which each rank has some."""
    own, first = (
        bits(session),
        internals.first_layer(target.model),
    )
    found = []
    for layer in range(target.num_layers):
        here = own[layer - first] if 0 <= layer - first < len(own) else []
        count = max(cluster.channel.meet(len(here)))
        found.append([max(cluster.channel.meet(here[at] if here else 0)) for at in range(count)])
    return found


def main(arguments: list[str]) -> None:
    pipeline = False
    for argument in arguments:
        pipeline |= argument == PIPELINE
        if argument not in (PIPELINE, QUICK):
            play(argument, Cluster(STALL, pipeline=pipeline), pipeline, QUICK in arguments)

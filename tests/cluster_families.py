"""A rank that plays tiny models of several families with the others, and compares with one machine.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_families.py qwen3 llama

Rank 0 prints a JSON object a family; tests/test_cluster_families.py and scripts/cluster_check.py
read them.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import mlx.core as mx
import numpy as np
from crowd import Crowd, Knowing, Played
from families import CONFIGS, Letters, random_model, random_prompt, target_of
from mlx.utils import tree_flatten

import dflash_mlx as dm
from dflash_mlx.cluster.cluster import Cluster
from dflash_mlx.engine.together import Flat
from dflash_mlx.errors import SettingsError
from dflash_mlx.target import TargetSession

WINDOWED = 40  # tokens of a prompt, more than the windows of the families
TOKENS = 8
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": TOKENS},
    {"temperature": 0.8, "seed": 3, "max_tokens": TOKENS},
    {"temperature": 0.8, "seed": 4, "max_tokens": TOKENS},
]
PROMPTS = [random_prompt(WINDOWED, 0), random_prompt(9, 1), random_prompt(20, 2)]


def digests(session: TargetSession) -> list[int]:
    """A number for each array in a session's caches, the same for the same bits."""
    leaves = tree_flatten([cache.state for cache in session._cache])
    arrays = [np.array(leaf) for _, leaf in leaves if isinstance(leaf, mx.array)]
    return [zlib.crc32(array.tobytes()) & 0x7FFFFFFF for array in arrays]


def play(family: str, cluster: Cluster, model: Any) -> None:
    """All of a family, as any rank."""
    of = Letters(), CONFIGS[family], family
    try:
        cluster.shard(family, model)
    except SettingsError as error:
        if cluster.rank == 0:
            print(json.dumps({"family": family, "refused": str(error)}), flush=True)
        return
    mx.eval(model.parameters())
    target = cluster.open(model, *of)
    if cluster.rank:
        sessions = cluster.work(target).sessions
        report({}, cluster, list(sessions.values())[-1])
        return
    requests = list(zip(PROMPTS, SETTINGS, strict=True))
    crowd = Crowd(target_of(random_model(family), family), requests)
    found: dict[str, Any] = {"family": family, "ranks": cluster.size, "texts": {}}
    conversation = None
    for at, shape in enumerate(("chain", "tree") if target.supports_trees else ("chain",)):
        drafter = drafter_of(crowd, shape)
        alone = list(zip(crowd.requests, crowd.alone, strict=True))
        for (prompt, settings), text in alone[:2] if at == 0 else alone[1:2]:
            conversation = dm.Conversation(target, drafter)
            before = cluster.leader.messages
            result = dm.generate(target, drafter, prompt, conversation=conversation, **settings)
            name = f"{shape} at {settings['temperature']}"
            found["texts"][name] = result.tokens == text
            found[name] = {
                "rounds": result.stats.rounds,
                "messages": cluster.leader.messages - before,
            }
        found["texts"][f"{shape}, three"] = together(target, crowd, drafter)
    assert conversation is not None
    cluster.close()
    report(found, cluster, conversation.target)


def drafter_of(crowd: Crowd, shape: str) -> Knowing:
    drafter = crowd.knowing(0.8, (0, crowd.target.num_layers - 1))
    drafter.branches = shape == "tree"
    return drafter


def together(target: dm.Target, crowd: Crowd, drafter: Knowing) -> bool:
    """Three requests that join one after the other, and a fourth that is cancelled on its way."""
    played = Played(target, drafter, Flat(target, None))
    jobs = []
    for prompt, settings in crowd.requests:
        jobs.append(played.submit(prompt, block_size=6, **settings))
        played.seats.step()
        if len(jobs) == 2:
            gone = played.submit(crowd.requests[0][0], block_size=2, **crowd.requests[0][1])
            played.seats.step()
            gone.cancelled = True
    played.run()
    cut = gone.result()
    whole = [job.result().tokens for job in jobs] == crowd.alone
    return (
        whole
        and cut.finish_reason == "cancelled"
        and crowd.alone[0][: len(cut.tokens)] == (cut.tokens)
    )


def report(found: dict[str, Any], cluster: Cluster, session: TargetSession) -> None:
    """Rank 0 prints what was found, and which arrays of the caches are whose, by their bits."""
    each = [cluster.meet(number) for number in digests(session)]
    found["caches"] = each
    if cluster.rank == 0:
        print(json.dumps(found), flush=True)


def main(families: list[str]) -> None:
    for family in families:
        cluster = Cluster()
        play(family, cluster, random_model(family))


if __name__ == "__main__":
    main(sys.argv[1:])

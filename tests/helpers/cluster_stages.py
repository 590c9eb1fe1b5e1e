"""A rank of a pipeline whose rank 0 has attention alone, and the other one a recurrence alone.

    MLX_RANK=0 MLX_HOSTFILE=ring.json python cluster_rank.py stages

So what one of them can do with its caches, the other one cannot. Rank 0 prints a JSON object for
each thing that goes back in a text.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
from clusters import STALL
from families import CONFIGS, Letters, random_model, random_prompt

import dflash_mlx as dm
from dflash_mlx.cluster.cluster import Cluster
from dflash_mlx.cluster.target import LeaderPrefixCache
from dflash_mlx.drafter.lookup import LookupDrafter
from dflash_mlx.targets import Target

FAMILY = "qwen3_next"
OF = Letters(), CONFIGS[FAMILY], FAMILY
CHUNK, ANSWER = 16, 6
PROMPT = random_prompt(80, 0)  # more than the last forward of a prefill reads
PROMPTS = [PROMPT, [*PROMPT, *random_prompt(5, 1)], PROMPT[:70] + random_prompt(9, 2)]


def model() -> Any:
    return random_model(FAMILY, num_hidden_layers=2, full_attention_interval=2)


def texts(target: Target, store: type[dm.PrefixStore], **settings: Any) -> dict[str, list[Any]]:
    """Turns of a chat that goes on and goes back, and requests that begin alike."""
    drafter = LookupDrafter()
    conversation = dm.Conversation(target, drafter)
    turns = [
        dm.generate(target, drafter, prompt, conversation=conversation, max_tokens=ANSWER)
        for prompt in PROMPTS
    ]
    prefix = store(target, None, memory=2**26, chunk=CHUNK)
    found = [
        dm.generate(target, None, prompt, prefix=prefix, max_tokens=ANSWER) for prompt in PROMPTS
    ]
    return {
        "turns": [one.tokens for one in turns],
        "begun": [one.tokens for one in found],
        "reused": [one.stats.reused_tokens for one in [*turns, *found]],
        "can be cut": [target.start().can_trim],
    }


def main(_: list[str]) -> None:
    cluster, stage = Cluster(STALL, pipeline=True), model()
    cluster.shard(FAMILY, stage)
    mx.eval(stage.parameters())
    target = cluster.open(stage, *OF)
    if cluster.rank:
        cluster.work(target)
        return
    spread, own = texts(target, LeaderPrefixCache), texts(Target(model(), *OF), dm.PrefixStore)
    for name, one in own.items():
        print(json.dumps({"what": name, "own": one, "spread": spread[name]}), flush=True)
    cluster.close()

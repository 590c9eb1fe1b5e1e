"""Random crowds of every kind of drafter, with prefixes of every length and raising callbacks.

    python tests/engine/test_random_crowds.py 100000

plays crowds until they have so many tokens, and prints what came of them.
"""

import gc
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, cycle
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = map(str, (root / "helpers", *(each for each in root.iterdir() if each.is_dir())))

import mlx.core as mx
import pytest
import test_gemma4_assistant
import test_lilicorr
import test_mtp
from crowd import Played
from families import dspark_for, eagle3_for, random_model, target_of
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.lookup import CombinedDrafter, LookupDrafter
from dflash_mlx.engine.allocation import RowAllocator
from dflash_mlx.engine.batch import SharedBatch
from dflash_mlx.engine.job import Job


class Trouble(Exception):
    """Of a callback; it is falsy, and equal to every other."""

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


TROUBLES = (Trouble, ValueError, KeyError, StopIteration, KeyboardInterrupt)
LONGEST = 40  # tokens of a prompt


@dataclass
class Tally:
    """What came of random crowds."""

    jobs: int = 0
    tokens: int = 0
    wrong: int = 0
    hanging: int = 0
    raised: int = 0
    preempted: int = 0
    kept_bytes: int = 0  # the most in use after a crowd, beyond those before


@dataclass
class _Member:
    """A job of a random crowd, its text alone, and whether a callback of it raises."""

    job: Job
    text: list[int]
    raises: type[BaseException] | None


def play(target: dm.Target, drafter: Any, seed: int, jobs: int, tally: Tally) -> None:
    """Play a crowd of random requests over prompts that begin alike, through a small prefix store.

    Args:
        target, drafter: the pair.
        seed: of everything random.
        jobs: how many.
        tally: counts what comes of them.
    """
    case = random.Random(seed)
    base = [case.randrange(2, target.vocab_size) for _ in range(LONGEST)]
    requests = [_random_request(target, case, base) for _ in range(jobs)]
    dm.generate(target, drafter, base, max_tokens=3)  # makes what a pair makes once
    before = _bytes_in_use()
    store = dm.PrefixStore(
        target,
        drafter,
        memory=case.choice((1, 2, 3, 64)) * target.cache_bytes(256) + 2**16,
        chunk=case.choice((1, 2, 3, 8, 16, 256)),
        stride=case.choice((4, 16, 4096)),
    )
    policy = None if drafter is None else case.choice((None, dm.DraftPolicy.of(target, drafter)))
    allocator = None if policy is None else RowAllocator(policy)
    options = {"prefix": store, "most_jobs": case.choice((1, 3, 8))}
    played = Played(target, drafter, SharedBatch(target, allocator), **options)
    members: list[_Member] = []
    for _ in range(jobs * 4 * LONGEST):  # many more steps than the texts need, one at a time
        if len(members) < jobs and case.random() < 0.5:
            prompt, settings, text, error = requests[len(members)]
            job = played.submit(prompt, **settings, policy=policy, prefix=store)
            members.append(_Member(job, text, error))
        if played.scheduler._running and case.random() < 0.05:
            played.scheduler.preempt()
            tally.preempted += 1
        if members and case.random() < 0.01:
            case.choice(members).job.cancelled = True
        played.scheduler.step()
        if len(members) == jobs and not played.scheduler.busy:
            break
    for member in members:
        _count(member, tally)
    del played, store, policy, allocator, options  # but not the jobs
    tally.kept_bytes = max(tally.kept_bytes, _bytes_in_use() - before)


def _random_request(
    target: dm.Target, case: random.Random, base: list[int]
) -> tuple[list[int], dict[str, Any], list[int], type[BaseException] | None]:
    """A prompt, its settings, its text alone, and the error that a callback of it raises."""
    prompt = base[: case.randint(1, LONGEST)]
    prompt += [case.randrange(2, target.vocab_size) for _ in range(case.choice((0, 0, 1, 5)))]
    settings: dict[str, Any] = {"max_tokens": case.randint(1, 24)}
    if case.random() < 0.5:
        settings |= {"temperature": 0.8, "seed": case.randrange(99)}
    text = dm.generate(target, None, prompt, **settings).tokens
    if case.random() > 0.25:
        return prompt, settings, text, None
    error, end = case.choice(TROUBLES), len(prompt) + case.randrange(len(text))

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) >= end:
            raise error("a callback")
        return logits

    settings["logits_processors"] = lambda: [processor]
    return prompt, settings, text, error


def _count(member: _Member, tally: Tally) -> None:
    job, found = member.job, member.job._tokens
    tally.jobs, tally.tokens = tally.jobs + 1, tally.tokens + len(found)
    if not job.done:
        tally.hanging += 1
    elif job._error is not None:
        tally.raised += 1
        cause = job._error.__cause__ or job._error
        tally.wrong += member.raises is not type(cause) or found != member.text[: len(found)]
    else:
        whole = found if job._finish_reason == "cancelled" else member.text
        tally.wrong += found != member.text[: len(whole)]
        tally.wrong += member.raises is not None and job._finish_reason != "cancelled"


def _bytes_in_use() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def lilicorr() -> tuple[dm.Target, Any]:
    return target(), test_lilicorr.drafter_for(target())[1]


def pair_of(family: str, drafter_for: Callable[[dm.Target], Any]) -> tuple[dm.Target, Any]:
    found = target_of(random_model(family), family)
    return found, drafter_for(found)


PAIRS: dict[str, Callable[[], tuple[dm.Target, Any]]] = {
    "none": lambda: (target(), None),
    "lookup": lambda: (target("gpt_oss"), LookupDrafter()),
    "DFlash": lambda: (target(), random_drafter()),
    "DFlash of windows": lambda: (target("sliding llama"), random_drafter()),
    "DFlash and lookup": lambda: (target("qwen3_moe"), CombinedDrafter(random_drafter())),
    "LiliCorr": lilicorr,
    "MTP": lambda: test_mtp.pair("mimo"),
    "DSpark": lambda: pair_of("qwen3", dspark_for),
    "EAGLE-3": lambda: pair_of("qwen3", eagle3_for),
    "EAGLE-3 of a hybrid": lambda: pair_of("qwen3_5", eagle3_for),
    "assistant": lambda: test_gemma4_assistant.pair("gemma4_dense"),
    "draft model": lambda: (target(), DraftModel(target("llama"))),
}
pair = cache(lambda kind: PAIRS[kind]())


def right(tally: Tally) -> bool:
    constants = 2**14  # bytes that a model makes once; a request's caches are many more
    return tally.wrong == tally.hanging == 0 and tally.kept_bytes < constants


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2))])
def test_every_text_is_the_plain_one_or_ends_with_its_own_error(kind, seed):
    tally = Tally()
    play(*pair(kind), seed, 12, tally)
    play(*pair(kind), seed + 100, 12, tally)
    assert right(tally) and tally.jobs == 24 and tally.raised, tally


@pytest.mark.parametrize("kind", ["MTP", "EAGLE-3 of a hybrid"])
@pytest.mark.parametrize("chunk", [1, 2, 8, 256])
def test_a_prompt_of_each_length_beside_a_prefix_store(kind, chunk):
    """With windows and heads, a checkpoint stands 16 tokens before a prompt's end: behind 1 of 17.

    Each twice: the second time it begins behind what the first one has stored.
    """
    model, drafter = pair(kind)
    store = dm.PrefixStore(model, drafter, memory=2**28, chunk=chunk)
    for length in (1, 2, 3, 15, 16, 17, 18, 19, 20, 33, 40):
        prompt = [(7 * at + length) % 97 + 2 for at in range(length)]
        plain = dm.generate(model, None, prompt, max_tokens=5).tokens
        for _ in range(2):
            assert dm.generate(model, drafter, prompt, max_tokens=5, prefix=store).tokens == plain


def main(tokens: int) -> Iterator[str]:
    tally = Tally()
    for seed, kind in zip(count(), cycle(PAIRS), strict=False):
        play(*pair(kind), seed, 30, tally)
        yield f"{kind}, seed {seed}: {tally}"
        if tally.tokens >= tokens or not right(tally):
            break


if __name__ == "__main__":
    for line in main(int(sys.argv[1])):
        print(line, flush=True)

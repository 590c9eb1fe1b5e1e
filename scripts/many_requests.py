"""What many requests at once bring: plain, drafted and shared-out rounds, and one after another.

    python scripts/many_requests.py [--model NAME] [--requests N,N,...] [--tokens N] [--repeats N]
                                    [--limit N] [--again 1] [--stock-blas]

For each number of requests: tokens per second of all together, decoding plainly, drafting whole
blocks and with rows shared out by a policy, and of the same requests drafted one at a time. All of
them read their prompts first, the second time out of a store; only rounds are timed, by the CPU
time of the process, and only while all requests are there. The four go on by 16 tokens of each
request in turn, for a machine's pace changes, and the medians of some laps are compared. Every text
is compared with what plain decoding makes of it alone. The policy is the server's: its costs are
those that are kept, measured now where there are none or with `--again 1`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from experiment import TURN, experiment, options_of

import dflash_mlx as dm

REQUESTS = "1,2,4,8,16,32"
CHUNK = 16  # tokens of a prompt that are stored together,
MEMORY = 4 << 30  # and bytes for them
WAYS = ("plain", "drafted", "policy", "one at a time")


@dataclass
class Lap:
    """Rounds of one way, at one number of requests."""

    tokens: int = 0
    seconds: float = 0.0
    requests: int = 0  # their rounds, of each request one
    right: bool = True  # whether every text is the one alone

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


Asked = Sequence[tuple[list[int], list[int]]]  # prompts, and their texts alone
Way = Callable[[Asked, Lap], Iterator[None]]  # a lap, in turns


def lap(
    target: dm.Target,
    drafter: Any,
    together: Any,
    asked: Asked,
    settings: dict[str, Any],
    done: Lap,
) -> Iterator[None]:
    """The rounds of these prompts, for as long as none of their texts has ended, in turns."""
    from dflash_mlx.generation import GenerationSettings, start_request
    from dflash_mlx.loop import play_round

    requests, texts = [], []
    for prompt, _ in asked:
        request = start_request(target, drafter, prompt, GenerationSettings(**settings))
        request.resume()
        first = [event for event in request.read() if event is not None]
        requests.append(request)
        texts.append([token for event in first for token in event.tokens])
    yield
    while not any(request.finished for request in requests):
        end, clock = done.tokens + TURN * len(requests), time.process_time()
        while done.tokens < end and not any(request.finished for request in requests):
            turns = play_round(requests, together)
            for turn, text in zip(turns, texts, strict=True):
                if turn.error is not None:
                    raise turn.error
                assert turn.event is not None
                text += turn.event.tokens
                done.tokens += len(turn.event.tokens)
            done.requests += len(requests)
        done.seconds += time.process_time() - clock
        yield
    same = (text == truth[: len(text)] for text, (_, truth) in zip(texts, asked, strict=True))
    done.right = done.right and all(same)


def laps(ways: dict[str, Way], asked: Asked, repeats: int) -> dict[str, list[Lap]]:
    """So many laps of each way, in turns; the first of each warms up."""
    found: dict[str, list[Lap]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        done = {way: Lap() for way in ways}
        for _ in zip_longest(*(run(asked, done[way]) for way, run in ways.items())):
            pass
        for way, each in done.items():
            if repeat:
                found[way].append(each)
    return found


def main() -> None:
    options = options_of(__doc__ or "", limit=8, tokens=96, repeats=5, requests=REQUESTS, again=0)
    target, drafter, prompts = experiment(options)
    from dflash_mlx.engine.costs import SharedCosts
    from dflash_mlx.engine.rows import SharedRounds
    from dflash_mlx.engine.together import Flat

    counts = [int(count) for count in options.requests.split(",")]
    never_ending = dict.fromkeys(target.tokenizer.eos_token_ids, -1e4)
    settings: dict[str, Any] = {"max_tokens": options.tokens, "logit_bias": never_ending}
    plain = dm.PrefixStore(target, None, memory=MEMORY, chunk=CHUNK)
    drafted = {"prefix": dm.PrefixStore(target, drafter, memory=MEMORY, chunk=CHUNK)} | settings
    settings["prefix"] = plain
    prompts = prompts[: max(counts)]
    truths = [(each, dm.generate(target, None, each, **settings).tokens) for each in prompts]
    asked = truths * -(-max(counts) // len(truths))
    policy = dm.Policy.of(target, drafter, again=bool(options.again))
    known = policy.costs, policy.widest, None, bool(options.again)
    shared = Flat(target, SharedRounds(SharedCosts.of(target, drafter, *known)))
    flat = Flat(target, None)

    def one_at_a_time(of: Asked, done: Lap) -> Iterator[None]:
        for one in of:
            yield from lap(target, drafter, flat, [one], drafted, done)

    by_policy = {**drafted, "policy": policy}
    ways: dict[str, Way] = {
        "plain": lambda of, done: lap(target, None, flat, of, settings, done),
        "drafted": lambda of, done: lap(target, drafter, flat, of, drafted, done),
        "policy": lambda of, done: lap(target, drafter, shared, of, by_policy, done),
        "one at a time": one_at_a_time,
    }
    print(
        f"{target.name}, {options.tokens} tokens each; tokens per second of CPU time, all together"
    )
    print("                tokens per second of all            tokens a round")
    print("requests    plain  drafted   policy  one at a time   drafted   policy   same texts")
    for count in counts:
        found = laps(ways, asked[:count], options.repeats)
        speeds = [median(each.speed for each in found[way]) for way in WAYS]
        brought = [
            sum(each.tokens for each in found[way]) / sum(each.requests for each in found[way])
            for way in ("drafted", "policy")
        ]
        right = all(each.right for of_way in found.values() for each in of_way)
        print(
            f"{count:8} {speeds[0]:8.0f} {speeds[1]:8.0f} {speeds[2]:8.0f} {speeds[3]:14.0f} "
            f"{brought[0]:9.2f} {brought[1]:8.2f} {'yes' if right else 'NO':>12}"
        )
        pairs = [("drafted", "plain"), ("policy", "plain"), ("drafted", "one at a time")]
        ratios = ", ".join(f"{a} / {b} {_ratio(found, a, b):.2f}" for a, b in pairs)
        print(f"         {ratios}", flush=True)


def _ratio(found: dict[str, list[Lap]], way: str, other: str) -> float:
    """The median of what laps that follow each other compare to."""
    pairs = zip(found[way], found[other], strict=True)
    return median(a.speed / b.speed for a, b in pairs)


if __name__ == "__main__":
    main()

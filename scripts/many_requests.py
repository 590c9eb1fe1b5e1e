"""Compare many requests in our engine with mlx-lm's BatchGenerator: same model, prompts and core.

    python scripts/many_requests.py --requests 1,8,32 --repeats 3
    python scripts/many_requests.py --model smollm2 --draft lookup --requests 8 --repeats 1
    python scripts/many_requests.py --logit-bias 1    each request with a bias
    python scripts/many_requests.py --counts 9        launches per step, not speed

All methods take turns in one process on one core, from the first request to the last token. Prints
tokens per CPU second over BatchGenerator's and the policy's over the better of plain and full
blocks (medians of the turns), and how many texts equal those that plain decoding gives each
request alone.

`--counts` builds a model of Qwen3-8B's layers and heads with tiny widths, and counts what a plain
step launches (primitives other than views).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from experiment import VIEWS, embedded_ids, graph_nodes, in_turns, numbers, options_of

import dflash_mlx as dm
from dflash_mlx.loading.registry import known_drafter

Texts = list[list[int]]
BIAS = {5: -1.0, 7: 0.5}  # by token id, with --logit-bias 1
BASELINE = "mlx-lm"
# The layers and heads of Qwen3-8B, with tiny widths.
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "vocab_size": 1024}
CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "target_configs.json"


def main() -> None:
    """Measure and print."""
    options = options_of(
        __doc__,
        model="tiny",
        draft=None,  # the pair's own network, without lookup
        stock_blas=False,
        requests="1,8,32",
        repeats=3,
        max_tokens=64,
        logit_bias=0,
        counts=0,
    )
    time.perf_counter = time.process_time  # the policy's clock, before its modules are imported
    dm.use_fast_blas(stock=options.stock_blas)
    if options.counts:
        print_counts(options.counts)
        return
    target, drafter = dm.load(options.model, options.draft or known_drafter(options.model))
    counts = numbers(options.requests)
    prompts = embedded_ids(target)[: max(counts)]
    settings: dict[str, Any] = {"max_tokens": options.max_tokens}
    settings["logit_bias"] = BIAS if options.logit_bias else None
    alone = [dm.generate(target, None, prompt, **settings).tokens for prompt in prompts]
    policy = dm.DraftPolicy.of(target, drafter)
    engines = {
        "plain": dm.Engine(target, None),
        "policy": dm.Engine(target, drafter, policy=policy),
        "blocks": dm.Engine(target, drafter),
    }
    methods: dict[str, Callable[..., Texts]] = {BASELINE: partial(batch_generator, target)}
    methods |= {name: partial(engine_texts, engine) for name, engine in engines.items()}
    names = "".join(f"{name:>8}" for name in engines)
    print(f"{'requests':>8}  {BASELINE} tok/s{names}  policy/better", end="")
    print("   texts as alone: " + " / ".join(methods))
    for count in counts:
        asked = {
            name: partial(timed, method, prompts[:count], settings)
            for name, method in methods.items()
        }
        runs = in_turns(asked, 1 + options.repeats)
        print(_line(count, runs, alone), flush=True)
    for engine in engines.values():
        engine.close()


def timed(
    method: Callable[..., Texts], prompts: Sequence[list[int]], settings: dict[str, Any]
) -> tuple[float, Texts]:
    """Tokens per CPU second of all requests together, and their texts."""
    clock = time.process_time()
    texts = method(prompts, **settings)
    return sum(map(len, texts)) / (time.process_time() - clock), texts


def engine_texts(engine: dm.Engine, prompts: Sequence[list[int]], **settings: Any) -> Texts:
    """The texts of our engine, which gets all requests at once."""
    jobs = [engine.submit(prompt, **settings) for prompt in prompts]
    return [job.result().tokens for job in jobs]


def batch_generator(
    target: dm.Target,
    prompts: Sequence[list[int]],
    max_tokens: int,
    logit_bias: dict[int, float] | None,
) -> Texts:
    """The texts of mlx-lm's BatchGenerator, which gets all requests at once."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_logits_processors

    ends = target.tokenizer.eos_token_ids
    generator = BatchGenerator(
        target.model, max_tokens=max_tokens, stop_tokens=[[end] for end in ends]
    )
    processors = [make_logits_processors(logit_bias) for _ in prompts]
    texts: dict[int, list[int]] = {
        number: [] for number in generator.insert(list(prompts), logits_processors=processors)
    }
    left = len(texts)
    while left:
        for response in generator.next_generated():
            if response.finish_reason != "stop":
                texts[response.uid].append(response.token)
            left -= response.finish_reason is not None
    generator.close()
    return list(texts.values())


def _line(count: int, timings: dict[str, list[tuple[float, Texts]]], alone: Texts) -> str:
    """A row of the table: medians of all turns but the first, which warms up.

    Args:
        count: of requests.
        timings: the results of `timed`, turn by turn, of each method.
        alone: what plain decoding writes for each request by itself.
    """
    speeds = {name: [speed for speed, _ in runs[1:]] for name, runs in timings.items()}
    baseline = speeds.pop(BASELINE)
    better = max(speeds["plain"], speeds["blocks"], key=median)
    pairs = [(ours, baseline) for ours in speeds.values()] + [(speeds["policy"], better)]
    ratios = "".join(f"{_median_ratio(*pair):8.2f}" for pair in pairs)
    equal_texts = []
    for runs in timings.values():
        _, texts = runs[-1]
        equal = sum(text == plain for text, plain in zip(texts, alone, strict=False))
        equal_texts.append(f"{equal} of {count}")
    return f"{count:8}  {median(baseline):12,.0f}{ratios}   {' / '.join(equal_texts)}"


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the turns of our speed divided by theirs."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


# Counts


def print_counts(steps: int) -> None:
    """Print what a plain step of 8 and 32 requests launches, mlx-lm's and ours."""
    print("requests   launches a step: mlx-lm, ours")
    for count in (8, 32):
        theirs, ours = counts_of(random_target(), count, steps)
        print(f"{count:8}{theirs:25,.0f}{ours:7,.0f}")


def counts_of(target: dm.Target, count: int, steps: int) -> list[float]:
    """Launches of a plain step of `count` requests: mlx-lm's, and ours. Means of `steps` steps."""
    from mlx_lm.generate import BatchGenerator

    from dflash_mlx.engine.shared_batch import BatchItem, SharedBatch
    from dflash_mlx.generation import GenerationSettings, make_request

    # Of different tokens and lengths.
    prompts = [
        [1 + (7 * index + row) % 1000 for row in range(20 + index)] for index in range(count)
    ]
    generator = BatchGenerator(target.model, max_tokens=1000, prefill_batch_size=count)
    generator.insert([*prompts])
    while len(generator._generation_batch) < count:
        generator.next()
    settings = GenerationSettings(max_tokens=1000)
    requests = [
        make_request(target, drafter=None, prompt=prompt, settings=settings) for prompt in prompts
    ]
    for request in requests:
        request.resume()
        request.prefill()
        request.finish_prompt()
    batch = SharedBatch(target, None)
    counts = []
    for step in (generator.next, lambda: batch.step([BatchItem(member) for member in requests])):
        for _ in range(3):  # a pipeline has begun, and no request enters or leaves
            step()
        with evaluated() as primitives:
            for _ in range(steps):
                step()
        launches = sum(number for name, number in primitives.items() if name not in VIEWS)
        counts.append(launches / steps)
    return counts


def random_target(**changes: Any) -> dm.Target:
    """A target of the layers and heads of Qwen3-8B, with tiny widths and random weights.

    `changes` replace fields of its config.
    """
    from mlx_lm.models.qwen3 import Model, ModelArgs

    from dflash_mlx.loading.load import load_target

    config = json.loads(CONFIGS.read_text())["Qwen3-8B"] | SHAPE | changes
    tokenizer = load_target("tiny").tokenizer
    return dm.Target(
        Model(ModelArgs.from_dict(config)),
        tokenizer=tokenizer,
        config=config,
        name="of Qwen3-8B's shape",
    )


@contextmanager
def evaluated() -> Iterator[Counter[str]]:
    """Counts, by name, what `mx.eval` and `mx.async_eval` run inside the `with` block."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    originals = (mx.eval, mx.async_eval)
    names = Counter[str]()

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def evaluate(*values: Any) -> None:
            arrays = [x for _, x in tree_flatten(values) if isinstance(x, mx.array)]
            names.update(graph_nodes(*arrays))
            call(*values)

        return evaluate

    mx.eval = counted(mx.eval)
    mx.async_eval = counted(mx.async_eval)
    try:
        yield names
    finally:
        mx.eval, mx.async_eval = originals


if __name__ == "__main__":
    main()

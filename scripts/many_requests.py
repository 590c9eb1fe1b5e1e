"""Compare many requests in our engine with mlx-lm's BatchGenerator: same model, prompts and core.

    python scripts/many_requests.py --requests 1,8,32 --repeats 3
    python scripts/many_requests.py --model smollm2 --draft lookup --requests 8 --repeats 1
    python scripts/many_requests.py --logit-bias 1    each request with a bias
    python scripts/many_requests.py --counts 9        launches per step, not speed

All methods take turns in one process on one core, from the first request to the last token. Prints
tokens per second over BatchGenerator's (medians of the turns), and how many texts equal those that
plain decoding gives each request alone. `--counts` builds a model of Qwen3-8B's layers and heads
with tiny widths, and counts what a plain step launches (primitives other than views).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from experiment import VIEWS, graph_nodes, options_of

import dflash_mlx as dm

Texts = list[list[int]]
Bias = dict[int, float] | None
BIAS = {5: -1.0, 7: 0.5}  # with --logit-bias 1
BASELINE = "mlx-lm"
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def main() -> None:
    """Measure and print."""
    doc = __doc__ or ""
    options = options_of(
        doc, requests="1,8,32", repeats=3, max_tokens=64, counts=0, core=-1, logit_bias=0
    )
    bias = BIAS if options.logit_bias else None
    if options.core >= 0:
        os.sched_setaffinity(0, {options.core})
    dm.use_fast_blas(stock=options.stock_blas)
    if options.counts:
        print_counts(options.counts)
        return
    target, drafter = dm.load(options.model, options.draft)
    counts = [int(count) for count in options.requests.split(",")]
    prompts = token_prompts(target, max(counts))
    alone = [
        dm.generate(target, None, prompt, max_tokens=options.max_tokens, logit_bias=bias).tokens
        for prompt in prompts
    ]
    policy = dm.DraftPolicy.of(target, drafter)
    engines = {
        "plain": dm.Engine(target, None),
        "policy": dm.Engine(target, drafter, policy=policy),
        "blocks": dm.Engine(target, drafter),
    }
    methods: dict[str, Callable[[Sequence[list[int]]], Texts]] = {
        BASELINE: lambda asked: batch_generator(target, asked, options.max_tokens, bias)
    }
    for name, engine in engines.items():
        methods[name] = lambda asked, engine=engine: engine_texts(
            engine, asked, options.max_tokens, bias
        )
    print(f"{'requests':>8}  {BASELINE} tok/s" + "".join(f"{name:>8}" for name in engines), end="")
    print("   texts as alone: " + " / ".join(methods))
    for count in counts:
        print(_line(count, methods, prompts[:count], alone, options.repeats), flush=True)
    for engine in engines.values():
        engine.close()


def token_prompts(target: dm.Target, count: int) -> list[list[int]]:
    """So many different prompts of the embedded set, as token ids."""
    from dflash_mlx.bench.datasets import embedded_prompts
    from dflash_mlx.prompt import encode_prompt

    questions = [list(prompt.messages) for prompt in embedded_prompts()[:count]]
    return [encode_prompt(target, question) for question in questions]


def engine_texts(
    engine: dm.Engine, prompts: Sequence[list[int]], max_tokens: int, bias: Bias
) -> Texts:
    """The texts of our engine."""
    jobs = [engine.submit(prompt, max_tokens=max_tokens, logit_bias=bias) for prompt in prompts]
    return [job.result().tokens for job in jobs]


def batch_generator(
    target: dm.Target, prompts: Sequence[list[int]], max_tokens: int, bias: Bias
) -> Texts:
    """The texts of mlx-lm's batching."""
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_logits_processors

    ends = target.tokenizer.eos_token_ids
    generator = BatchGenerator(
        target.model, max_tokens=max_tokens, stop_tokens=[[end] for end in ends]
    )
    processors = [make_logits_processors(bias) for _ in prompts]
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


def _line(
    count: int,
    methods: dict[str, Callable[[Sequence[list[int]]], Texts]],
    prompts: Sequence[list[int]],
    alone: Texts,
    repeats: int,
) -> str:
    """Time all methods in turns; the first turn warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    right = {}
    for turn in range(1 + repeats):
        for name in methods if turn % 2 else reversed(methods):
            clock = time.perf_counter()
            texts = methods[name](prompts)
            speeds[name].append(sum(map(len, texts)) / (time.perf_counter() - clock))
            right[name] = sum(a == b for a, b in zip(texts, alone, strict=False))
    over = {
        name: median(a / b for a, b in zip(each[1:], speeds[BASELINE][1:], strict=True))
        for name, each in speeds.items()
    }
    ratios = "".join(f"{over[name]:8.2f}" for name in methods if name != BASELINE)
    same = " / ".join(f"{right[name]} of {count}" for name in methods)
    return f"{count:8}  {median(speeds[BASELINE][1:]):12,.0f}{ratios}   {same}"


# Counts


def print_counts(steps: int) -> None:
    """Print what a plain step of 8 and 32 requests costs, ours and mlx-lm's."""
    print("requests   launches a step: mlx-lm, ours    ms a step: mlx-lm, ours")
    for count in (8, 32):
        theirs, ours = counts_of(random_target(), count, steps)
        print(f"{count:8}{theirs[0]:25,.0f}{ours[0]:7,.0f}{theirs[1]:25.2f}{ours[1]:7.2f}")


def counts_of(target: dm.Target, count: int, steps: int) -> list[tuple[float, float]]:
    """Launches and milliseconds of a plain step of `count` requests: mlx-lm's, ours."""
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator

    from dflash_mlx.engine.batch import BatchItem, SharedBatch
    from dflash_mlx.generation import GenerationSettings, make_request

    prompts = [[1 + (7 * at + row) % 1000 for row in range(20 + at)] for at in range(count)]
    generator = BatchGenerator(target.model, max_tokens=1000, prefill_batch_size=count)
    generator.insert([*prompts])
    while len(generator._generation_batch) < count:
        generator.next()
    settings = GenerationSettings(max_tokens=1000)
    requests = [make_request(target, None, prompt, settings) for prompt in prompts]
    for request in requests:
        request.resume()
        for _ in request.prefill():
            pass
    batch = SharedBatch(target, None)
    found = []
    for take in (generator.next, lambda: batch.step([BatchItem(one) for one in requests])):
        for _ in range(3):  # a pipeline has begun, and no request enters or leaves
            take()
        mx.synchronize()
        with evaluated() as names:
            for _ in range(steps):
                take()
        clock = time.perf_counter()
        for _ in range(steps):
            take()
        launches = sum(count for name, count in names.items() if name not in VIEWS)
        found.append((launches / steps, 1e3 * (time.perf_counter() - clock) / steps))
    return found


def random_target(**changes: Any) -> dm.Target:
    """A target of the layers and heads of Qwen3-8B, with tiny widths and random weights."""
    from mlx_lm.models.qwen3 import Model, ModelArgs

    from dflash_mlx.loading.load import load_target

    config = QWEN3_8B | changes
    tokenizer = load_target("tiny").tokenizer
    return dm.Target(Model(ModelArgs.from_dict(config)), tokenizer, config, "of Qwen3-8B's shape")


@contextmanager
def evaluated() -> Iterator[Counter[str]]:
    """Counts the primitives that every `mx.eval` and `mx.async_eval` inside has to run."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    own, names = (mx.eval, mx.async_eval), Counter[str]()

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def evaluate(*values: Any) -> None:
            arrays = [x for _, x in tree_flatten(values) if isinstance(x, mx.array)]
            names.update(graph_nodes(*arrays))
            call(*values)

        return evaluate

    mx.eval, mx.async_eval = counted(mx.eval), counted(mx.async_eval)
    try:
        yield names
    finally:
        mx.eval, mx.async_eval = own


if __name__ == "__main__":
    main()

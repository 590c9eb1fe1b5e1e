"""Speed on one CPU core: this checkout, another one and mlx-lm, in processes that take turns.

    python scripts/cpu_speed.py --against ../before            an hour
    python scripts/cpu_speed.py --against ../before --quick    ten minutes
    python scripts/cpu_speed.py --data FOLDER                  a suite is a JSONL file
    python scripts/cpu_speed.py --methods plain,shipped,2,4,8,16    the policy beside fixed lengths

Prints, per class of prompts and model: tokens per second of plain decoding, and what others reach
of it; the cost of 1, 4, 8 and 16 rows; whether the logits of drafted rows equal those of plain
decoding to the bit; and many requests over mlx-lm's BatchGenerator. Times are CPU seconds of the
process, so other programs disturb them little. A method is mlx-lm, plain, shipped (with the draft
policy, which keeps what it learns from prompt to prompt), blocks, or a number of rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from experiment import ROOT, Worker, embedded_ids, mlx_lm_tokens, options_of

MLX_LM = "mlx-lm"
PLAIN = "plain"
SHIPPED = "shipped"
BLOCKS = "blocks"
# The question of a row of a suite is in the first of these fields that it has.
COLUMNS = ("question", "prompt", "problem", "text", "turns")
ROWS = (1, 4, 8, 16)  # of the steps whose cost is measured


def main() -> None:
    """Print everything; or answer the questions of another process."""
    options = options_of(
        __doc__,
        against="",  # another checkout
        data="",  # a folder of suites, a JSONL file each
        models="tiny,smollm2",
        methods=f"{MLX_LM},{PLAIN},{SHIPPED},{BLOCKS}",
        stock_blas=False,
        limit=2,  # prompts of a class
        max_tokens=96,
        bits=20_000,  # drafted tokens whose logits are compared; 0: measure nothing but decoding
        requests="1,2,4,8,16,32,64",
        quick=False,
        worker="",
    )
    if options.worker:
        answer(options.worker, options.stock_blas)
        return
    if options.quick:
        options.limit = 1
        options.max_tokens = 48
        options.bits = 400
        options.requests = "1,8,32"
    for model in options.models.split(","):
        workers = {"": Worker(model, ROOT)}
        if options.against:
            workers["before: "] = Worker(model, Path(options.against))
        print(f"\n{model}, {workers[''].ask(about=True)['blas']}", flush=True)
        methods = options.methods.split(",")
        compare(
            workers,
            methods=methods,
            classes=prompts_of(options.data),
            limit=options.limit,
            max_tokens=options.max_tokens,
        )
        if options.bits:
            costs = zip(ROWS, workers[""].ask(rows=ROWS)["costs"], strict=True)
            print("a step of " + ", ".join(f"{rows} rows: {cost:.2f}" for rows, cost in costs))
            tokens, different = workers[""].ask(bits=options.bits)["bits"]
            print(f"drafted tokens with other logits than plain's: {different} of {tokens:,}")
        for worker in workers.values():
            worker.process.kill()
        for bias in (0, 1) if options.bits else ():
            print("\nMany requests" + ", each with a logit bias" * bias, flush=True)
            settings = {"model": model, "logit-bias": bias, "requests": options.requests}
            settings |= {"repeats": options.limit, "max-tokens": options.max_tokens}
            arguments = [f"--{name}={value}" for name, value in settings.items()]
            subprocess.run([sys.executable, ROOT / "scripts/many_requests.py", *arguments])


def prompts_of(data: str) -> dict[str, list[str]]:
    """Questions by class.

    They are the embedded prompts by category, or, if `data` names a folder, those of each JSONL
    file in it.
    """
    classes: dict[str, list[str]] = defaultdict(list)
    if not data:
        from dflash_mlx.bench.datasets import embedded_prompts

        for prompt in embedded_prompts():
            classes[prompt.category].append(prompt.question)
    for path in sorted(Path(data).glob("*.jsonl")) if data else ():
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            text = next((row[column] for column in COLUMNS if column in row), None)
            if text:
                classes[path.stem].append(text[0] if isinstance(text, list) else text)
    return classes


def compare(
    workers: dict[str, Worker],
    methods: list[str],
    classes: dict[str, list[str]],
    limit: int,
    max_tokens: int,
) -> None:
    """Decode prompts with every method of every checkout, in random order, and print the table.

    Args:
        workers: by what stands before a method in the table's head: "" for this checkout.
        methods: see the module's docstring.
        classes: prompts by class, a row of the table each.
        limit: how many prompts of each class.
        max_tokens: of each answer.
    """
    names = [(where, method) for where in workers for method in methods]
    table: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    heads = [where + method for where, method in names if (where, method) != ("", PLAIN)]
    print(f"{'':12}{PLAIN:>9}" + "".join(f"{head:>16}" for head in heads))
    different = 0
    for kind, prompts in classes.items():
        for prompt in prompts[:limit]:
            texts = {}
            for where, method in Random(prompt).sample(names, len(names)):
                reply = workers[where].ask(method=method, prompt=prompt, max_tokens=max_tokens)
                texts[where, method] = reply["tokens"]
                timed_tokens = len(reply["tokens"]) - 1  # the first one is the prompt's
                rate = max(1, timed_tokens) / reply["seconds"]
                table[where, method][kind].append(rate)
            different += sum(text != texts["", PLAIN] for text in texts.values())
        print(_line(kind, names, {name: table[name][kind] for name in names}), flush=True)
    everything = {
        name: [rate for rates in table[name].values() for rate in rates] for name in names
    }
    print(_line("all", names, everything))
    if ("", SHIPPED) in everything:
        pairs = zip(everything["", SHIPPED], everything["", PLAIN], strict=True)
        slowest = min(shipped / plain for shipped, plain in pairs)
        print(f"slowest prompt as shipped: {slowest:.2f} of plain")
    print(f"texts that are not plain's: {different}")


def _line(kind: str, names: list[tuple[str, str]], rates: dict[Any, list[float]]) -> str:
    """A row of the table: plain's tokens per second, and each other method's over plain's.

    `rates` has the tokens per second of each prompt. As speeds are compared by their times, each
    method is taken to write one token for each prompt.
    """
    seconds = {name: sum(1 / rate for rate in rates[name]) for name in names}
    plain_seconds = seconds["", PLAIN]
    plain_rate = len(rates["", PLAIN]) / plain_seconds
    ratios = [f"{plain_seconds / seconds[name]:16.2f}" for name in names if name != ("", PLAIN)]
    return f"{kind:12}{plain_rate:9.1f}" + "".join(ratios)


# In a worker


def answer(model: str, stock_blas: bool) -> None:
    """Answer the questions on stdin, a line of JSON each, until it ends. They ask for:

    - method, prompt, max_tokens: the tokens, and the CPU seconds of all but the first step.
    - rows: what a step of each of these numbers of rows costs.
    - bits: of about so many drafted tokens, how many have other logits than plain decoding's.
    - about: the BLAS.
    """
    import dflash_mlx as dm

    blas = dm.use_fast_blas(stock=stock_blas)
    pair = dm.load(model)
    policy = dm.DraftPolicy.of(*pair)
    for line in sys.stdin:
        question = json.loads(line)
        if "method" in question:
            steps = _steps(pair, policy, **question)
            tokens = list(next(steps))
            clock = time.process_time()
            for new in steps:
                tokens += new
            seconds = max(1e-9, time.process_time() - clock)
            reply: dict[str, Any] = {"tokens": tokens, "seconds": seconds}
        elif "rows" in question:
            reply = {"costs": _row_costs(pair[0], question["rows"])}
        elif "bits" in question:
            reply = {"bits": _compare_bits(pair[0], question["bits"])}
        else:
            reply = {"blas": blas.name}
        print(json.dumps(reply), flush=True)


def _steps(
    pair: Any, policy: Any, method: str, prompt: str, max_tokens: int
) -> Iterator[list[int]]:
    """The tokens of each step by a method."""
    import dflash_mlx as dm
    from dflash_mlx.prompt import encode_prompt

    target, drafter = pair
    ids = encode_prompt(target, [{"role": "user", "content": prompt}])
    if method == MLX_LM:
        yield from ([token] for token in mlx_lm_tokens(target, ids, max_tokens))
        return
    settings: dict[str, Any] = {"policy": policy} if method == SHIPPED else {}
    if method.isdecimal():
        settings["block_size"] = int(method)
    drafts = None if method == PLAIN else drafter
    for event in dm.stream_generate(target, drafts, ids, max_tokens=max_tokens, **settings):
        yield event.tokens


def _text_of(target: Any, number: int) -> tuple[list[int], list[int]]:
    """The token ids of an embedded prompt, by its number, and of the target's text after it."""
    import dflash_mlx as dm

    prompt = embedded_ids(target)[number]
    return prompt, dm.generate(target, None, prompt, max_tokens=400).tokens


def _row_costs(target: Any, counts: list[int]) -> list[float]:
    """Median CPU time of a step of each number of rows, over that of the first number."""
    import mlx.core as mx

    import dflash_mlx as dm

    session = target.start(())
    prompt, text = _text_of(target, 0)
    for _ in session.prefill(prompt):
        pass
    seconds: dict[int, list[float]] = defaultdict(list)
    for turn in range(25):
        for rows in counts:
            clock = time.process_time()
            mx.eval(session.verify(dm.Proposal([text[turn % len(text)]] * rows)))
            session.commit([0])
            seconds[rows].append(time.process_time() - clock)
    return [median(seconds[rows]) / median(seconds[counts[0]]) for rows in counts]


def _compare_bits(target: Any, wanted: int) -> tuple[int, int]:
    """Compare the logits of drafted rows with those of the same tokens, verified one at a time.

    Drafts are 2 to 16 rows of the target's own text, of which some at the end are random tokens.
    Returns how many rows were compared, `wanted` or slightly more, and how many of them differed.
    """
    import mlx.core as mx

    import dflash_mlx as dm

    random = Random(0)
    tokens = 0
    different = 0
    number = 0
    while tokens < wanted:
        prompt, text = _text_of(target, number)
        number += 1
        plain = target.start(())
        drafted = target.start(())
        for session in (plain, drafted):
            for _ in session.prefill(prompt):
                pass
        position = 0
        while position < len(text) and tokens < wanted:
            rows = random.randint(2, 16)
            right = min(random.randint(1, rows), len(text) - position)
            wrong = [random.randrange(100) for _ in range(rows - right)]
            logits, _ = drafted.verify(dm.Proposal([*text[position : position + right], *wrong]))
            mx.eval(logits)
            drafted.commit(list(range(right)))
            for row in range(right):
                plain_logits, _ = plain.verify(dm.Proposal([text[position + row]]))
                different += not mx.array_equal(plain_logits[0], logits[row]).item()
                plain.commit([0])
            position += right
            tokens += right
    return tokens, different


if __name__ == "__main__":
    main()

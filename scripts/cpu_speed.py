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
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from experiment import embedded_ids, mlx_lm_tokens, options_of

HERE = Path(__file__).resolve().parents[1]
MLX_LM = "mlx-lm"
PLAIN = "plain"
SHIPPED = "shipped"
BLOCKS = "blocks"
COLUMNS = ("question", "prompt", "problem", "text", "turns")  # of a suite, the first that is there
ROWS = (1, 4, 8, 16)


def main() -> None:
    """Print everything; or answer the questions of another process."""
    given = options_of(
        __doc__,
        against="",  # another checkout
        data="",  # a folder of suites, a JSONL file each
        models="tiny,smollm2",
        methods=f"{MLX_LM},{PLAIN},{SHIPPED},{BLOCKS}",
        stock_blas=False,
        limit=2,  # prompts of a class
        max_tokens=96,
        bits=20_000,  # drafted tokens to compare; 0 leaves this and all below out
        requests="1,2,4,8,16,32,64",
        quick=False,
        worker="",
    )
    if given.worker:
        answer(given.worker, given.stock_blas)
        return
    if given.quick:
        given.limit = 1
        given.max_tokens = 48
        given.bits = 400
        given.requests = "1,8,32"
    for model in given.models.split(","):
        workers = {"": Worker(HERE, model)}
        if given.against:
            workers["before: "] = Worker(Path(given.against), model)
        print(f"\n{model}, {workers[''].ask(about=True)['blas']}", flush=True)
        methods = given.methods.split(",")
        compare(
            workers,
            methods=methods,
            classes=prompts_of(given.data),
            limit=given.limit,
            max_tokens=given.max_tokens,
        )
        if given.bits:
            costs = zip(ROWS, workers[""].ask(rows=ROWS)["costs"], strict=True)
            print("a step of " + ", ".join(f"{rows} rows: {cost:.2f}" for rows, cost in costs))
            tokens, different = workers[""].ask(bits=given.bits)["bits"]
            print(f"drafted tokens with other logits than plain's: {different} of {tokens:,}")
        for worker in workers.values():
            worker.process.kill()
        for bias in (0, 1) if given.bits else ():
            print("\nMany requests" + ", each with a logit bias" * bias, flush=True)
            settings = {"model": model, "logit-bias": bias, "requests": given.requests}
            settings |= {"repeats": given.limit, "max-tokens": given.max_tokens}
            options = [f"--{name}={value}" for name, value in settings.items()]
            subprocess.run([sys.executable, HERE / "scripts/many_requests.py", *options])


class Worker:
    """A process that decodes with the package of one checkout, with our own options."""

    def __init__(self, checkout: Path, model: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker", model]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve())},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer to a question; see `answer`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply


def prompts_of(data: str) -> dict[str, list[str]]:
    """Questions by class."""
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
    """Decode every prompt with every method of every checkout, in random turns."""
    names = [(where, method) for where in workers for method in methods]
    table: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    print(f"{'':12}{PLAIN:>9}" + "".join(f"{w + m:>16}" for w, m in names if (w, m) != ("", PLAIN)))
    different = 0
    for kind, prompts in classes.items():
        for prompt in prompts[:limit]:
            texts = {}
            for where, method in Random(prompt).sample(names, len(names)):
                done = workers[where].ask(method=method, prompt=prompt, max_tokens=max_tokens)
                texts[where, method] = done["tokens"]
                rate = max(1, len(done["tokens"]) - 1) / done["seconds"]
                table[where, method][kind].append(rate)
            different += sum(text != texts["", PLAIN] for text in texts.values())
        print(_line(kind, names, {name: table[name][kind] for name in names}), flush=True)
    everything = {name: [x for kind in table[name].values() for x in kind] for name in names}
    print(_line("all", names, everything))
    pairs = zip(everything["", SHIPPED], everything["", PLAIN], strict=True)
    print(f"slowest prompt as shipped: {min(a / b for a, b in pairs):.2f} of plain")
    print(f"texts that are not plain's: {different}")


def _line(kind: str, names: list[tuple[str, str]], rates: dict[Any, list[float]]) -> str:
    """Tokens per second of plain, and of every other method over plain: ratios of total times."""
    plain = rates["", PLAIN]
    our_seconds = sum(1 / rate for rate in plain)
    ratios = [
        f"{our_seconds / sum(1 / rate for rate in rates[name]):16.2f}"
        for name in names
        if name != ("", PLAIN)
    ]
    return f"{kind:12}{len(plain) / our_seconds:9.1f}" + "".join(ratios)


# In a worker


def answer(model: str, stock_blas: bool) -> None:
    """Answer questions, a line of JSON each, until there are no more."""
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
    """A prompt, and the target's own text after it."""
    import dflash_mlx as dm

    prompt = embedded_ids(target)[number]
    return prompt, dm.generate(target, None, prompt, max_tokens=400).tokens


def _row_costs(target: Any, counts: list[int]) -> list[float]:
    """What a step of each number of rows costs, in steps of the first number (medians)."""
    import mlx.core as mx

    import dflash_mlx as dm

    session = target.start(())
    (prompt, text) = _text_of(target, 0)
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


def _compare_bits(target: Any, most: int) -> tuple[int, int]:
    """Verify texts one row at a time, and in drafts that are right for a while; compare logits."""
    import mlx.core as mx

    import dflash_mlx as dm

    random = Random(0)
    tokens = 0
    different = 0
    number = 0
    while tokens < most:
        prompt, text = _text_of(target, number)
        number += 1
        plain = target.start(())
        drafted = target.start(())
        for session in (plain, drafted):
            for _ in session.prefill(prompt):
                pass
        position = 0
        while position < len(text) and tokens < most:
            rows = random.randint(2, 16)
            right = min(random.randint(1, rows), len(text) - position)
            wrong = [random.randrange(100) for _ in range(rows - right)]
            logits, _ = drafted.verify(dm.Proposal([*text[position : position + right], *wrong]))
            mx.eval(logits)
            drafted.commit(list(range(right)))
            for row in range(right):
                alone, _ = plain.verify(dm.Proposal([text[position + row]]))
                different += not mx.array_equal(alone[0], logits[row]).item()
                plain.commit([0])
            position = position + right
            tokens = tokens + right
    return tokens, different


if __name__ == "__main__":
    main()

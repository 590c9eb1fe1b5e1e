"""Speed on one CPU core: this checkout, another one and mlx-lm, in processes that take turns.

    python scripts/cpu_speed.py --against ../before            an hour
    python scripts/cpu_speed.py --against ../before --quick    ten minutes
    python scripts/cpu_speed.py --data FOLDER                  a suite is a JSONL file

Prints, per class of prompts and model: tokens per second of plain decoding, and what others reach
of it; the cost of 1, 4, 8 and 16 rows; whether the logits of drafted rows equal those of plain
decoding to the bit; and many requests over mlx-lm's BatchGenerator. Times are CPU seconds of the
process, so other programs disturb them little.
"""

from __future__ import annotations

import argparse
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

HERE = Path(__file__).resolve().parents[1]
METHODS = ("mlx-lm", "plain", "shipped", "blocks")
COLUMNS = ("question", "prompt", "problem", "text", "turns")  # of a suite, the first that is there
ROWS = (1, 4, 8, 16)


def main() -> None:
    """Print everything; or answer the questions of another process."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--against", type=Path, help="another checkout")
    options.add_argument("--data", type=Path, help="folder of suites, a JSONL file each")
    options.add_argument("--models", default="tiny,smollm2")
    options.add_argument("--limit", type=int, default=2, help="prompts of a class")
    options.add_argument("--max-tokens", type=int, default=96)
    options.add_argument("--bits", type=int, default=20_000, help="drafted tokens to compare")
    options.add_argument("--requests", default="1,2,4,8,16,32,64")
    options.add_argument("--core", type=int, default=-1)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.core >= 0:
        os.sched_setaffinity(0, {given.core})
    if given.worker:
        answer(given.worker)
        return
    if given.quick:
        given.limit, given.max_tokens, given.bits, given.requests = 1, 48, 400, "1,8,32"
    for model in given.models.split(","):
        workers = {"": Worker(HERE, model)}
        if given.against is not None:
            workers["before: "] = Worker(given.against, model)
        print(f"\n{model}, {workers[''].ask(about=True)['blas']}", flush=True)
        compare(workers, prompts_of(given.data), given.limit, given.max_tokens)
        costs = workers[""].ask(rows=ROWS)["costs"]
        print(
            "a step of " + ", ".join(f"{r} rows: {c:.2f}" for r, c in zip(ROWS, costs, strict=True))
        )
        tokens, different = workers[""].ask(bits=given.bits)["bits"]
        print(f"drafted tokens with other logits than plain's: {different} of {tokens:,}")
        for worker in workers.values():
            worker.process.kill()
        for bias in ([], ["--logit-bias", "1"]):
            print("\nMany requests" + ", each with a logit bias" * bool(bias), flush=True)
            subprocess.run(
                [sys.executable, HERE / "scripts/many_requests.py", "--model", model, *bias]
                + ["--requests", given.requests, "--repeats", str(given.limit), "--core"]
                + [str(given.core), "--max-tokens", str(given.max_tokens)],
                check=True,
            )


class Worker:
    """A process that decodes with the package of one checkout."""

    def __init__(self, checkout: Path, model: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", model]
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
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def prompts_of(data: Path | None) -> dict[str, list[str]]:
    """Questions by class."""
    classes: dict[str, list[str]] = defaultdict(list)
    if data is None:
        from dflash_mlx.bench.datasets import embedded_prompts

        for prompt in embedded_prompts():
            classes[prompt.category].append(prompt.question)
        return classes
    for path in sorted(data.glob("*.jsonl")):
        for row in map(json.loads, path.read_text("utf-8").splitlines()):
            found = next((row[column] for column in COLUMNS if column in row), None)
            if found:
                classes[path.stem].append(found[0] if isinstance(found, list) else found)
    return classes


def compare(
    workers: dict[str, Worker], classes: dict[str, list[str]], limit: int, max_tokens: int
) -> None:
    """Decode every prompt with every method of every checkout, in random turns."""
    names = [(where, method) for where in workers for method in METHODS]
    table: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    print(f"{'':12}{'plain':>9}" + "".join(f"{w + m:>16}" for w, m in names if (w, m) != names[1]))
    different = 0
    for kind, prompts in classes.items():
        for prompt in prompts[:limit]:
            texts = {}
            for where, method in Random(prompt).sample(names, len(names)):
                done = workers[where].ask(method=method, prompt=prompt, max_tokens=max_tokens)
                texts[where, method] = done["tokens"]
                rate = max(1, len(done["tokens"]) - 1) / done["seconds"]
                table[where, method][kind].append(rate)
            different += sum(text != texts["", "plain"] for text in texts.values())
        print(_line(kind, names, {name: table[name][kind] for name in names}), flush=True)
    everything = {name: [x for kind in table[name].values() for x in kind] for name in names}
    print(_line("all", names, everything))
    pairs = zip(everything["", "shipped"], everything["", "plain"], strict=True)
    print(f"slowest prompt as shipped: {min(a / b for a, b in pairs):.2f} of plain")
    print(f"texts that are not plain's: {different}")


def _line(kind: str, names: list[tuple[str, str]], rates: dict[Any, list[float]]) -> str:
    """Tokens per second of plain, and of every other method over plain: ratios of total times."""
    plain = rates["", "plain"]
    own = sum(1 / rate for rate in plain)
    ratios = [
        f"{own / sum(1 / rate for rate in rates[name]):16.2f}"
        for name in names
        if name != ("", "plain")
    ]
    return f"{kind:12}{len(plain) / own:9.1f}" + "".join(ratios)


# In a worker


def answer(model: str) -> None:
    """Answer questions, a line of JSON each, until there are no more."""
    import dflash_mlx as dm

    blas = dm.use_fast_blas()
    target, drafter = dm.load(model)
    policy = dm.DraftPolicy.of(target, drafter)
    for line in sys.stdin:
        question = json.loads(line)
        if "method" in question:
            settings: dict[str, Any] = {"policy": policy} if question["method"] == "shipped" else {}
            drafts = drafter if question["method"] in ("shipped", "blocks") else None
            messages = [{"role": "user", "content": question["prompt"]}]
            if question["method"] == "mlx-lm":
                steps = _mlx_lm(target, messages, question["max_tokens"])
            else:
                limit = question["max_tokens"]
                events = dm.stream_generate(target, drafts, messages, max_tokens=limit, **settings)
                steps = (event.tokens for event in events)
            tokens, seconds = list(next(steps)), 0.0
            clock = time.process_time()
            for new in steps:
                tokens += new
            seconds = time.process_time() - clock
            found: dict[str, Any] = {"tokens": tokens, "seconds": max(1e-9, seconds)}
        elif "rows" in question:
            found = {"costs": _row_costs(target, question["rows"])}
        elif "bits" in question:
            found = {"bits": _compare_bits(target, question["bits"])}
        else:
            found = {"blas": blas.name}
        print(json.dumps(found), flush=True)


def _mlx_lm(target: Any, messages: Any, max_tokens: int) -> Iterator[list[int]]:
    """mlx-lm's plain decoding of the same model."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from dflash_mlx.prompt import encode_prompt

    prompt = mx.array(encode_prompt(target, messages))
    for token, _ in generate_step(prompt, target.model, max_tokens=max_tokens):
        yield [int(token)]
        if token in target.tokenizer.eos_token_ids:
            return


def _text_of(target: Any, number: int) -> tuple[list[int], list[int]]:
    """A prompt, and the target's own text after it."""
    import dflash_mlx as dm
    from dflash_mlx.bench.datasets import embedded_prompts
    from dflash_mlx.prompt import encode_prompt

    prompt = encode_prompt(target, list(embedded_prompts()[number].messages))
    return prompt, dm.generate(target, None, prompt, max_tokens=400).tokens


def _row_costs(target: Any, counts: list[int]) -> list[float]:
    """What steps of so many rows take, in steps of the first number: medians."""
    import mlx.core as mx

    from dflash_mlx.proposal import Proposal

    session, (prompt, text) = target.start(()), _text_of(target, 0)
    for _ in session.prefill(prompt):
        pass
    seconds: dict[int, list[float]] = defaultdict(list)
    for turn in range(25):
        for rows in counts:
            clock = time.process_time()
            mx.eval(session.verify(Proposal([text[turn % len(text)]] * rows)))
            session.commit([0])
            seconds[rows].append(time.process_time() - clock)
    return [median(seconds[rows]) / median(seconds[counts[0]]) for rows in counts]


def _compare_bits(target: Any, most: int) -> tuple[int, int]:
    """Verify texts one row at a time, and in drafts that are right for a while; compare logits."""
    import mlx.core as mx

    from dflash_mlx.proposal import Proposal

    random, tokens, different, number = Random(0), 0, 0, 0
    while tokens < most:
        prompt, text = _text_of(target, number)
        number += 1
        plain, drafted = target.start(()), target.start(())
        for session in (plain, drafted):
            for _ in session.prefill(prompt):
                pass
        at = 0
        while at < len(text) and tokens < most:
            rows = random.randint(2, 16)
            right = min(random.randint(1, rows), len(text) - at)
            wrong = [random.randrange(100) for _ in range(rows - right)]
            logits, _ = drafted.verify(Proposal([*text[at : at + right], *wrong]))
            mx.eval(logits)
            drafted.commit(list(range(right)))
            for row in range(right):
                alone, _ = plain.verify(Proposal([text[at + row]]))
                different += not mx.array_equal(alone[0], logits[row]).item()
                plain.commit([0])
            at, tokens = at + right, tokens + right
    return tokens, different


if __name__ == "__main__":
    main()

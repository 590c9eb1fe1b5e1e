"""Load a server as many people would, and tell what they waited for; JSON on stdout.

    python scripts/load.py http://127.0.0.1:8000 --clients 8 --requests 64
    python scripts/load.py http://127.0.0.1:8000 --rate 2.5 --requests 200 --leave 0.1

Closed (--clients N: each asks again when it has its answer) or open (--rate R: arrivals of a
Poisson process, whether or not earlier ones are answered). Any server of OpenAI's dialect will do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from dflash_mlx.bench.clients import spread

SYSTEM = "You answer questions about sums, step by step. "
TIMEOUT = 600


@dataclass
class Answer:
    """What one client saw.

    Attributes:
        first: seconds until the first text; None where none came.
        gaps: seconds between pieces of text.
        tokens: of the answer, by the server's count.
        left: whether the client went before the end.
        error: what went wrong.
    """

    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    left: bool = False
    error: str = ""


def bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests: sums that differ, after a beginning that so many of them share."""
    shared = {"role": "system", "content": SYSTEM * args.shared}
    found = []
    for number in range(args.requests):
        question = {
            "role": "user",
            "content": f"What is {11 + number % 80} plus {17 + number % 71}?",
        }
        found.append(
            {
                "model": args.model,
                "messages": [shared, question] if args.shared else [question],
                "max_tokens": args.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return found


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], leaves: bool) -> Answer:
    """Ask, and read the answer as it comes, or only its beginning."""
    answer, start = Answer(), time.perf_counter()
    last = start
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = str(response.status_code)
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                part = json.loads(line.removeprefix("data: "))
                if usage := part.get("usage"):
                    answer.tokens = usage["completion_tokens"]
                choices = part.get("choices")
                if not choices or not choices[0]["delta"].get("content"):
                    continue
                now = time.perf_counter()
                if answer.first is None:
                    answer.first = now - start
                else:
                    answer.gaps.append(now - last)
                last = now
                if leaves:
                    answer.left = True
                    return answer
    except httpx.HTTPError as error:
        answer.error = type(error).__name__
    return answer


async def load(args: argparse.Namespace) -> tuple[list[Answer], float]:
    """All answers, and the seconds that they took together."""
    dice = random.Random(args.seed)
    asked = [(body, dice.random() < args.leave) for body in bodies(args)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client:
        start = time.perf_counter()
        if args.rate:
            tasks = []
            for body, leaves in asked:
                tasks.append(asyncio.create_task(ask(client, args.url, body, leaves)))
                await asyncio.sleep(dice.expovariate(args.rate))
            answers = await asyncio.gather(*tasks)
        else:
            waiting = iter(asked)
            answers = []

            async def one() -> None:
                for body, leaves in waiting:
                    answers.append(await ask(client, args.url, body, leaves))

            await asyncio.gather(*(one() for _ in range(args.clients)))
        return list(answers), time.perf_counter() - start


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """What is printed."""
    tokens = sum(answer.tokens for answer in answers)
    return {
        "requests": len(answers),
        "errors": sum(bool(answer.error) for answer in answers),
        "left": sum(answer.left for answer in answers),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "first_token_seconds": spread([one.first for one in answers if one.first is not None]),
        "gap_seconds": spread([gap for answer in answers for gap in answer.gaps]),
    }


def main() -> None:
    """Load it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--model", default="default")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests a second, in place of --clients"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--shared", type=int, default=0, help="sentences that all prompts begin with"
    )
    parser.add_argument(
        "--leave", type=float, default=0.0, help="share of clients that go half-way"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.url = args.url.rstrip("/").removesuffix("/v1")
    answers, seconds = asyncio.run(load(args))
    print(json.dumps({"settings": vars(args), **summary(answers, seconds)}))


if __name__ == "__main__":
    main()

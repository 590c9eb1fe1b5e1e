"""A program of somebody who uses the package, for mypy --strict; it is never run."""

from collections.abc import Generator

import dflash_mlx as dm

target, drafter = dm.load("tiny")
messages = [{"role": "user", "content": "What is 37 plus 48?"}]
policy = dm.DraftPolicy.of(target, drafter)
result: dm.Result = dm.generate(target, drafter, messages, max_tokens=8, repetition_penalty=1.1)
stream = dm.stream_generate(target, None, "Once", seed=7, policy=policy)
events: Generator[dm.Event, None, None] = stream
text: str = result.text + "".join(event.text for event in events)
length: float = result.stats.acceptance_length
stream.close()
print(text, length, result.tokens)

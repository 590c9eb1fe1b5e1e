"""scripts/load.py tells what clients waited for."""

import argparse
import asyncio

import pytest
from load import load, summary
from serving import Says, a_target, running

from dflash_mlx.events import Stats


@pytest.mark.parametrize("rate", [0.0, 1000.0])
@pytest.mark.parametrize("leave", [0.0, 1.0])
def test_what_clients_waited_for(rate, leave):
    async def told():
        engine = Says(a_target(), ["Hello", " world"])
        async with running(engine) as server:
            args = argparse.Namespace(
                url=f"http://127.0.0.1:{server.port}",
                model="m",
                clients=3,
                rate=rate,
                requests=7,
                max_tokens=9,
                shared=2,
                leave=leave,
                seed=1,
            )
            return summary(*await load(args)), engine

    found, engine = asyncio.run(told())
    assert found["requests"] == 7 and found["errors"] == 0 and len(engine.asked) == 7
    assert found["left"] == (7 if leave else 0)
    if not leave:
        *_, last = engine._events(Stats())
        assert found["tokens"] == 7 * last.stats.output_tokens
    assert found["first_token_seconds"]["median"] > 0
    beginnings = {tuple(prompt[:20]) for prompt, _ in engine.asked}
    assert len(beginnings) == 1

"""Whatever happens to a generation, the target stays as it was and others do not notice."""

import gc
import threading
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from oracle import Oracle, Proposes
from tinymodels import greedy, random_drafter, target, tokenizer

from dflash_mlx.loop import generate, stream_generate
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target

PROMPT = tokenizer().encode("what is 37 + 48?")
TAPS = [0, 1], [2, 1]


def fingerprint(model: Target) -> tuple:
    """What must not change: classes, parameter names and values, and the next generation."""
    parameters = tree_flatten(model.model.parameters())
    sums = [float(value.astype(mx.float32).sum()) for _, value in parameters]
    classes = [type(module) for module in model.model.modules()]
    tokens = generate(model, random_drafter(), PROMPT, max_tokens=8).tokens
    return [name for name, _ in parameters], sums, classes, tokens, vars(model).keys()


def start(model: Target) -> Any:
    """A generation that has been running for two rounds."""
    events = stream_generate(model, random_drafter(), PROMPT, max_tokens=40)
    next(events), next(events)
    return events


def closed_early(model: Target) -> None:
    start(model).close()


def closed_before_it_began(model: Target) -> None:
    stream_generate(model, random_drafter(), PROMPT).close()


def closed_from_another_thread(model: Target) -> None:
    thread = threading.Thread(target=start(model).close)
    thread.start()
    thread.join()


def forgotten(model: Target) -> None:
    start(model)
    gc.collect()


def left_running(model: Target) -> Any:
    return start(model)


def interrupted_by_the_consumer(model: Target) -> None:
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(stream_generate(model, random_drafter(), PROMPT)):
            if number == 2:
                raise KeyboardInterrupt


def interrupted_inside_a_round(model: Target) -> None:
    rounds = [1, 2, 3]

    def propose(anchor, width):
        if not rounds:
            raise KeyboardInterrupt
        return Proposal([anchor, rounds.pop()])

    with pytest.raises(KeyboardInterrupt):
        generate(model, Proposes(propose), PROMPT)


def refused_inside_a_forward(model: Target) -> None:
    class Wrong(Proposal):
        def array(self, vocab_size):
            return mx.array([1.5])  # no embedding has such an index

    with pytest.raises(ValueError):
        generate(model, Proposes(lambda anchor, width: Wrong([anchor])), PROMPT)


HAPPENINGS = [
    closed_early,
    closed_before_it_began,
    closed_from_another_thread,
    forgotten,
    left_running,
    interrupted_by_the_consumer,
    interrupted_inside_a_round,
    refused_inside_a_forward,
]


@pytest.mark.parametrize("happening", HAPPENINGS, ids=lambda happening: happening.__name__)
def test_the_target_stays_as_it_was(happening):
    before = fingerprint(target())
    left = happening(target())
    assert fingerprint(target()) == before
    del left


def test_interleaved_generations_equal_separate_ones():
    """Two networks that tap different layers, an oracle and plain decoding share one target."""

    def begin():
        oracle = Oracle(
            PROMPT, answer=greedy(target(), PROMPT, 24), vocab_size=192, p=0.8, tap_layers=(1,)
        )
        first, second = (random_drafter(layers[0], target_layer_ids=layers) for layers in TAPS)
        pairs = ((first, PROMPT), (second, PROMPT[:3]), (oracle, PROMPT), (None, PROMPT[2:]))
        return [stream_generate(target(), *pair, max_tokens=24) for pair in pairs]

    def figures(event):
        return event and (event.text, event.tokens, event.accepted, event.drafted)

    alone = [[*map(figures, events)] for events in begin()]
    together = [[] for _ in alone]
    for turn in zip_longest(*begin()):
        for events, event in zip(together, turn, strict=True):
            events += [figures(event)] if event else []
    assert together == alone

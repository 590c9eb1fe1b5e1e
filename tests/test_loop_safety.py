"""Whatever happens to a generation, the target stays as it was and others do not notice."""

import gc
import threading
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from oracle import Oracle, Recorder
from tinymodels import greedy, random_drafter, target, tokenizer

from dflash_mlx.events import Event
from dflash_mlx.loop import generate, stream_generate
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target

PROMPT = tokenizer().encode("what is 37 + 48?")


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
    class Failing(Recorder):
        def propose(self, anchor, width):
            if len(self.proposals) == 3:
                raise KeyboardInterrupt
            return super().propose(anchor, width)

    with pytest.raises(KeyboardInterrupt):
        generate(model, Failing(random_drafter()), PROMPT)


def refused_inside_a_forward(model: Target) -> None:
    class Wrong(Proposal):
        def array(self, vocab_size):
            return mx.array([1.5])  # no embedding has such an index

    class Broken(Recorder):
        def propose(self, anchor, width):
            return Wrong([anchor])

    with pytest.raises(ValueError):
        generate(model, Broken(random_drafter()), PROMPT)


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


def run_together(*generations) -> list[list[Event]]:
    """Advance generations in turn until all have ended."""
    events: list[list[Event]] = [[] for _ in generations]
    running = list(enumerate(generations))
    while running:
        for number, generation in list(running):
            event = next(generation, None)
            if event is None:
                running.remove((number, generation))
            else:
                events[number].append(event)
    return events


def test_interleaved_generations_are_those_apart():
    """Two drafters with taps of their own, and plain decoding, on one target at a time."""
    requests = [
        (lambda: random_drafter(1, target_layer_ids=[0, 1]), PROMPT),
        (lambda: random_drafter(2, target_layer_ids=[2, 1]), PROMPT[:3]),
        (lambda: Oracle(PROMPT, greedy(target(), PROMPT, 24), 192, 0.8, tap_layers=(1,)), PROMPT),
        (lambda: None, PROMPT[2:]),
    ]

    def begin(drafter, prompt):
        return stream_generate(target(), drafter, prompt, max_tokens=24)

    def recorded(make):
        drafter = make()
        return drafter and Recorder(drafter)

    apart = [recorded(make) for make, _ in requests]
    alone = [
        list(begin(drafter, prompt)) for drafter, (_, prompt) in zip(apart, requests, strict=True)
    ]
    mixed = [recorded(make) for make, _ in requests]
    together = run_together(
        *(begin(drafter, prompt) for drafter, (_, prompt) in zip(mixed, requests, strict=True))
    )
    for one, other in zip(alone, together, strict=True):
        assert [(e.text, e.tokens, e.accepted, e.drafted, e.finish_reason) for e in one] == [
            (e.text, e.tokens, e.accepted, e.drafted, e.finish_reason) for e in other
        ]
    assert [d and d.drafts for d in apart] == [d and d.drafts for d in mixed]

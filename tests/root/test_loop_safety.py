"""However a generation ends, the target stays as it was, and other generations do not notice."""

import gc
import threading
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from oracle import FunctionDrafter, Oracle
from tinymodels import greedy, random_drafter, target, tokenizer

from dflash_mlx.loop import generate, stream_generate
from dflash_mlx.proposal import Proposal
from dflash_mlx.targets import Target

PROMPT = tokenizer().encode("what is 37 + 48?")


def fingerprint(model: Target) -> dict[str, Any]:
    """What must not change: classes, parameters, attributes, and the next generation."""
    parameters = tree_flatten(model.model.parameters())
    return {
        "parameter names": [name for name, _ in parameters],
        "sums of parameters": [float(value.astype(mx.float32).sum()) for _, value in parameters],
        "classes": [type(module) for module in model.model.modules()],
        "tokens": generate(model, random_drafter(), PROMPT, max_tokens=8).tokens,
        "attributes": vars(model).keys(),
    }


def start(model: Target) -> Any:
    """A generation that has been running for two rounds."""
    events = stream_generate(model, random_drafter(), PROMPT, max_tokens=40)
    next(events)
    next(events)
    return events


def closed_early(model: Target) -> None:
    start(model).close()


def closed_before_the_first_token(model: Target) -> None:
    stream_generate(model, random_drafter(), PROMPT).close()


def closed_from_another_thread(model: Target) -> None:
    thread = threading.Thread(target=start(model).close)
    thread.start()
    thread.join()


def garbage_collected(model: Target) -> None:
    start(model)
    gc.collect()


def still_running(model: Target) -> Any:
    return start(model)


def interrupted_by_the_consumer(model: Target) -> None:
    with pytest.raises(KeyboardInterrupt):
        for number, _ in enumerate(stream_generate(model, random_drafter(), PROMPT)):
            if number == 2:
                raise KeyboardInterrupt


def interrupted_inside_a_round(model: Target) -> None:
    drafts = [1, 2, 3]  # one for each of three rounds

    def propose(anchor, width):
        if not drafts:
            raise KeyboardInterrupt
        return Proposal([anchor, drafts.pop()])

    with pytest.raises(KeyboardInterrupt):
        generate(model, FunctionDrafter(propose), PROMPT)


def failed_inside_a_forward(model: Target) -> None:
    class FractionalToken(Proposal):
        def array(self, vocab_size):
            return mx.array([1.5])  # not a valid index of an embedding

    with pytest.raises(ValueError):
        generate(model, FunctionDrafter(lambda anchor, width: FractionalToken([anchor])), PROMPT)


ENDS = [
    closed_early,
    closed_before_the_first_token,
    closed_from_another_thread,
    garbage_collected,
    still_running,
    interrupted_by_the_consumer,
    interrupted_inside_a_round,
    failed_inside_a_forward,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_the_target_stays_as_it_was(end):
    before = fingerprint(target())
    running = end(target())
    assert fingerprint(target()) == before
    del running  # it had to live until here: garbage collection would have closed it


def test_interleaved_generations_equal_separate_ones():
    """Two networks that tap different layers, an oracle and plain decoding share one target."""
    answer = greedy(target(), PROMPT, 24)

    def start_all():
        oracle = Oracle(PROMPT, answer=answer, vocab_size=192, p=0.8, tap_layers=(1,))
        first_network = random_drafter(0, target_layer_ids=[0, 1])
        second_network = random_drafter(2, target_layer_ids=[2, 1])
        return [
            stream_generate(target(), first_network, PROMPT, max_tokens=24),
            stream_generate(target(), second_network, PROMPT[:3], max_tokens=24),
            stream_generate(target(), oracle, PROMPT, max_tokens=24),
            stream_generate(target(), None, PROMPT[2:], max_tokens=24),
        ]

    def summary(event):
        return event.text, event.tokens, event.accepted, event.drafted

    separate = [[summary(event) for event in events] for events in start_all()]
    interleaved = [[] for _ in separate]
    for next_events in zip_longest(*start_all()):
        for events, event in zip(interleaved, next_events, strict=True):
            if event is not None:
                events.append(summary(event))
    assert interleaved == separate

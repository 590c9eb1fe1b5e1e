"""Any thread may step, resume and close a request, and a process with threads exits cleanly."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import mlx.core as mx
import pairs
import pytest
from families import random_prompt
from oracle import Oracle
from program import run_code
from tinymodels import greedy, random_drafter, save_drafter, save_target
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.load import load
from dflash_mlx.proposal import Proposal
from dflash_mlx.subclassing import overridden, override
from dflash_mlx.targets import Target
from dflash_mlx.targets.span import Span

PROMPT = random_prompt(40, seed=3)  # longer than the windows of 32 rows
TOKENS = 16


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Run a call in a new thread; return its result when the thread has ended."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def in_new_threads(events: Iterator[dm.Event]) -> Iterator[dm.Event]:
    """Yield the same events, each taken in another thread."""
    while True:
        event = in_a_thread(lambda: next(events, None))
        if event is None:
            return
        yield event


def tokens_of(events: Iterator[dm.Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {5: 1.0}},
    "sampled": {"temperature": 0.9, "seed": 4, "top_p": 0.9},
    "sampled with penalties": {"temperature": 0.9, "seed": 4, "presence_penalty": 0.5},
    "a tree": {"tree_budget": 9},
    "a sampled tree": {"tree_budget": 9, "temperature": 0.9, "seed": 4},
    "quantized keys": {"kv_bits": 8},
}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("way", WAYS)
def test_every_part_of_a_request_changes_threads(way):
    """Three turns of a conversation, each event of which is taken in another thread.

    They cover windows, pending features, penalties, noise and trees, and the third prompt drops the
    end of the second answer.
    """
    target = tiny_target()
    drafter = random_drafter(**WINDOW)
    settings = WAYS[way]
    kept = dm.Conversation(target, drafter, settings.get("kv_bits"))
    prompt = [token % 192 for token in PROMPT]
    start = partial(
        dm.stream_generate, target, drafter, conversation=kept, max_tokens=12, **settings
    )
    for dropped_tokens in (0, 5, 0):
        fresh = dm.generate(target, drafter, prompt, max_tokens=12, **settings)
        events = in_a_thread(partial(start, prompt))
        assert tokens_of(in_new_threads(events)) == fresh.tokens
        prompt = [*prompt, *fresh.tokens[: 12 - dropped_tokens], 7]


@pytest.mark.parametrize("in_another_thread", [False, True])
def test_a_request_closed_after_its_first_token_leaves_its_prompt_in_the_conversation(
    in_another_thread,
):
    target = tiny_target()
    drafter = random_drafter()
    prompt = [*range(3, 103)]
    kept = dm.Conversation(target, drafter)
    events = dm.stream_generate(target, drafter, prompt, max_tokens=12, conversation=kept)
    again = [*prompt, *next(events).tokens, 7]
    if in_another_thread:
        in_a_thread(events.close)
    else:
        events.close()
    result = dm.generate(target, drafter, again, max_tokens=5, conversation=kept)
    assert result.stats.reused_tokens == len(prompt)
    assert result.tokens == dm.generate(target, None, again, max_tokens=5).tokens


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "features": lambda: (tiny_target(), random_drafter()),
    "features in a window": lambda: (tiny_target(), random_drafter(**WINDOW)),
    "features that lag": lambda: pairs.mtp("mimo"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_another_thread_does_not_read_the_prompt_again(pair, monkeypatch):
    """The features of a prompt may still be lazy in the thread that took the first token.

    The next thread must get them without a second prefill.
    """
    target, drafter = PAIRS[pair]()
    tokens_read: list[int] = []
    prompt = [token % 192 for token in random_prompt(300, seed=5)]
    expected = greedy(target, prompt, TOKENS)
    original_read = Target.read

    def recording_read(target: Target, spans: Sequence[Span]) -> Any:
        for span in spans:
            tokens_read.extend(span.proposal.tokens)
        return original_read(target, spans)

    monkeypatch.setattr(Target, "read", recording_read)
    events = dm.stream_generate(target, drafter, prompt, max_tokens=TOKENS)
    assert tokens_of(in_new_threads(events)) == expected
    assert tokens_read == prompt


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_an_mtp_head_with_an_indexer_changes_threads(family):
    """The indexer picks all rows of a short prompt, so no token depends on its cache.

    But the next draft reads that cache, in another thread than the one that wrote it.
    """
    target, drafter = pairs.mtp(family)
    prompt = PROMPT[:9]
    expected = dm.generate(target, None, prompt, max_tokens=TOKENS).tokens
    events = dm.stream_generate(target, drafter, prompt, max_tokens=TOKENS)
    assert tokens_of(in_new_threads(events)) == expected


def test_a_pair_that_one_thread_loads_works_in_others(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    target_folder = str(save_target(tmp_path / "target"))
    drafter_folder = str(save_drafter(tmp_path / "drafter", rope_scaling=yarn))
    target, drafter = in_a_thread(lambda: load(target_folder, drafter_folder))
    generate = partial(dm.generate, target, drafter, "The fox", max_tokens=9)
    first = in_a_thread(generate)
    second = in_a_thread(generate)
    assert first.tokens == second.tokens == generate().tokens


def read_one_and_close(events: Iterator[dm.Event]) -> None:
    next(events)
    events.close()


# Ways to end a request. Where it is not closed, garbage collection closes it.
ENDS: dict[str, Callable[[Any], Any]] = {
    "read to the end": list,
    "closed after one event": read_one_and_close,
    "closed before it is read": lambda events: events.close(),
    "dropped after one event": next,
    "dropped before it is read": lambda events: None,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_conversation_has_one_request_at_a_time(end):
    target = tiny_target()
    prompt = [1, 2, 3]
    kept = dm.Conversation(target, None)

    def start() -> Any:
        return dm.stream_generate(target, None, prompt, max_tokens=3, conversation=kept)

    events = start()
    tokens = []
    for _ in range(2):  # before it is read, and while it is
        with pytest.raises(SettingsError, match="read it to its end or close it first"):
            start()
        tokens += next(events).tokens
    assert tokens == dm.generate(target, None, prompt, max_tokens=2).tokens
    events.close()
    ENDS[end](start())
    assert len(list(start())) == 3


def test_a_request_that_failed_leaves_the_conversation_free():
    target = tiny_target()

    class Failing(Oracle):
        def propose(self, anchor, width):
            raise ZeroDivisionError

    drafter = Failing([], [], target.vocab_size)
    kept = dm.Conversation(target, drafter)
    for _ in range(2):
        events = dm.stream_generate(target, drafter, [1, 2, 3], conversation=kept)
        next(events)  # the first token needs no drafter
        with pytest.raises(ZeroDivisionError):
            next(events)


def test_a_verify_in_another_thread_does_not_change_the_model():
    """While a thread verifies a tree, others may call the model directly.

    The other thread waits inside the first layer until the main thread has called the model.
    """
    target = tiny_target()
    prompt = [1, 2, 3]
    tokens = mx.array([prompt])
    expected = target.model(tokens)
    mx.eval(expected)
    verify_started = threading.Event()
    verify_may_continue = threading.Event()

    def wait_in_other_threads(call_original):
        def call(layer, *args, **settings):
            result = call_original(layer, *args, **settings)
            if threading.current_thread() is not threading.main_thread():
                verify_started.set()
                verify_may_continue.wait(60)
            return result

        return call

    override(target.layers[0], wait_in_other_threads)

    def verify_tree() -> mx.array:
        session = target.start((0,))
        logits, _ = session.verify(dm.Proposal([1, 2, 3], (-1, 0, 0)))
        mx.eval(logits)
        return logits

    with ThreadPoolExecutor(1) as pool:
        tree_logits = pool.submit(verify_tree)
        verify_started.wait(60)
        assert mx.array_equal(target.model(tokens), expected)
        logits, _ = target.start().verify(dm.Proposal(prompt))
        assert mx.array_equal(logits, expected[0])
        verify_may_continue.set()
        assert not mx.array_equal(tree_logits.result(), expected[0]), "it was no tree"


WORKERS = """
import os, sys, threading
import dflash_mlx as dm
from families import family_target

codes = []
for _ in range(8):  # what is imported above is shared, but MLX has not computed anything yet
    child = os.fork()
    if child == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(*codes, flush=True)
    os._exit(0)

target = family_target("qwen3")
texts = []

def work():
    texts.append(dm.generate(target, None, [1, 2, 3], max_tokens=4).tokens)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(texts) == 3 and texts[0] == texts[1] == texts[2], texts
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Metal does not survive a fork")
def test_processes_with_worker_threads_exit_cleanly():
    """MLX and the interpreter clean up at the same time. A race may show only once in 8 runs."""
    done = run_code(WORKERS, timeout=300)
    assert done.stdout.split() == ["0"] * 8, done.stderr[-2000:]


def test_a_model_that_another_thread_runs_gets_a_second_target():
    """A new target finds the model's parts by watching one forward.

    A forward of another thread that runs at the same time must not be watched. Here the other
    thread verifies a token while the watched forward is inside a layer.
    """
    first = tiny_target()
    session = first.start()
    list(session.prefill([1, 2, 3]))
    watching_thread = threading.get_ident()
    other_threads = []

    def run_a_forward_in_another_thread(call_original):
        def call(mlp, x):
            if threading.get_ident() == watching_thread:
                thread = threading.Thread(target=session.verify, args=[Proposal([4])])
                thread.start()
                thread.join()
                other_threads.append(thread)
            return call_original(mlp, x)

        return call

    with overridden([(first.layers[1].mlp, run_a_forward_in_another_thread)]):
        second = Target(first.model, first.tokenizer, config=first.config, name="second")
    assert len(other_threads) == 1
    assert second.layers == first.layers
    assert second.parts.layer_of_cache == first.parts.layer_of_cache
    assert second.parts.norm_runs_once

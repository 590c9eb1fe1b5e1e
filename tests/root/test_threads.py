"""Any thread may step, resume and close a request, and a process with threads ends well.

The texts are compared with what mlx-lm itself decodes, in the main thread and afterwards, so that
nothing is computed there before another thread needs it.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    while (event := in_a_thread(lambda: next(events, None))) is not None:
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
    """Windows of the drafter, waiting features, histories, noise, trees; turns that go back."""
    target = tiny_target()
    drafter = random_drafter(**WINDOW)
    settings = WAYS[way]
    kept = dm.Conversation(target, drafter, settings.get("kv_bits"))
    prompt = [token % 192 for token in PROMPT]
    for cut in (0, 5, 0):
        asked = {"max_tokens": 12, **settings}
        fresh = dm.generate(target, drafter, prompt, **asked)
        events = in_a_thread(
            lambda: dm.stream_generate(target, drafter, prompt, conversation=kept, **asked)  # noqa: B023
        )
        assert tokens_of(in_new_threads(events)) == fresh.tokens
        prompt = [*prompt, *fresh.tokens[: 12 - cut], 7]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_request_closed_after_its_first_token_leaves_its_prompt_in_the_conversation(elsewhere):
    target = tiny_target()
    drafter = random_drafter()
    prompt = [*range(3, 103)]
    kept = dm.Conversation(target, drafter)
    events = dm.stream_generate(target, drafter, prompt, max_tokens=12, conversation=kept)
    again = [*prompt, *next(events).tokens, 7]
    if elsewhere:
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
def test_no_prompt_is_read_twice_because_another_thread_reads_on(pair, monkeypatch):
    """The features of a prompt are being computed when its first token is out."""
    target, drafter = PAIRS[pair]()
    read: list[int] = []
    prompt = [token % 192 for token in random_prompt(300, seed=5)]
    expected = greedy(target, prompt, TOKENS)
    target_read = Target.read

    def counted(target: Target, spans: Sequence[Span]) -> Any:
        for span in spans:
            read.extend(span.proposal.tokens)
        return target_read(target, spans)

    monkeypatch.setattr(Target, "read", counted)
    events = dm.stream_generate(target, drafter, prompt, max_tokens=TOKENS)
    assert tokens_of(in_new_threads(events)) == expected
    assert read == prompt


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_an_mtp_head_with_an_indexer_changes_threads(family):
    """No token depends on the indexer's rows that are all picked, but the next draft reads them."""
    target, drafter = pairs.mtp(family)
    prompt = PROMPT[:9]
    expected = dm.generate(target, None, prompt, max_tokens=TOKENS).tokens
    events = dm.stream_generate(target, drafter, prompt, max_tokens=TOKENS)
    assert tokens_of(in_new_threads(events)) == expected


def test_a_pair_that_one_thread_loads_works_in_others(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    folders = (
        str(save_target(tmp_path / "target")),
        str(save_drafter(tmp_path / "drafter", rope_scaling=rope)),
    )
    pair = in_a_thread(lambda: load(*folders))
    results = [in_a_thread(lambda: dm.generate(*pair, "The fox", max_tokens=9)) for _ in range(2)]
    assert (
        results[0].tokens == results[1].tokens == dm.generate(*pair, "The fox", max_tokens=9).tokens
    )


# Ways to end a request.
ENDS: list[Callable[[Any], Any]] = [
    list,
    lambda events: (next(events), events.close()),
    lambda events: events.close(),  # before it began
    next,  # and forgotten
    lambda events: None,
]


def test_a_conversation_has_one_request_at_a_time():
    target = tiny_target()
    prompt = [1, 2, 3]
    kept = dm.Conversation(target, None)

    def begin() -> Any:
        return dm.stream_generate(target, None, prompt, max_tokens=3, conversation=kept)

    for ends in ENDS:
        events = begin()
        tokens = []
        for _ in range(2):  # before it is read, and while it is
            with pytest.raises(SettingsError, match="read it to its end or close it first"):
                begin()
            tokens += next(events).tokens
        assert tokens == dm.generate(target, None, prompt, max_tokens=2).tokens
        events.close()
        ends(begin())
    assert len(list(begin())) == 3


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


def test_what_another_thread_verifies_does_not_change_the_model():
    """A thread in the middle of a tree's verify, and one that calls the model as mlx-lm does."""
    target = tiny_target()
    prompt = [1, 2, 3]
    tokens = mx.array([prompt])
    expected = target.model(tokens)
    mx.eval(expected)
    inside = threading.Event()
    leave = threading.Event()

    def waiting(call_original):
        def call(layer, *args, **settings):
            result = call_original(layer, *args, **settings)
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                leave.wait(60)
            return result

        return call

    override(target.layers[0], waiting)

    def verify() -> mx.array:
        session = target.start((0,))
        logits, _ = session.verify(dm.Proposal([1, 2, 3], (-1, 0, 0)))
        mx.eval(logits)
        return logits

    with ThreadPoolExecutor(1) as pool:
        tree = pool.submit(verify)
        inside.wait(60)
        assert mx.array_equal(target.model(tokens), expected)
        logits, _ = target.start().verify(dm.Proposal(prompt))
        assert mx.array_equal(logits, expected[0])
        leave.set()
        assert not mx.array_equal(tree.result(), expected[0])


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

target, texts = family_target("qwen3"), []

def work():
    texts.append(dm.generate(target, None, [1, 2, 3], max_tokens=4).tokens)

threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert len(texts) == 3 and texts[0] == texts[1] == texts[2], texts
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Metal does not survive a fork")
def test_processes_with_worker_threads_end_well():
    """Whether MLX's clean-up meets the interpreter's is a matter of luck, so 8 times."""
    done = run_code(WORKERS, timeout=300)
    assert done.stdout.split() == ["0"] * 8, done.stderr[-2000:]


def test_a_model_that_another_thread_runs_gets_a_second_target():
    """Its parts are found by watching one forward, and not another that runs at the same time."""
    first = tiny_target()
    session = first.start()
    list(session.prefill([1, 2, 3]))
    finder = threading.get_ident()
    runs = []

    def running_beside(stock):
        def call(mlp, x):
            if threading.get_ident() == finder:
                runs.append(threading.Thread(target=session.verify, args=[Proposal([4])]))
                runs[-1].start()
                runs[-1].join()
            return stock(mlp, x)

        return call

    with overridden([(first.layers[1].mlp, running_beside)]):
        second = Target(first.model, first.tokenizer, config=first.config, name="second")
    assert len(runs) == 1
    assert second.layers == first.layers
    assert second.parts.layer_of_cache == first.parts.layer_of_cache
    assert second.parts.norm_runs_once

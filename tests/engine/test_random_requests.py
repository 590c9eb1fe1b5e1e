"""Random requests for every target and drafter: each gets the text that it gets alone.

Requests of every kind join a small engine, are preempted or cancelled, or fail with the error of a
callback. A run follows from its target and number, so it can be repeated:

    pytest -m matrix -s tests/engine/test_random_requests.py -k "gpt_oss and 7"

A few runs are part of the ordinary tests. This starts others until they have 100,000 tokens:

    python tests/engine/test_random_requests.py 100000
"""

import functools
import random
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    folders = [root / "helpers", *(folder for folder in root.iterdir() if folder.is_dir())]
    sys.path[:0] = [str(folder) for folder in folders]
    from dflash_mlx.machine.blas import use_fast_blas

    use_fast_blas()  # before MLX is imported, as conftest.py does for pytest

import mlx.core as mx
import pytest
from batches import memory
from families import FAMILIES, dspark_for, family_target, small_prompt
from pairs import PAIRS, pair
from request_set import SteppedEngine, TextOracle, fresh
from simulated import policy_with_costs
from test_engine_batches import Allocator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import dflash_mlx as dm
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.protocol import block_size, cache_bytes, drafts_trees
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import SettingsError
from dflash_mlx.structured import Grammar, GrammarTokens

pytestmark = pytest.mark.by_family

ROWS = 6  # the rows of the longest draft, and of DSpark's blocks
ORACLE_RATES = (0.0, 0.5, 0.85, 1.0)  # the probability that an oracle's drafted token is right
# Windows are 32 rows: prompts that are longer, that wrap them, and short ones. Caches grow by 256.
PROMPTS = (1, 2, 5, 12, 26, 33, 38, 70)
LONG = 240
REPEATS = 3  # runs with about the same requests
ALONE: dict[str, dm.Result] = {}  # the plainly decoded results, by request
DRAFTERS = ("oracle", "oracle", "lookup", "network", "itself")
SAMPLERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20})
# What may happen before each step, with its frequency.
EVENTS = ("join",) * 4 + ("nothing",) * 6 + ("preempt",) * 2 + ("cancel",)
MOST_STEPS = 5000  # a run with more steps hangs
CONSTANTS = 2**15  # bytes that a model allocates once; a request's caches are far larger


class UnusualError(Exception):
    """An error of a callback that is false and equal to all others, as errors may be."""

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ERRORS = (UnusualError, ValueError, KeyError, StopIteration, KeyboardInterrupt)


@functools.cache
def single_letter_tokens(size: int) -> GrammarTokens:
    """The tokens of a vocabulary in which each token is a letter, for grammars."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    letter_tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letter_tokenizer.decoder = decoders.ByteLevel()
    wrapper = SimpleNamespace(backend_tokenizer=letter_tokenizer, eos_token_ids={0})
    target: Any = SimpleNamespace(tokenizer=wrapper, vocab_size=size)
    return GrammarTokens(target)


@functools.cache
def models_of(family: str) -> tuple[dm.Target, list[int | None], Any]:
    """A target, the `kv_bits` it supports, and a drafting network for it."""
    if family in PAIRS:
        target, network = pair(family)
    else:
        target = family_target(family)
        network = dspark_for(target)
    bits: list[int | None] = [None]
    try:
        target.start((), 8)
        bits += [8, 4]
    except SettingsError:  # caches that cannot be quantized
        pass
    return target, bits, network


class SubmittedRequest(NamedTuple):
    """A request in the engine, with its result alone and the error that its callback raises."""

    prompt: list[int]
    alone: dm.Result
    job: dm.Job
    conversation: dm.Conversation | None
    error: type[BaseException] | None


class RandomRequests:
    """Random requests for a target, in a small engine.

    `REPEATS` consecutive numbers have about the same requests, so that these are decoded alone only
    once. The drafter, the way they draft, and when they join or leave differ.

    Args:
        family, number: determine everything that is random.
        length: the length of the longest answer, in tokens.
    """

    def __init__(self, family: str, number: int, length: int) -> None:
        self.rng = random.Random(f"{family} {number}")
        self.request_rng = random.Random(f"{family} {number // REPEATS}")
        self.family = family
        self.length = length
        self.target, self.kv_bits, network = models_of(family)
        self.oracle = TextOracle(
            texts=[],
            vocab_size=self.target.vocab_size,
            p=self.rng.choice(ORACLE_RATES),
            taps=(0, self.target.num_layers - 1),
        )
        self.oracle.branches = self.target.supports_trees and self.happens(0.5)
        self.drafter = network if family in PAIRS else self.drafter_of(network)
        self.trees = self.target.supports_trees and drafts_trees(self.drafter)
        row_cost = self.rng.choice((0.01, 0.3))
        longest_block = block_size(self.drafter) if self.drafter is not None else None
        self.rows = min(ROWS, longest_block or ROWS)
        self.policy = policy_with_costs(
            self.rows, row=row_cost, draft=0.2, trees=self.trees and self.happens(0.5)
        )
        self.store = dm.PrefixStore(
            self.target,
            self.drafter,
            memory=2 ** self.rng.choice((16, 28)),
            chunk=self.rng.choice((1, 2, 3, 8, 16, 256)),
            stride=self.rng.choice((4, 16, 4096)),
        )
        batch = SharedBatch(self.target, Allocator(row_cost) if self.happens(0.5) else None)
        # The stall is so small that prompts are read 16 tokens at a time.
        options: dict[str, Any] = {"stall": 1e-9, "most_jobs": self.rng.choice((1, 3, 8))}
        self.little_memory = self.request_rng.random() < 0.3
        if self.little_memory:
            long_text = self.target.cache_bytes(512) + cache_bytes(self.drafter, self.target, 512)
            options["memory"] = int(self.rng.choice((1.2, 2, 4)) * long_text)
            options["reserve"] = 0
        self.engine = SteppedEngine(self.target, self.drafter, batch, **options)
        self.prompts: list[list[int]] = []
        self.submitted: list[SubmittedRequest] = []
        self.last_turns: list[SubmittedRequest] = []  # of the conversations

    def happens(self, p: float) -> bool:
        return self.rng.random() < p

    def drafter_of(self, network: Any) -> Any:
        """A random drafter, some combined with prompt lookup. network: one of the choices."""
        kind = self.rng.choice(DRAFTERS)
        if kind == "lookup":
            return LookupDrafter()
        if kind == "oracle":
            drafter = self.oracle
        elif kind == "network":
            drafter = network
        else:
            drafter = DraftModel(self.target)
        return CombinedDrafter(drafter) if self.happens(0.4) else drafter

    def prompt(self) -> list[int]:
        """A new prompt, one that begins like an earlier one, or one that repeats itself."""
        rng = self.request_rng
        length = rng.choice(PROMPTS)
        if self.little_memory and rng.random() < 0.4:
            length = LONG
        tokens = small_prompt(length, rng.randrange(10**6))
        if self.prompts and rng.random() < 0.3:
            earlier = rng.choice(self.prompts)
            tokens = [*earlier[: rng.randrange(1, 60)], *tokens[:50]]
        elif rng.random() < 0.2:
            tokens = tokens[:20] * 3
        self.prompts.append(tokens)
        return tokens

    def grammar_processors(self) -> list[Grammar]:
        """A grammar in which letters from a to h and from i to z alternate."""
        tokens = single_letter_tokens(self.target.vocab_size)
        return [Grammar(tokens, tokens.of_lark("start: (/[a-h]/ /[i-z]/)+"))]

    def settings(self) -> dict[str, Any]:
        """Random settings of sampling and of the answer's end."""
        rng = self.request_rng
        settings: dict[str, Any] = {"max_tokens": rng.randint(1, self.length)}
        settings["kv_bits"] = rng.choice(self.kv_bits) if rng.random() < 0.4 else None
        if rng.random() < 0.5:
            settings["temperature"] = rng.choice((0.4, 0.8, 1.2))
            settings["seed"] = rng.randrange(2**32)
            settings |= rng.choice(SAMPLERS)
        for name, value in (
            ("repetition_penalty", 1.2),
            ("presence_penalty", 0.4),
            ("frequency_penalty", 0.3),
            ("logit_bias", {4: 1.0}),
            ("stop", [chr(0x4E00 + rng.randrange(256)) for _ in range(3)]),
            ("logits_processors", self.grammar_processors),
        ):
            if rng.random() < 0.12:
                settings[name] = value
        return settings

    def drafting_settings(self) -> dict[str, Any]:
        """Random settings of drafting: a block size, the policy, or a tree budget."""
        if self.drafter is None:
            return {}
        choices: list[dict[str, Any]] = [{"block_size": self.rng.randint(1, self.rows)}]
        choices += [{"policy": self.policy}] * 2
        if self.trees:
            choices += [{"block_size": self.rows, "tree_budget": self.rng.randint(2, 12)}] * 2
        return self.rng.choice(choices)

    def join(self) -> None:
        """Submit a request: the next turn of a conversation that is not busy, or a new one."""
        settings = self.settings()
        prompt = self.prompt()
        ended = [turn for turn in self.last_turns if turn.job.done and len(turn.prompt) < LONG]
        caches: dict[str, Any] = {}
        if ended and self.happens(0.6):
            last_turn = self.rng.choice(ended)
            self.last_turns.remove(last_turn)
            history = [*last_turn.prompt, *last_turn.alone.tokens]
            if self.happens(0.3):  # an end of the conversation is undone
                del history[self.rng.randrange(len(history)) :]
            prompt = [*history, *prompt[:20]]
            caches["conversation"] = last_turn.conversation
            settings["kv_bits"] = last_turn.conversation.caches.kv_bits
        else:
            if self.happens(0.6):
                caches["prefix"] = self.store
            if self.happens(0.4):
                conversation = dm.Conversation(
                    self.target, self.drafter, settings["kv_bits"], **caches
                )
                caches = {"conversation": conversation}
        alone = self.result_alone(prompt, settings)
        self.oracle.texts.append([*prompt, *alone.tokens])
        error = None
        if self.happens(0.2):
            error = self.rng.choice(ERRORS)
            end = len(prompt) + self.rng.randrange(len(alone.tokens))
            settings["logits_processors"] = with_failing_processor(settings, error, end)
        job = self.engine.submit(prompt, **settings, **caches, **self.drafting_settings())
        request = SubmittedRequest(prompt, alone, job, caches.get("conversation"), error)
        self.submitted.append(request)
        if request.conversation is not None:
            self.last_turns.append(request)

    def result_alone(self, prompt: list[int], settings: dict[str, Any]) -> dm.Result:
        """The result of plain decoding, which `ALONE` keeps."""
        has_grammar = "logits_processors" in settings
        printable = {name: value for name, value in settings.items() if name != "logits_processors"}
        key = f"{self.family} {prompt} {printable} {has_grammar}"
        if key not in ALONE:
            ALONE[key] = dm.generate(self.target, None, prompt, **fresh(settings))
        return ALONE[key]

    def run(self, count: int) -> None:
        """Let `count` requests join, and step until all have ended."""
        for _ in range(MOST_STEPS):
            event = self.rng.choice(EVENTS)
            scheduler = self.engine.scheduler
            if len(self.submitted) < count and (event == "join" or not scheduler.busy):
                self.join()
            elif event == "preempt" and scheduler._running:
                scheduler.preempt()
            elif event == "cancel" and self.happens(0.3):
                self.rng.choice(self.submitted).job.cancel()
            elif not scheduler.busy:
                break
            scheduler.step()
        assert not scheduler.busy


def with_failing_processor(settings: dict[str, Any], error: type[BaseException], end: int) -> Any:
    """A request's processors, and one that raises when the text has `end` tokens."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) >= end:
            raise error("a callback")
        return logits

    processors = settings.get("logits_processors", list)
    return lambda: [*processors(), process]


def check_text(request: SubmittedRequest) -> int:
    """Compare a request's text with its text alone. Returns the number of tokens."""
    alone = request.alone
    job = request.job
    tokens = job._tokens
    assert job.done
    if job._error is not None:  # not raised, because its traceback would keep this frame's values
        assert type(job._error.__cause__ or job._error) is request.error
        assert tokens == alone.tokens[: len(tokens)]
    elif job._finish_reason == "cancelled" and job.cancelled:
        assert tokens == alone.tokens[: len(tokens)]
    else:
        result = job.result(0)
        assert request.error is None and result.tokens == alone.tokens
        assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)
    return len(tokens)


def numbered_runs() -> list[Any]:
    """27 runs for each family and pair, of which one or two are not marked `matrix`."""
    runs = []
    for family in (*FAMILIES, *PAIRS):
        ordinary = 2 if family in FAMILIES else 1
        for number in range(27):
            marks = [] if number < ordinary else [pytest.mark.matrix]
            runs.append(pytest.param(family, number, marks=marks))
    return runs


def run_requests(family: str, number: int, length: int, count: int) -> int:
    """Run random requests and compare their texts. Returns the number of tokens compared.

    Afterwards no more memory is in use than before, though the jobs still exist.
    """
    target, _, network = models_of(family)
    dm.generate(target, network, [1, 2, 3], max_tokens=3)  # allocates what a pair allocates once
    before = memory()
    requests = RandomRequests(family, number, length)
    requests.run(count)
    tokens = sum(check_text(request) for request in requests.submitted)
    jobs = [request.job for request in requests.submitted]
    del requests
    assert len(jobs) == count
    assert memory() - before < CONSTANTS
    return tokens


@pytest.mark.parametrize(("family", "number"), numbered_runs())
def test_texts_of_random_requests_are_those_decoded_alone(family, number):
    if number < REPEATS:
        assert run_requests(family, number, length=12, count=5)
    else:
        assert run_requests(family, number, length=60, count=8)


@pytest.mark.parametrize("family", ["MTP of mimo", "MTP of glm4_moe", "EAGLE-3 of a hybrid"])
@pytest.mark.parametrize("chunk", [1, 2, 8, 256])
def test_prompts_of_any_length_give_the_plain_text_with_a_prefix_store(family, chunk):
    """The second time, each prompt continues from the rows that the first time stored.

    Targets with windows, and drafting heads, have a checkpoint 16 tokens before a prompt's end. So
    lengths around 17 are tried: in a prompt of 17 it is after the first token.
    """
    target, drafter = pair(family)
    store = dm.PrefixStore(target, drafter, memory=2**28, chunk=chunk)
    for length in (1, 2, 3, 15, 16, 17, 18, 19, 20, 33, 40):
        prompt = [(7 * index + length) % 97 + 2 for index in range(length)]
        plain = dm.generate(target, None, prompt, max_tokens=5).tokens
        for _ in range(2):
            assert dm.generate(target, drafter, prompt, max_tokens=5, prefix=store).tokens == plain


def run_until(wanted: int) -> None:
    """Run requests of each family and pair in turn, until so many tokens are compared."""
    tokens = 0
    for number in count(100):
        for family in (*FAMILIES, *PAIRS):
            tokens += run_requests(family, number, length=60, count=8)
            print(f"{family}, number {number}: {tokens:,} tokens compared", flush=True)
            if tokens >= wanted:
                return


if __name__ == "__main__":
    run_until(int(sys.argv[1]))

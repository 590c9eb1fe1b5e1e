"""Random crowds of every target and drafter: each text is the one alone, or ends with its error.

Requests of every kind come and go, fail and give way, in a small engine. Some crowds run with the
other tests. Each follows from its target and number, so one can be played again:

    pytest -m matrix -s tests/engine/test_random_crowds.py -k "gpt_oss and 7"
    python tests/engine/test_random_crowds.py 100000

plays others until they have so many tokens.
"""

import functools
import random
import sys
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = map(str, (root / "helpers", *(each for each in root.iterdir() if each.is_dir())))

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

ROWS = 6  # of the longest draft; DSpark's blocks have as many
RIGHT = (0.0, 0.5, 0.85, 1.0)  # how often an oracle's slots are
# Windows are 32 rows: prompts that are longer, that wrap them, and short ones. Caches grow by 256.
PROMPTS = (1, 2, 5, 12, 26, 33, 38, 70)
LONG = 240
PLAYS = 3  # of about the same requests
ALONE: dict[str, dm.Result] = {}  # by a request, what it is by itself: plainly decoded
DRAFTERS = ("oracle", "oracle", "lookup", "network", "itself")
SAMPLERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20})
# What happens before each step: who comes, who is cancelled, who gives way to the others.
HAPPENINGS = ("comes",) * 4 + ("nothing",) * 6 + ("gives way",) * 2 + ("cancelled",)
MOST_STEPS = 5000  # after which a crowd hangs
CONSTANTS = 2**15  # bytes that a model makes once; a request's caches are many more


class Trouble(Exception):
    """Of a callback; it is falsy, and equal to every other."""

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


TROUBLES = (Trouble, ValueError, KeyError, StopIteration, KeyboardInterrupt)


@functools.cache
def letters(size: int) -> GrammarTokens:
    """The targets' tokens, a letter each, as a grammar knows them."""
    alphabet_letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    alphabet = {letter: index for index, letter in enumerate(alphabet_letters)}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.decoder = decoders.ByteLevel()
    wrapped = SimpleNamespace(backend_tokenizer=bytewise, eos_token_ids={0})
    tokens: Any = SimpleNamespace(tokenizer=wrapped, vocab_size=size)
    return GrammarTokens(tokens)


@functools.cache
def model(family: str) -> tuple[dm.Target, list[int | None], Any]:
    """A target, the bits that its keys and values may have, and a network for it."""
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


class Asked(NamedTuple):
    """A request, its text alone, its job, and what a callback of it raises."""

    prompt: list[int]
    alone: dm.Result
    job: dm.Job
    conversation: dm.Conversation | None
    error: type[BaseException] | None


class RandomCrowd:
    """A target's requests, as a number has them, in a small engine.

    `PLAYS` numbers in a row have about the same requests, so that their texts alone are made once:
    another drafter has them, and they come, go and draft otherwise.

    Args:
        family, number: a crowd's own.
        length: of the longest answer, in tokens.
    """

    def __init__(self, family: str, number: int, length: int) -> None:
        self.luck, self.asks = (
            random.Random(f"{family} {seed}") for seed in (number, number // PLAYS)
        )
        self.family = family
        self.length = length
        self.target, self.bits, network = model(family)
        self.oracle = TextOracle(
            [], self.target.vocab_size, self.luck.choice(RIGHT), (0, self.target.num_layers - 1)
        )
        self.oracle.branches = self.target.supports_trees and self.happens(0.5)
        self.drafter = network if family in PAIRS else self.drafter_of(network)
        self.trees = self.target.supports_trees and drafts_trees(self.drafter)
        row = self.luck.choice((0.01, 0.3))
        self.rows = min(ROWS, self.drafter and block_size(self.drafter) or ROWS)
        self.policy = policy_with_costs(self.rows, row, 0.2, self.trees and self.happens(0.5))
        self.store = dm.PrefixStore(
            self.target,
            self.drafter,
            memory=2 ** self.luck.choice((16, 28)),
            chunk=self.luck.choice((1, 2, 3, 8, 16, 256)),
            stride=self.luck.choice((4, 16, 4096)),
        )
        batch = SharedBatch(self.target, Allocator(row) if self.happens(0.5) else None)
        options: dict[str, Any] = {"stall": 1e-9}  # prompts in chunks of 16
        options |= {"most_jobs": self.luck.choice((1, 3, 8))}
        self.tight = self.asks.random() < 0.3
        if self.tight:  # for one long text, and a little more
            most = self.target.cache_bytes(512) + cache_bytes(self.drafter, self.target, 512)
            options |= {"memory": int(self.luck.choice((1.2, 2, 4)) * most), "reserve": 0}
        self.played = SteppedEngine(self.target, self.drafter, batch, **options)
        self.prompts: list[list[int]] = []
        self.asked: list[Asked] = []
        self.talks: list[Asked] = []  # the last turn of each conversation

    def happens(self, p: float) -> bool:
        return self.luck.random() < p

    def drafter_of(self, network: Any) -> Any:
        kind = self.luck.choice(DRAFTERS)
        if kind == "lookup":
            return LookupDrafter()
        drafters = {"oracle": self.oracle, "network": network, "itself": DraftModel(self.target)}[
            kind
        ]
        return CombinedDrafter(drafters) if self.happens(0.4) else drafters

    def prompt(self) -> list[int]:
        """A new one, or one that begins as another; some repeat themselves, for lookups."""
        asks = self.asks
        length = self.asks.choice(PROMPTS)
        if self.tight and asks.random() < 0.4:
            length = LONG
        tokens = small_prompt(length, asks.randrange(10**6))
        if self.prompts and asks.random() < 0.3:
            tokens = [*asks.choice(self.prompts)[: asks.randrange(1, 60)], *tokens[:50]]
        elif asks.random() < 0.2:
            tokens = tokens[:20] * 3
        self.prompts.append(tokens)
        return tokens

    def by_turns(self) -> list[Grammar]:
        """A letter of the first eight, one of the others, and so on."""
        alphabet = letters(self.target.vocab_size)
        return [Grammar(alphabet, alphabet.of_lark("start: (/[a-h]/ /[i-z]/)+"))]

    def settings(self) -> dict[str, Any]:
        """How a request chooses its tokens, and where it ends."""
        asks = self.asks
        settings: dict[str, Any] = {"max_tokens": asks.randint(1, self.length)}
        settings["kv_bits"] = asks.choice(self.bits) if asks.random() < 0.4 else None
        if asks.random() < 0.5:
            settings |= {"temperature": asks.choice((0.4, 0.8, 1.2)), "seed": asks.randrange(2**32)}
            settings |= asks.choice(SAMPLERS)
        for name, value in (
            ("repetition_penalty", 1.2),
            ("presence_penalty", 0.4),
            ("frequency_penalty", 0.3),
            ("logit_bias", {4: 1.0}),
            ("stop", [chr(0x4E00 + asks.randrange(256)) for _ in range(3)]),
            ("logits_processors", self.by_turns),
        ):
            if asks.random() < 0.12:
                settings[name] = value
        return settings

    def drafting(self) -> dict[str, Any]:
        """How a request drafts."""
        if self.drafter is None:
            return {}
        ways: list[dict[str, Any]] = [{"block_size": self.luck.randint(1, self.rows)}]
        ways += [{"policy": self.policy}] * 2
        if self.trees:
            ways += [{"block_size": self.rows, "tree_budget": self.luck.randint(2, 12)}] * 2
        return self.luck.choice(ways)

    def comes(self) -> None:
        """A request joins: the next turn of a conversation whose last one has ended, or another."""
        settings = self.settings()
        prompt = self.prompt()
        ended = [talk for talk in self.talks if talk.job.done and len(talk.prompt) < LONG]
        if ended and self.happens(0.6):
            last = self.luck.choice(ended)
            self.talks.remove(last)
            before = [*last.prompt, *last.alone.tokens]
            kept = last.conversation
            if self.happens(0.3):  # a part of it is undone
                del before[self.luck.randrange(len(before)) :]
            prompt = [*before, *prompt[:20]]
            where = {"conversation": kept}
            settings["kv_bits"] = kept.caches.kv_bits
        else:
            where = {"prefix": self.store} if self.happens(0.6) else {}
            if self.happens(0.4):
                bits = settings["kv_bits"]
                kept = dm.Conversation(self.target, self.drafter, bits, **where)
                where = {"conversation": kept}
        named = {name: value for name, value in settings.items() if name != "logits_processors"}
        key = f"{self.family} {prompt} {named} {len(named) == len(settings)}"
        if key not in ALONE:
            ALONE[key] = dm.generate(self.target, None, prompt, **fresh(settings))
        alone = ALONE[key]
        error = None
        self.oracle.texts.append([*prompt, *alone.tokens])
        if self.happens(0.2):
            error = self.luck.choice(TROUBLES)
            end = self.luck.randrange(len(alone.tokens))
            settings["logits_processors"] = failing(settings, error, len(prompt) + end)
        job = self.played.submit(prompt, **settings, **where, **self.drafting())
        self.asked.append(Asked(prompt, alone, job, where.get("conversation"), error))
        if "conversation" in where:
            self.talks.append(self.asked[-1])

    def play(self, count: int) -> None:
        """So many requests come and go."""
        for _ in range(MOST_STEPS):
            what = self.luck.choice(HAPPENINGS)
            scheduler = self.played.scheduler
            if len(self.asked) < count and (what == "comes" or not scheduler.busy):
                self.comes()
            elif what == "gives way" and scheduler._running:
                scheduler.preempt()
            elif what == "cancelled" and self.happens(0.3):
                self.luck.choice(self.asked).job.cancel()
            elif not scheduler.busy:
                break
            scheduler.step()
        assert not scheduler.busy


def failing(settings: dict[str, Any], error: type[BaseException], end: int) -> Any:
    """The processors of a request, and one that raises where the text has so many tokens."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) >= end:
            raise error("a callback")
        return logits

    processors = settings.get("logits_processors", list)
    return lambda: [*processors(), process]


def compared(asked: Asked) -> int:
    """Compare a text with the one alone; its tokens."""
    alone = asked.alone
    job = asked.job
    tokens = asked.job._tokens
    assert job.done
    if job._error is not None:  # raised, it would hold on to all that is known here
        assert type(job._error.__cause__ or job._error) is asked.error
        assert tokens == alone.tokens[: len(tokens)]
    elif job._finish_reason == "cancelled" and job.cancelled:
        assert tokens == alone.tokens[: len(tokens)]
    else:
        result = job.result(0)
        assert asked.error is None and result.tokens == alone.tokens
        assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)
    return len(tokens)


CROWDS = [
    pytest.param(family, number, marks=[pytest.mark.matrix] * (number > (family in FAMILIES)))
    for family in (*FAMILIES, *PAIRS)
    for number in range(27)
]


def play(family: str, number: int, length: int, jobs: int) -> int:
    """Play a crowd; its tokens, all compared.

    Once all has ended, no more memory is in use than before, though the jobs are still there.
    """
    target, _, network = model(family)
    dm.generate(target, network, [1, 2, 3], max_tokens=3)  # makes what a pair makes once
    before = memory()
    crowd = RandomCrowd(family, number, length)
    crowd.play(jobs)
    tokens = sum(map(compared, crowd.asked))
    kept = [asked.job for asked in crowd.asked]
    del crowd
    assert len(kept) == jobs and memory() - before < CONSTANTS
    return tokens


@pytest.mark.parametrize(("family", "number"), CROWDS)
def test_texts_equal_those_decoded_alone(family, number):
    assert play(family, number, *((12, 5) if number < PLAYS else (60, 8)))


@pytest.mark.parametrize("family", ["MTP of mimo", "MTP of glm4_moe", "EAGLE-3 of a hybrid"])
@pytest.mark.parametrize("chunk", [1, 2, 8, 256])
def test_a_prompt_of_each_length_beside_a_prefix_store(family, chunk):
    """With windows and heads, a checkpoint stands 16 tokens before a prompt's end: behind 1 of 17.
    The second time, each begins behind what the first one has stored."""
    target, drafter = pair(family)
    store = dm.PrefixStore(target, drafter, memory=2**28, chunk=chunk)
    for length in (1, 2, 3, 15, 16, 17, 18, 19, 20, 33, 40):
        prompt = [(7 * index + length) % 97 + 2 for index in range(length)]
        plain = dm.generate(target, None, prompt, max_tokens=5).tokens
        for _ in range(2):
            assert dm.generate(target, drafter, prompt, max_tokens=5, prefix=store).tokens == plain


if __name__ == "__main__":
    tokens = 0
    for number, family in product(count(100), (*FAMILIES, *PAIRS)):
        tokens += play(family, number, 60, 8)
        print(f"{family}, number {number}: {tokens:,} tokens compared", flush=True)
        if tokens >= int(sys.argv[1]):
            break

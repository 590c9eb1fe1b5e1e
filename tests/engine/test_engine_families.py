"""Random crowds in every family: requests of every kind come and go; each text is the one alone.

A crowd or two of each family run with the other tests. The long run compares more than 100,000
tokens, prints how many, and takes a quarter of an hour. Each crowd follows from its family and
number, so one can be played again:

    pytest -m matrix -s tests/engine/test_engine_families.py [-k "gpt_oss and 7"]
"""

import functools
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from crowd import Knowing, Played, fresh
from families import FAMILIES, dspark_for, random_model, random_prompt, target_of
from simulated import policy_with_costs
from test_engine_batches import Allocator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import dflash_mlx as dm
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.lookup import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.protocol import cache_bytes, drafts_trees
from dflash_mlx.engine.batch import SharedBatch
from dflash_mlx.errors import SettingsError
from dflash_mlx.structured import Grammar, GrammarTokens

ROWS = 6  # of the longest draft; DSpark's blocks have as many
RIGHT = (0.0, 0.5, 0.85, 1.0)  # how often an oracle's slots are
# Windows are 32 rows: prompts that are longer, that wrap them, and short ones. Caches grow by 256.
PROMPTS = (2, 5, 12, 26, 33, 38, 70)
LONG = 240
PLAYS = 3  # of about the same requests
ALONE: dict[str, dm.Result] = {}  # by a request, what it is by itself: plainly decoded
DRAFTERS = ("oracle", "oracle", "lookup", "network", "itself")
SAMPLERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20})
# What happens before each step: who comes, who is cancelled, who gives way to the others.
HAPPENINGS = ("comes",) * 4 + ("nothing",) * 6 + ("gives way",) * 2 + ("cancelled",)
MOST_STEPS = 5000  # after which a crowd hangs


@functools.cache
def letters() -> GrammarTokens:
    """The families' tokens, a byte each, as a grammar knows them."""
    alphabet = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.decoder = decoders.ByteLevel()
    wrapped = SimpleNamespace(backend_tokenizer=bytewise, eos_token_ids={0})
    tokens: Any = SimpleNamespace(tokenizer=wrapped, vocab_size=len(alphabet))
    return GrammarTokens(tokens)


def by_turns() -> list[Grammar]:
    """A letter of the first eight, one of the others, and so on."""
    return [Grammar(letters(), letters().of_lark("start: (/[a-h]/ /[i-z]/)+"))]


@functools.cache
def model(family: str) -> tuple[dm.Target, list[int | None], Any]:
    """A target, the bits that its keys and values may have, and a network for it."""
    target = target_of(random_model(family), family)
    bits: list[int | None] = [None]
    try:
        target.start((), 8)
        bits += [8, 4]
    except SettingsError:  # caches that cannot be quantized
        pass
    return target, bits, dspark_for(target)


class Asked(NamedTuple):
    """A request, its text alone, and its job."""

    prompt: list[int]
    alone: dm.Result
    job: dm.Job
    conversation: dm.Conversation | None


class RandomCrowd:
    """A target's requests, as a number has them, in a small engine.

    `PLAYS` numbers in a row have about the same requests, so that their texts alone are made once:
    another drafter has them, and they come, go and draft otherwise.

    Args:
        family, number: a crowd's own.
        length: of the longest answer, in tokens.
    """

    def __init__(self, family: str, number: int, length: int) -> None:
        self.luck, self.asks = (random.Random(f"{family} {at}") for at in (number, number // PLAYS))
        self.family, self.length = family, length
        self.target, self.bits, network = model(family)
        self.oracle = Knowing(
            [], self.target.vocab_size, self.luck.choice(RIGHT), (0, self.target.num_layers - 1)
        )
        self.oracle.branches = self.target.supports_trees and self.happens(0.5)
        self.drafter = self.drafter_of(network)
        self.trees = self.target.supports_trees and drafts_trees(self.drafter)
        row = self.luck.choice((0.01, 0.3))
        self.policy = policy_with_costs(ROWS, row, 0.2, self.trees and self.happens(0.5))
        memory = 2 ** self.luck.choice((16, 28))
        self.store = dm.PrefixStore(self.target, self.drafter, memory=memory, chunk=8)
        batch = SharedBatch(self.target, Allocator(row) if self.happens(0.5) else None)
        options: dict[str, Any] = {"stall": 1e-9}  # prompts in chunks of 16
        self.tight = self.asks.random() < 0.3
        if self.tight:  # for one long text, and a little more
            most = self.target.cache_bytes(512) + cache_bytes(self.drafter, self.target, 512)
            options |= {"memory": int(self.luck.choice((1.2, 2, 4)) * most), "reserve": 0}
        self.played = Played(self.target, self.drafter, batch, **options)
        self.prompts: list[list[int]] = []
        self.asked: list[Asked] = []
        self.talks: list[Asked] = []  # the last turn of each conversation

    def happens(self, p: float) -> bool:
        return self.luck.random() < p

    def drafter_of(self, network: Any) -> Any:
        kind = self.luck.choice(DRAFTERS)
        if kind == "lookup":
            return LookupDrafter()
        own = {"oracle": self.oracle, "network": network, "itself": DraftModel(self.target)}[kind]
        return CombinedDrafter(own) if self.happens(0.4) else own

    def prompt(self) -> list[int]:
        """A new one, or one that begins as another; some repeat themselves, for lookups."""
        asks, length = self.asks, self.asks.choice(PROMPTS)
        if self.tight and asks.random() < 0.4:
            length = LONG
        own = random_prompt(length, asks.randrange(10**6))
        if self.prompts and asks.random() < 0.3:
            own = [*asks.choice(self.prompts)[: asks.randrange(1, 60)], *own[:50]]
        elif asks.random() < 0.2:
            own = own[:20] * 3
        self.prompts.append(own)
        return own

    def settings(self) -> dict[str, Any]:
        """How a request chooses its tokens, and where it ends."""
        asks = self.asks
        found: dict[str, Any] = {"max_tokens": asks.randint(1, self.length)}
        found["kv_bits"] = asks.choice(self.bits) if asks.random() < 0.4 else None
        if asks.random() < 0.5:
            found |= {"temperature": asks.choice((0.4, 0.8, 1.2)), "seed": asks.randrange(2**32)}
            found |= asks.choice(SAMPLERS)
        for name, value in (
            ("repetition_penalty", 1.2),
            ("presence_penalty", 0.4),
            ("frequency_penalty", 0.3),
            ("logit_bias", {4: 1.0}),
            ("stop", [chr(0x4E00 + asks.randrange(256)) for _ in range(3)]),
            ("logits_processors", by_turns),
        ):
            if asks.random() < 0.12:
                found[name] = value
        return found

    def drafting(self) -> dict[str, Any]:
        """How a request drafts."""
        ways: list[dict[str, Any]] = [{"block_size": self.luck.randint(1, ROWS)}]
        ways += [{"policy": self.policy}] * 2
        if self.trees:
            ways += [{"block_size": ROWS, "tree_budget": self.luck.randint(2, 12)}] * 2
        return self.luck.choice(ways)

    def comes(self) -> None:
        """A request joins: the next turn of a conversation whose last one has ended, or another."""
        settings, prompt = self.settings(), self.prompt()
        ended = [one for one in self.talks if one.job.done and len(one.prompt) < LONG]
        if ended and self.happens(0.6):
            last = self.luck.choice(ended)
            self.talks.remove(last)
            before, kept = [*last.prompt, *last.alone.tokens], last.conversation
            if self.happens(0.3):  # a part of it is undone
                del before[self.luck.randrange(len(before)) :]
            prompt, where = [*before, *prompt[:20]], {"conversation": kept}
            settings["kv_bits"] = kept.caches.kv_bits
        else:
            where = {"prefix": self.store} if self.happens(0.6) else {}
            if self.happens(0.4):
                bits = settings["kv_bits"]
                kept = dm.Conversation(self.target, self.drafter, bits, **where)
                where = {"conversation": kept}
        key = f"{self.family} {prompt} {settings}"
        if key not in ALONE:
            ALONE[key] = dm.generate(self.target, None, prompt, **fresh(settings))
        alone = ALONE[key]
        self.oracle.texts.append([*prompt, *alone.tokens])
        job = self.played.submit(prompt, **settings, **where, **self.drafting())
        self.asked.append(Asked(prompt, alone, job, where.get("conversation")))
        if "conversation" in where:
            self.talks.append(self.asked[-1])

    def play(self, count: int) -> int:
        """So many requests come and go; their tokens, all compared."""
        for _ in range(MOST_STEPS):
            what, scheduler = self.luck.choice(HAPPENINGS), self.played.scheduler
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
        return sum(map(self.check, range(count)))

    def check(self, number: int) -> int:
        """Compare a text with the one alone; its tokens."""
        _, alone, job, _ = self.asked[number]
        result = job.result(0)
        if result.finish_reason == "cancelled" and job.cancelled:
            assert result.tokens == alone.tokens[: len(result.tokens)], f"request {number}"
        else:
            assert result.tokens == alone.tokens, f"request {number}"
            assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)
        return len(result.tokens)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_alone(family, number):
    assert RandomCrowd(family, number, length=12).play(4)


@pytest.fixture(scope="module")
def compared():
    """The tokens of each crowd of the long run."""
    tokens: list[int] = []
    yield tokens
    print(f"\n{len(tokens)} crowds, {sum(tokens):,} tokens compared")


@pytest.mark.matrix
@pytest.mark.by_family
@pytest.mark.parametrize("number", range(3, 27))
@pytest.mark.parametrize("family", FAMILIES)
def test_all_texts_are_those_alone(family, number, compared):
    compared.append(RandomCrowd(family, number, length=60).play(8))

"""The prefix cache: what it finds, what it evicts, and what it never mixes up."""

import gc
import random

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prefixes import CHUNK, Drafter, Target, request, store

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.prefix import entries as entries_module
from dflash_mlx.prefix.entries import BlockKeys, fingerprint
from dflash_mlx.sampling import Sampler

KINDS = pytest.mark.parametrize("kind", [(True, True), (True, False), (False, True)], ids=str)


def text(length, seed=0):
    """Tokens of a seed, or drawn from where a generator is."""
    drawn = seed if isinstance(seed, random.Random) else random.Random(seed)
    return [drawn.randrange(100) for _ in range(length)]


def used(store):
    """Bytes of what is stored, counted anew."""
    return sum(entry.size for entry in store._memory.entries.values())


def pair(kind):
    return Target(kind[0]), Drafter(kind[1])


@KINDS
def test_chats_begin_where_others_have_been(kind):
    here = store(*pair(kind), stride=1000)
    prompt = text(50)
    answer = text(30, 1)
    assert request(here, prompt, answer, ends=(30, 47)) == 0
    again = [*prompt, *answer, *text(9, 2)]
    assert request(here, again) == 79  # the last token of an answer is in no cache
    assert request(here, [*prompt[:47], *text(20, 2)]) == 47  # without the earlier turn's thoughts
    assert request(here, [*prompt[:30], *text(40, 4)]) == 30  # after the same system prompt
    long = text(100, 5)  # with a checkpoint every 32 tokens
    here = store(*pair(kind))
    request(here, long)
    assert request(here, [*long[:70], *text(9, 1)]) == (70 if kind == (True, True) else 64)


def test_a_conversation_has_one_tail():
    """What it has outgrown goes; an earlier turn is found in what came after it."""
    here = store(Target())
    turn = text(50)
    sizes = []
    for seed in range(5):
        request(here, turn, text(9, seed))
        sizes.append((here.used, len(turn) + 8))
        turn = [*turn, *text(9, seed), *text(4, 10 + seed)]
    assert all(used == 8 * length for used, length in sizes)  # an int32 of each session a token
    assert request(here, turn[:70]) == 68 and request(here, [*turn[:57], 100, 101, 102]) == 57
    assert here.used == used(here)


@KINDS
def test_a_prompt_that_parts_is_found_up_to_there_the_third_time(kind):
    """Marks are made where a second text parts from the first: it may not be the last."""
    here = store(*pair(kind), stride=1000)
    first = text(60)
    held = [request(here, [*first[:30], *text(30, seed)]) for seed in (1, 2, 3)]
    assert held == ([0, 30, 30] if kind == (True, True) else [0, 0, 28])


@KINDS
def test_the_end_of_a_prompt_is_always_read(kind):
    """Two rows at least, so that they are computed as in a prompt that is read whole."""
    here = store(*pair(kind))
    prompt = text(4 * CHUNK)
    for length in range(1, len(prompt) + 1):
        assert request(here, prompt[:length]) <= max(0, length - 2)


def test_prefixes_are_not_shared_between_models_kv_bits_or_salts(tmp_path):
    prompt = text(40)
    shared = {"folder": tmp_path}
    here = store(Target(), **shared)
    held = [request(here, prompt, kv_bits=bits, salt=salt) for bits in (None, 8) for salt in "ab"]
    assert held == [0] * 4
    assert request(here, prompt, kv_bits=8, salt="b") == 38
    here.flush()
    assert request(store(Target(seed=1), **shared), prompt, kv_bits=8, salt="b") == 0
    assert request(store(Target(), **shared, chunk=8), prompt, kv_bits=8, salt="b") == 0
    assert request(store(Target(), **shared), prompt, kv_bits=8, salt="b") == 36


@pytest.mark.parametrize("by_column", [False, True])
def test_any_number_of_the_weights_makes_another_pair(by_column):
    """As a fine-tune that trains one token's embedding."""
    target = Target()
    fingerprints = set()
    for index in (0, 12_345, 2**17 - 1, None):
        weight = mx.arange(2**17).astype(mx.bfloat16)
        if index is not None:
            weight[index] = -1
        weight = weight.reshape(2, -1)
        target.model.weight = mx.contiguous(weight.T).T if by_column else weight
        fingerprints.add(fingerprint(target, None))
    assert len(fingerprints) == 4
    assert fingerprint(target, None) in fingerprints


def test_a_hit_is_kept_and_what_nobody_used_goes():
    size = 8 * (8 * CHUNK + 3)  # an int32 of each session a token
    here = store(Target(), memory=2 * size)
    first, second, third = (text(8 * CHUNK + 3, seed) for seed in range(3))
    request(here, first), request(here, second)
    assert request(here, first) == 8 * CHUNK + 1
    request(here, third)  # the second has to go, and goes from its end
    assert request(here, first) == 8 * CHUNK + 1
    assert request(here, second) < 8 * CHUNK
    assert here.used == used(here) <= 2 * size


def test_live_requests_come_first():
    here = store(Target(), memory=1000)
    request(here, text(50))
    stored = here.used
    assert here.reserve(1000 - stored) and here.used == stored
    assert here.reserve(900) and here.used <= 100
    assert not here.reserve(1001)
    request(here, text(50))
    assert here.used == used(here) <= 100
    assert here.reserve(0) and here.used < 1000


def test_a_conversation_has_few_marks_and_keeps_its_first():
    here = store(Target(False), stride=CHUNK)
    prompt = text(40 * CHUNK)
    request(here, prompt)
    keys = here.keys(None, "", prompt).path[1:]
    places = [
        entry.location for entry in here._memory.entries.values() if entry.location is not None
    ]
    # The last one is the prompt's end, without the token that is the first anchor.
    assert sorted(keys.index(place.block) + 1 for place in places) == [1, *range(34, 41)]
    assert request(here, [*prompt[: 30 * CHUNK], 1, 2, 3]) == CHUNK


def test_a_growing_text_hashes_each_block_once(monkeypatch):
    prompt = text(40 * CHUNK + 3)
    calls = []
    original_hash = entries_module._hash
    whole = BlockKeys(b"root", CHUNK, prompt)
    monkeypatch.setattr(
        entries_module, "_hash", lambda *parts: calls.append(parts) or original_hash(*parts)
    )
    keys = BlockKeys(b"root", CHUNK)
    for end in range(len(prompt) + 1):
        keys.read(prompt[:end])
    assert keys.path == whole.path and keys.text.tolist() == prompt and len(calls) == 40
    keys.cut(10 * CHUNK + 2)
    keys.read([*prompt[: 10 * CHUNK + 2], 7, *prompt])
    assert (
        keys.path == BlockKeys(b"root", CHUNK, keys.text).path and keys.path[11] != whole.path[11]
    )


def test_broken_or_mismatched_sessions_are_not_stored():
    here = store(Target())
    prompt = text(20)
    target, drafter, _ = here.open(prompt, Sampler())
    for session, missing in ((target, 0), (drafter, 4)):
        session.take(prompt[: 20 - missing])
    keys = here.keys(None, "")
    here.insert(target, drafter=drafter, keys=keys, ids=prompt)  # the drafter has read less
    drafter.take(prompt[16:])
    here.insert(target, drafter=drafter, keys=keys, ids=prompt[:16])  # not what they hold
    target.intact = False
    here.insert(target, drafter=drafter, keys=keys, ids=prompt)  # a forward broke off
    assert used(here) == 0
    target.intact = True
    here.insert(target, drafter=drafter, keys=keys, ids=prompt)
    assert used(here) > 0


def test_evicted_entries_free_their_memory():
    """Rows are copies: neither a slice of a live cache nor of each other."""
    before = _active()
    wide = Target(width=4096)  # 16 KiB a token
    here = store(wide, memory=2**20)
    for seed in range(4):
        request(here, text(64, seed))
        assert _active() - before < here.used + 2**16
    assert 2**19 < here.used <= 2**20
    here.clear()
    assert here.used == 0
    assert _active() - before < 2**16


def _active():
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


class Requests(RuleBasedStateMachine):
    """Any order of what can happen: `request` checks what it gets, these what is left."""

    @initialize(kind=st.tuples(st.booleans(), st.booleans()), memory=st.integers(1, 3000))
    def begin(self, kind, memory):
        self.memory = memory
        self.texts = [[0]]
        self.here = store(*pair(kind), memory=memory)

    @rule(
        base=st.integers(0, 50),
        cut=st.integers(0, 40),
        more=st.lists(st.integers(0, 3), min_size=1, max_size=20),
        answer=st.lists(st.integers(0, 3), max_size=9),
        salt=st.sampled_from(["", "", "b"]),
        step=st.integers(1, 20),
    )
    def ask(self, base, cut, more, answer, salt, step):
        prompt = [*self.texts[base % len(self.texts)][:cut], *more]
        request(self.here, prompt, answer, step=step, salt=salt)
        self.texts.append([*prompt, *answer])

    @rule(size=st.integers(0, 4000))
    def grow(self, size):
        assert self.here.reserve(size) == (size <= self.memory)

    @rule()
    def clear(self):
        self.here.clear()
        assert not self.here._memory.entries and not self.here._memory._index._after

    @invariant()
    def books_are_right(self):
        if hasattr(self, "here"):
            here = self.here
            entries = self.here._memory.entries
            memory = here._memory
            assert here.used == used(here)
            assert here.used + memory._reserved <= memory._capacity
            indexed = {key for keys in here._memory._index._after.values() for key in keys}
            assert indexed == set(entries)


Requests.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestRequests = Requests.TestCase


def test_another_pair_and_wrong_numbers_are_refused():
    target = Target()
    drafter = Drafter()
    here = store(target, drafter)
    for pair in ((Target(), drafter), (target, Drafter()), (target, None)):
        with pytest.raises(SettingsError, match="for another target or drafter"):
            dm.Conversation(*pair, prefix=here)
    for name in ("memory", "disk", "chunk", "stride"):
        for wrong in (0, "10G"):
            with pytest.raises(SettingsError, match=f"{name} must be a whole number"):
                store(target, **{name: wrong})
    for wrong in (-5, 1.5):
        with pytest.raises(SettingsError, match="disk_left must be a whole number from 0"):
            store(target, disk_left=wrong)
    for pair in (("tiny", drafter), (Target(), Drafter), (Target(), "lookup")):
        with pytest.raises(SettingsError, match="must be .*dm.load"):
            dm.PrefixStore(*pair, memory=2**30)

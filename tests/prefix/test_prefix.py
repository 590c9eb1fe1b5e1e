"""The prefix cache: which prefixes it finds, what it evicts, and what it keeps apart."""

import random

import mlx.core as mx
import pytest
from batches import memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from prefixes import CHUNK, Drafter, Target, request, store

import dflash_mlx as dm
from dflash_mlx.errors import SettingsError
from dflash_mlx.prefix import entries as entries_module
from dflash_mlx.prefix.entries import BlockKeys, fingerprint
from dflash_mlx.sampling import Sampler

# Whether the caches of the target and of the drafter can be cut at any token (else at checkpoints).
KINDS = pytest.mark.parametrize("kind", [(True, True), (True, False), (False, True)], ids=str)


def text(length, seed=0):
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(length)]


def stored_bytes(store):
    """The bytes of all entries in memory, summed without the store's counter."""
    return sum(entry.size for entry in store._memory.entries.values())


def pair(kind):
    return Target(kind[0]), Drafter(kind[1])


@KINDS
def test_a_prompt_continues_from_the_longest_stored_prefix(kind):
    """`request` returns the number of stored tokens that the prompt continues from."""
    here = store(*pair(kind), stride=1000)
    prompt = text(50)
    answer = text(30, 1)
    assert request(here, prompt, answer, ends=(30, 47)) == 0
    again = [*prompt, *answer, *text(9, 2)]
    assert request(here, again) == 79  # all but the answer's last token, which was never read
    # The next turn without the earlier one's thoughts, and another chat with the system prompt:
    assert request(here, [*prompt[:47], *text(20, 2)]) == 47
    assert request(here, [*prompt[:30], *text(40, 4)]) == 30
    long = text(100, 5)  # with a checkpoint every 32 tokens
    here = store(*pair(kind))
    request(here, long)
    assert request(here, [*long[:70], *text(9, 1)]) == (70 if kind == (True, True) else 64)


def test_a_growing_conversation_is_stored_once():
    """Earlier turns take no extra memory, and are found as the beginnings of the last one."""
    here = store(Target())
    turn = text(50)
    sizes = []
    for seed in range(5):
        request(here, turn, text(9, seed))
        sizes.append((here.used, len(turn) + 8))
        turn = [*turn, *text(9, seed), *text(4, 10 + seed)]
    # 8 bytes a token: an int32 of the target's session and one of the drafter's.
    assert all(used == 8 * length for used, length in sizes)
    assert request(here, turn[:70]) == 68
    assert request(here, [*turn[:57], 100, 101, 102]) == 57
    assert here.used == stored_bytes(here)


@KINDS
def test_a_common_prefix_of_prompts_is_found_the_third_time_at_the_latest(kind):
    """Where the second prompt branches from the first, a checkpoint is made for further ones."""
    here = store(*pair(kind), stride=1000)
    first = text(60)
    reused = [request(here, [*first[:30], *text(30, seed)]) for seed in (1, 2, 3)]
    # The checkpoint is at the end of the last whole chunk before the branch: 28 of 30 tokens.
    assert reused == ([0, 30, 30] if kind == (True, True) else [0, 0, 28])


@KINDS
def test_the_last_two_tokens_of_a_prompt_are_always_read(kind):
    """A single row would be computed in another way than when the whole prompt is read."""
    here = store(*pair(kind))
    prompt = text(4 * CHUNK)
    for length in range(1, len(prompt) + 1):
        assert request(here, prompt[:length]) <= max(0, length - 2)


def test_prefixes_are_not_shared_between_models_kv_bits_or_salts(tmp_path):
    prompt = text(40)
    here = store(Target(), folder=tmp_path)
    for kv_bits in (None, 8):
        for salt in ("a", "b"):
            assert request(here, prompt, kv_bits=kv_bits, salt=salt) == 0
    assert request(here, prompt, kv_bits=8, salt="b") == 38
    here.flush()
    another_model = store(Target(seed=1), folder=tmp_path)
    assert request(another_model, prompt, kv_bits=8, salt="b") == 0
    other_chunks = store(Target(), folder=tmp_path, chunk=8)
    assert request(other_chunks, prompt, kv_bits=8, salt="b") == 0
    same_model = store(Target(), folder=tmp_path)
    assert request(same_model, prompt, kv_bits=8, salt="b") == 36


@pytest.mark.parametrize("by_column", [False, True])
def test_changing_any_weight_changes_the_fingerprint(by_column):
    """Even one number, as in a fine-tune of one token's embedding, in any memory layout."""
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


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    size = 8 * (8 * CHUNK + 3)  # 8 bytes a token
    here = store(Target(), memory=2 * size)
    first, second, third = (text(8 * CHUNK + 3, seed) for seed in range(3))
    request(here, first)
    request(here, second)
    assert request(here, first) == 8 * CHUNK + 1
    request(here, third)  # evicts a part of the second
    assert request(here, first) == 8 * CHUNK + 1
    assert request(here, second) < 8 * CHUNK
    assert here.used == stored_bytes(here) <= 2 * size


def test_prefixes_are_evicted_to_reserve_memory_for_running_requests():
    here = store(Target(), memory=1000)
    request(here, text(50))
    stored = here.used
    assert here.reserve(1000 - stored) and here.used == stored
    assert here.reserve(900) and here.used <= 100
    assert not here.reserve(1001)
    request(here, text(50))
    assert here.used == stored_bytes(here) <= 100
    assert here.reserve(0) and here.used < 1000


def test_a_text_keeps_its_first_checkpoint_and_the_last_ones():
    """Of 40 blocks with a checkpoint each, the first and the last seven are kept."""
    here = store(Target(False), stride=CHUNK)
    prompt = text(40 * CHUNK)
    request(here, prompt)
    keys = here.keys(None, "", prompt).path[1:]
    locations = [
        entry.location for entry in here._memory.entries.values() if entry.location is not None
    ]
    # The last one is at the prompt's end, before the token that is the first anchor.
    blocks = sorted(keys.index(location.block) + 1 for location in locations)
    assert blocks == [1, 34, 35, 36, 37, 38, 39, 40]
    assert request(here, [*prompt[: 30 * CHUNK], 1, 2, 3]) == CHUNK


def test_each_block_of_a_growing_text_is_hashed_once(monkeypatch):
    prompt = text(40 * CHUNK + 3)
    hashed_blocks = []
    original_hash = entries_module._hash
    keys_of_prompt = BlockKeys(b"root", CHUNK, prompt)

    def recording_hash(*parts):
        hashed_blocks.append(parts)
        return original_hash(*parts)

    monkeypatch.setattr(entries_module, "_hash", recording_hash)
    keys = BlockKeys(b"root", CHUNK)
    for end in range(len(prompt) + 1):
        keys.read(prompt[:end])
    assert keys.path == keys_of_prompt.path
    assert keys.text.tolist() == prompt
    assert len(hashed_blocks) == 40
    keys.cut(10 * CHUNK + 2)
    keys.read([*prompt[: 10 * CHUNK + 2], 7, *prompt])
    assert keys.path == BlockKeys(b"root", CHUNK, keys.text).path
    assert keys.path[11] != keys_of_prompt.path[11]


def test_broken_or_mismatched_sessions_are_not_stored():
    here = store(Target())
    prompt = text(20)
    target, drafter, _ = here.open(prompt, Sampler())
    target.take(prompt)
    drafter.take(prompt[:16])
    keys = here.keys(None, "")
    here.insert(target, drafter=drafter, keys=keys, ids=prompt)  # the drafter has read less
    drafter.take(prompt[16:])
    here.insert(target, drafter=drafter, keys=keys, ids=prompt[:16])  # both have read more
    target.intact = False  # as after a forward that failed
    here.insert(target, drafter=drafter, keys=keys, ids=prompt)
    assert stored_bytes(here) == 0
    target.intact = True
    here.insert(target, drafter=drafter, keys=keys, ids=prompt)
    assert stored_bytes(here) > 0


def test_evicted_entries_free_their_memory():
    """Stored rows are copies. A slice would keep all of a cache, or other rows, in memory."""
    before = memory()
    wide = Target(width=4096)  # 16 KiB a token
    here = store(wide, memory=2**20)
    for seed in range(4):
        request(here, text(64, seed))
        assert memory() - before < here.used + 2**16
    assert 2**19 < here.used <= 2**20
    here.clear()
    assert here.used == 0
    assert memory() - before < 2**16


class StoreStateMachine(RuleBasedStateMachine):
    """Requests, reservations and clearing of a store, in any order.

    `request` checks the rows that it gets; the invariant checks the store's counters and index.
    """

    @initialize(kind=st.tuples(st.booleans(), st.booleans()), memory=st.integers(1, 3000))
    def begin(self, kind, memory):
        self.capacity = memory
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
    def reserve(self, size):
        assert self.here.reserve(size) == (size <= self.capacity)

    @rule()
    def clear(self):
        self.here.clear()
        assert not self.here._memory.entries and not self.here._memory._index._after

    @invariant()
    def counters_and_index_are_right(self):
        if hasattr(self, "here"):
            in_memory = self.here._memory
            assert self.here.used == stored_bytes(self.here)
            assert self.here.used + in_memory._reserved <= in_memory._capacity
            indexed = {key for keys in in_memory._index._after.values() for key in keys}
            assert indexed == set(in_memory.entries)


StoreStateMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestStoreStateMachine = StoreStateMachine.TestCase


def test_a_store_of_another_pair_and_invalid_numbers_are_refused():
    target = Target()
    drafter = Drafter()
    here = store(target, drafter)
    for other_pair in ((Target(), drafter), (target, Drafter()), (target, None)):
        with pytest.raises(SettingsError, match="for another target or drafter"):
            dm.Conversation(*other_pair, prefix=here)
    for name in ("memory", "disk", "chunk", "stride"):
        for wrong in (0, "10G"):
            with pytest.raises(SettingsError, match=f"{name} must be a whole number"):
                store(target, **{name: wrong})
    for wrong in (-5, 1.5):
        with pytest.raises(SettingsError, match="disk_left must be a whole number from 0"):
            store(target, disk_left=wrong)
    for invalid_pair in (("tiny", drafter), (Target(), Drafter), (Target(), "lookup")):
        with pytest.raises(SettingsError, match="must be .*dm.load"):
            dm.PrefixStore(*invalid_pair, memory=2**30)

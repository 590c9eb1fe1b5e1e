"""Two ranks on this machine: the texts of one, and what they tell each other."""

import json

import pytest
from clusters import find, run_ranks
from hypothesis import given
from hypothesis import strategies as st

import dflash_mlx.cluster.wire as wire_module
from dflash_mlx.cluster.wire import Kind, Told, Wire

NUMBERS = st.lists(st.integers(-1, 2**31 - 1), max_size=300)


class Echo:
    """A group of one, whose sums are what it gave: rank 0 hears itself."""

    def rank(self):
        return 0

    def size(self):
        return 1


@given(st.lists(st.tuples(st.sampled_from(Kind), NUMBERS), min_size=1, max_size=40))
def test_what_is_told_is_heard(operations):
    """Of any length: a message longer than one sum takes more of them."""
    told = [Told(kind, list(numbers)) for kind, numbers in operations]
    wire, sent = Wire(Echo()), []
    wire._sum = lambda words: sent.append(words.tolist()) or words.tolist()
    wire.cast(told)
    words = 1 + sum(2 + len(numbers) for _, numbers in operations)
    assert len(sent) == -(-words // wire_module.WORDS)
    wire._sum = lambda words: sent.pop(0)
    assert list(wire.receive()) == told and not sent


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two ranks made of the embedded pair."""
    folder = tmp_path_factory.mktemp("pair")
    return run_ranks("cluster_pair.py", 2, folder, "turns", "together", "two", "sums=16")


def test_texts_are_those_of_one_machine(pair):
    texts = [one for one in pair if one["what"] in ("text", "turns", "together")]
    assert len(texts) == 4 and all(all(one["equal"]) for one in texts)


def test_one_message_a_round(pair):
    """And one for the prompt, which is short."""
    texts = [one for one in pair if one["what"] == "text"]
    assert texts and all(one["messages"] == one["rounds"] + 1 for one in texts)


def test_prefixes_are_kept_and_let_go_by_all(pair):
    """The third request begins in what the first has read; the fourth reads anew."""
    found = find(pair, what="together")
    assert found["reused"] == [0, 0, 256, 0] and found["cancelled"] == "cancelled"


def test_drafting_divides_the_sums(pair):
    """Each forward has as many: two a layer, and the message."""
    found = find(pair, what="collectives")
    for way in ("plain", "drafted"):
        made = found[way]
        assert made["tokens"] == found["tokens"]
        assert made["sums"] == (made["rounds"] + made["requests"]) * found["plain"]["a forward"]
    assert found["drafted"]["sums"] < found["plain"]["sums"] / 2


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Recurrences whose head is sliced, latents that all ranks hold, and what cannot be split."""
    folder = tmp_path_factory.mktemp("families")
    names = ("qwen3_5", "kimi_k25", "gemma4_dense", "qwen3_next")
    return run_ranks("cluster_families.py", 2, folder, *names)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_k25"])
def test_families_over_ranks(families, family):
    found = find(families, family=family)
    assert found["ranks"] == 2 and len(found["texts"]) >= 4
    assert all(found["texts"].values()), json.dumps(found["texts"])


@pytest.mark.parametrize(("family", "shared"), [("qwen3_5", False), ("kimi_k25", True)])
def test_the_same_heads_have_the_same_bits(families, family, shared):
    """Latents are of no head, so every rank holds them; keys and values are each its own."""
    caches = find(families, family=family)["caches"]
    assert caches["arrays"] >= 4 and caches["shared"] == shared * caches["arrays"]
    assert caches["as held"]


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_k25"])
def test_one_message_a_round_of_many(families, family):
    found = find(families, family=family)
    assert found["messages"] == found["rounds"] and found["sums a message"] == 1


def test_what_cannot_be_split_says_so(families):
    for family in ("qwen3_next", "gemma4_dense"):
        assert "use one" in find(families, family=family)["refused"]

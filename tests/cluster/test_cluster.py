"""Two ranks on this machine: the texts of one, and what they tell each other."""

import json
from types import SimpleNamespace

import mlx.core as mx
import pytest
from clusters import find, run_ranks
from families import FAMILIES, random_model

from dflash_mlx.cluster.channel import WORDS, Channel
from dflash_mlx.cluster.shards import split_by_heads, split_by_layers
from dflash_mlx.errors import SettingsError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 4 * WORDS - 12, 4 * WORDS - 11, 9 * WORDS])
def test_what_is_told_is_heard(length):
    """Of any length: a message longer than one sum takes more of them."""
    told = [[4, 3, "commit", [0, 1]], ["verify", [[3, [5, 2**31], []]]], ["x" * length]]
    channel, sent = Channel(SimpleNamespace(rank=lambda: 0)), []
    channel._sum = lambda words: sent.append(words) or words
    channel.send(told)
    size = len(json.dumps(told, separators=(",", ":")))
    assert len(sent) == -(-(1 + -(-size // 4)) // WORDS)
    channel._sum = lambda words: sent.pop(0)
    assert channel.receive() == told and not sent


# What two ranks play: the embedded pair; families by heads, recurrences, whose head is sliced, and
# latents, which all ranks hold; one by layers, which cannot be split by heads; and stages.
PLAYED = "pair turns together two sums=16 -- families --quick qwen3_5 kimi_k25"
PLAYED += " --pipeline qwen3_next -- stages"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What came of it. They start once: importing takes them longer than playing."""
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), *PLAYED.split())


def test_texts_are_those_of_one_machine(played):
    texts = [one for one in played if "equal" in one]
    assert len(texts) == 4 and all(all(one["equal"]) for one in texts)


def test_one_message_a_round(played):
    """And one for the prompt, which is short."""
    texts = [one for one in played if one.get("what") == "text"]
    assert texts and all(one["messages"] == one["rounds"] + 1 for one in texts)


def test_prefixes_are_kept_and_let_go_by_all(played):
    """The third request begins in what the first has read; the fourth reads anew."""
    found = find(played, what="together")
    assert found["reused"] == [0, 0, 73, 0] and found["cancelled"] == "cancelled"


def test_drafting_divides_the_sums(played):
    """Each forward has as many: two a layer, and the message."""
    found = find(played, what="collectives")
    for way in ("plain", "drafted"):
        made = found[way]
        assert made["tokens"] == found["tokens"]
        assert made["sums"] == (made["rounds"] + made["requests"]) * found["plain"]["a forward"]
    assert found["drafted"]["sums"] < found["plain"]["sums"] / 2


def all_is_well(found, size=2):
    assert found["ranks"] == size and len(found["texts"]) >= 3
    assert all(found["texts"].values()), json.dumps(found["texts"])
    assert found["sums"] == found["messages"] == found["forwards"], "one message a forward"


@pytest.mark.parametrize(("family", "shared"), [("qwen3_5", False), ("kimi_k25", True)])
def test_families_over_ranks(played, family, shared):
    """Latents are of no head, so every rank has the same bits; keys and values are each its own."""
    found = find(played, family=family)
    all_is_well(found)
    assert found["taps off by"] < 1e-4
    assert found["caches"]["as held"] and found["caches"]["arrays"] >= 4
    assert found["caches"]["shared"] == shared * found["caches"]["arrays"]


def test_a_pipeline_over_ranks(played):
    """Each layer is computed by one rank as by one machine, so that all bits are the same."""
    found = find(played, family="qwen3_next")
    all_is_well(found)
    assert found["taps off by"] == 0 and found["caches"]


def test_stages_that_cannot_do_the_same(played):
    """Rank 0 has attention alone, which can be cut anywhere; a recurrence elsewhere cannot."""
    found = {one["what"]: one for one in played if "spread" in one}
    assert found and all(one["own"] == one["spread"] for one in found.values())
    assert found["can be cut"]["own"] == [False]
    assert sum(map(bool, found["reused"]["own"])) == 4


def test_taps_are_carried_of_those_who_have_some():
    """In one array, from which requests that tap nothing have none."""
    one, other = mx.arange(12.0).reshape(1, 3, 4), mx.arange(20.0, 28.0).reshape(1, 2, 4)
    answers = [
        (mx.ones((n, 5)), tap) for n, tap in ((3, one), (2, mx.zeros((1, 2, 0))), (2, other))
    ]
    channel = Channel(mx.distributed.init(), pipeline=True)
    found = channel.gather(answers)
    assert [logits.shape for logits, _ in found] == [(3, 5), (2, 5), (2, 5)]
    for (_, expected), (_, tap) in zip(answers, found, strict=True):
        assert tap.shape == expected.shape and mx.array_equal(tap, expected)
    logits, tap = channel.gather((None, one))
    assert logits is None and mx.array_equal(tap, one)


@pytest.mark.matrix
@pytest.mark.parametrize("by", ["heads", "layers"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_ranks(family, size, by, tmp_path):
    """Waiting ranks keep a core busy, so four of them take minutes on two cores."""
    options = ["families", *(["--pipeline"] if by == "layers" else []), family]
    [found] = run_ranks(size, tmp_path, *options, seconds=1800)
    if "refused" in found:
        pytest.skip(found["refused"])
    all_is_well(found, size)
    caches = found["caches"] if by == "layers" else found["caches"]["as held"]
    assert caches and found["taps off by"] < 1e-4


@pytest.mark.matrix
@pytest.mark.parametrize("size", [2, 4])
def test_the_pair_over_ranks(size, tmp_path):
    parts = ("pair", "texts", "turns", "together", "sums=256")
    found = run_ranks(size, tmp_path, *parts, seconds=1800)
    assert len(found) == 7 and all(all(one["equal"]) for one in found if "equal" in one)


GROUP = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
CROWD = SimpleNamespace(rank=lambda: 0, size=lambda: 8)


@pytest.mark.parametrize(
    ("split", "family", "group", "said"),
    [
        (split_by_heads, "gemma4_dense", GROUP, "use one machine"),
        (split_by_heads, "qwen3_next", GROUP, "split its layers with --pipeline"),
        (split_by_heads, "llama", CROWD, "do not divide its 4 heads; use fewer machines."),
        (split_by_heads, "glm4_moe", CROWD, "4 heads; use fewer machines or --pipeline."),
        (split_by_layers, "gemma4_dense", GROUP, "use one machine"),
        (split_by_layers, "llama", GROUP, "leave --pipeline out"),
        (split_by_layers, "deepseek_v41", GROUP, "leave --pipeline out"),
        (split_by_layers, "glm4_moe", CROWD, "it has 4 layers; use fewer machines"),
    ],
)
def test_what_cannot_be_split_says_what_can_be_done(split, family, group, said):
    with pytest.raises(SettingsError, match=said):
        split(family, random_model(family), group)

"""Two ranks on this machine: the texts of one, and what they tell each other."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from families import FAMILIES, random_model

from dflash_mlx.cluster.channel import WORDS, Channel
from dflash_mlx.cluster.shards import check_rollback, split_by_heads, split_by_layers
from dflash_mlx.errors import SettingsError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 4 * WORDS - 12, 4 * WORDS - 11, 9 * WORDS])
def test_what_is_told_is_heard(length):
    """Of any length: a message longer than one sum takes more of them."""
    told = [[4, 3, "commit", [0, 1]], ["verify", [[3, [5, 2**31], []]]], ["x" * length]]
    channel = Channel(SimpleNamespace(rank=lambda: 0))
    sent = []
    channel._sum = lambda words: sent.append(words) or words
    channel.send(told)
    size = len(json.dumps(told, separators=(",", ":")))
    assert len(sent) == -(-(1 + -(-size // 4)) // WORDS)
    channel._sum = lambda words: sent.pop(0)
    assert channel.receive() == told and not sent


def addresses(count):
    """Addresses that nobody listens on now, one for each rank, as MLX's ring wants them."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [[f"127.0.0.1:{listener.getsockname()[1]}"] for listener in taken]


def run_ranks(size, folder, *parts, seconds=240):
    """Run cluster_rank.py as all ranks; the objects that rank 0 prints.

    Its standard error is kept, and that of another rank which fails first.
    """
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps(addresses(size)))
    command = [sys.executable, Path(__file__).parents[1] / "helpers" / "cluster_rank.py", *parts]
    ring = {**os.environ, "MLX_HOSTFILE": str(hosts)}
    with (folder / "said").open("w+") as said, (folder / "out").open("w+") as out:
        ranks = [
            subprocess.Popen(command, env=ring | {"MLX_RANK": str(rank)}, stdout=out, stderr=said)
            for rank in range(size)
        ]
        try:  # a rank that fails ends rank 0, which waits for it, by its watchdog
            codes = [rank.wait(seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0] * size, (folder / "said").read_text()
    lines = (folder / "out").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def find(records, **wanted):
    """The one object with these values."""
    (match,) = (record for record in records if wanted.items() <= record.items())
    return match


# What two ranks play: the embedded pair; families by heads, recurrences, whose head is sliced, and
# latents, which all ranks hold; one by layers, which cannot be split by heads; and stages.
PLAYED = "--quick pair heads=qwen3_5 heads=kimi_k25 layers=qwen3_next stages"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What came of it. They start once: importing takes them longer than playing."""
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), *PLAYED.split())


def test_texts_are_those_of_one_machine(played):
    texts = [record for record in played if "equal" in record]
    assert len(texts) == 4 and all(all(text["equal"]) for text in texts)


def test_one_message_a_round(played):
    """And one for the prompt, which is short."""
    texts = [record for record in played if record.get("what") == "text"]
    assert texts and all(text["messages"] == text["rounds"] + 1 for text in texts)


def test_prefixes_are_kept_and_let_go_by_all(played):
    """The third request begins in what the first has read; the fourth reads anew."""
    record = find(played, what="together")
    assert record["reused"] == [0, 0, 73, 0] and record["cancelled"] == "cancelled"


def all_is_well(record, size=2):
    assert record["ranks"] == size and len(record["texts"]) >= 3
    assert all(record["texts"].values()), json.dumps(record["texts"])
    assert record["sums"] == record["messages"] == record["forwards"], "one message a forward"


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_k25", "qwen3_next"])
def test_families_over_ranks(played, family):
    """A layer of a pipeline is computed by one rank as by one machine: all bits are the same."""
    record = find(played, family=family)
    all_is_well(record)
    assert float(record["taps off by"]) <= (0 if family == "qwen3_next" else 1e-4)


def test_stages_that_cannot_do_the_same(played):
    """Rank 0 has attention alone, which can be cut anywhere; a recurrence elsewhere cannot."""
    record = find(played, what="stages")
    assert record["own"] == record["spread"] and record["own"]["can be cut"] == [False]
    assert sum(map(bool, record["own"]["reused"])) == 4


def test_requests_without_taps_share_a_message_with_others():
    """In one array, from which requests that tap nothing have none."""
    rows = mx.arange(12.0).reshape(1, 3, 4)
    other = mx.arange(20.0, 28.0).reshape(1, 2, 4)
    answers = [
        (mx.ones((n, 5)), tap) for n, tap in ((3, rows), (2, mx.zeros((1, 2, 0))), (2, other))
    ]
    channel = Channel(mx.distributed.init(), pipeline=True)
    gathered = channel.gather(answers)
    assert [logits.shape for logits, _ in gathered] == [(3, 5), (2, 5), (2, 5)]
    for (_, expected), (_, tap) in zip(answers, gathered, strict=True):
        assert tap.shape == expected.shape and mx.array_equal(tap, expected)
    logits, tap = channel.gather((None, rows))
    assert logits is None and mx.array_equal(tap, rows)


@pytest.mark.matrix
@pytest.mark.parametrize("by", ["heads", "layers"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_ranks(family, size, by, tmp_path):
    """Waiting ranks keep a core busy, so four of them take minutes on two cores."""
    [record] = run_ranks(size, tmp_path, f"{by}={family}", seconds=1800)
    if "refused" in record:
        pytest.skip(record["refused"])
    all_is_well(record, size)
    assert float(record["taps off by"]) < 1e-4


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
        (split_by_layers, "glm4_moe", CROWD, "it has 4 layers; use fewer machines"),
    ],
)
def test_what_cannot_be_split_says_what_can_be_done(split, family, group, said):
    with pytest.raises(SettingsError, match=said):
        split(family, random_model(family), group)


def test_a_model_whose_kept_rows_run_again_is_refused():
    """That forward would wait for the sums of ranks that do not know of it."""
    with pytest.raises(SettingsError, match="deepseek_v41 .*; use one machine"):
        check_rollback("deepseek_v41", random_model("deepseek_v41"))
    for family in set(FAMILIES) - {"deepseek_v41"}:
        check_rollback(family, random_model(family))

"""Two ranks on this machine: they give the texts of one machine; messages between them; errors."""

import json
import math
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
def test_a_message_of_any_length_is_received_as_it_was_sent(length):
    """A message is sent as sums of `WORDS` words of 4 bytes; the first word is its size."""
    message = [[4, 3, "commit", [0, 1]], ["verify", [[3, [5, 2**31], []]]], ["x" * length]]
    channel = Channel(SimpleNamespace(rank=lambda: 0))
    sums = []

    def send_sum(words):
        sums.append(words)
        return words

    channel._sum = send_sum
    channel.send(message)
    size = len(json.dumps(message, separators=(",", ":")))
    words = 1 + math.ceil(size / 4)
    assert len(sums) == math.ceil(words / WORDS)
    channel._sum = lambda words: sums.pop(0)
    assert channel.receive() == message
    assert not sums


def free_addresses(count):
    """Addresses that nobody listens on, one for each rank, in the format of MLX's ring."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [[f"127.0.0.1:{server.getsockname()[1]}"] for server in servers]


def run_ranks(size, folder, *parts, seconds=240):
    """Run cluster_rank.py in a process for each rank, and return the objects that rank 0 prints.

    If a rank fails, the assertion shows the standard error of all.
    """
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps(free_addresses(size)))
    command = [sys.executable, Path(__file__).parents[1] / "helpers" / "cluster_rank.py", *parts]
    ring = {**os.environ, "MLX_HOSTFILE": str(hosts)}
    with (folder / "err").open("w+") as err, (folder / "out").open("w+") as out:
        ranks = [
            subprocess.Popen(command, env=ring | {"MLX_RANK": str(rank)}, stdout=out, stderr=err)
            for rank in range(size)
        ]
        try:  # if another rank fails, rank 0 is ended by its watchdog
            codes = [rank.wait(seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0] * size, (folder / "err").read_text()
    lines = (folder / "out").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def find(records, **values):
    """The only object with these values."""
    [match] = [record for record in records if values.items() <= record.items()]
    return match


# The parts of cluster_rank.py that two ranks run: the embedded pair; two families split by heads,
# one with recurrences and one with MLA latents, which all ranks hold; one split by layers, which
# cannot be split by heads; and pipeline stages.
PARTS = "--quick pair heads=qwen3_5 heads=kimi_k25 layers=qwen3_next stages"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The objects that rank 0 prints. The ranks start once, because importing takes them long."""
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), *PARTS.split())


def test_texts_are_those_of_one_machine(records):
    texts = [record for record in records if "equal" in record]
    assert len(texts) == 4 and all(all(text["equal"]) for text in texts)


def test_a_step_takes_one_message(records):
    """And the prompt, which is short, takes one as well."""
    texts = [record for record in records if record.get("what") == "text"]
    assert texts and all(text["messages"] == text["rounds"] + 1 for text in texts)


def test_all_ranks_keep_and_evict_the_same_prefixes(records):
    """The third request continues from the first one's rows; the fourth reads its whole prompt."""
    record = find(records, what="together")
    assert record["reused"] == [0, 0, 73, 0] and record["cancelled"] == "cancelled"


def check_record(record, size=2):
    """All texts were right, and every forward took one message."""
    assert record["ranks"] == size and len(record["texts"]) >= 3
    assert all(record["texts"].values()), json.dumps(record["texts"])
    assert record["sums"] == record["messages"] == record["forwards"], "one message a forward"


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_k25", "qwen3_next"])
def test_a_family_split_over_two_ranks_gives_the_texts_of_one_machine(records, family):
    """Its taps have the bits of one machine if it is split by layers, and are close otherwise."""
    record = find(records, family=family)
    check_record(record)
    tolerance = 0 if family == "qwen3_next" else 1e-4
    assert float(record["taps off by"]) <= tolerance


def test_a_pipeline_cannot_trim_its_caches_if_one_of_its_stages_cannot(records):
    """Rank 0 has attention layers only, whose caches can be trimmed; another rank's cannot."""
    record = find(records, what="stages")
    assert record["own"] == record["spread"] and record["own"]["can be cut"] == [False]
    continued = [tokens for tokens in record["own"]["reused"] if tokens]
    assert len(continued) == 4, "four of six prompts continue from rows of earlier ones"


def test_requests_with_and_without_taps_share_a_message():
    """The message has one array of taps, from which the second request gets none."""
    first_taps = mx.arange(12.0).reshape(1, 3, 4)
    no_taps = mx.zeros((1, 2, 0))
    third_taps = mx.arange(20.0, 28.0).reshape(1, 2, 4)
    answers = [
        (mx.ones((3, 5)), first_taps),
        (mx.ones((2, 5)), no_taps),
        (mx.ones((2, 5)), third_taps),
    ]
    channel = Channel(mx.distributed.init(), pipeline=True)
    gathered = channel.gather(answers)
    assert [logits.shape for logits, _ in gathered] == [(3, 5), (2, 5), (2, 5)]
    for (_, expected), (_, tap) in zip(answers, gathered, strict=True):
        assert tap.shape == expected.shape and mx.array_equal(tap, expected)
    logits, tap = channel.gather((None, first_taps))
    assert logits is None and mx.array_equal(tap, first_taps)


@pytest.mark.matrix
@pytest.mark.parametrize("by", ["heads", "layers"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_over_two_and_four_ranks(family, size, by, tmp_path):
    """Ranks that wait keep a core busy, so four ranks on two cores take minutes."""
    [record] = run_ranks(size, tmp_path, f"{by}={family}", seconds=1800)
    if "refused" in record:
        pytest.skip(record["refused"])
    check_record(record, size)
    assert float(record["taps off by"]) < 1e-4


TWO_RANKS = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
EIGHT_RANKS = SimpleNamespace(rank=lambda: 0, size=lambda: 8)


@pytest.mark.parametrize(
    ("split", "family", "group", "message"),
    [
        (split_by_heads, "gemma4_dense", TWO_RANKS, "use one machine"),
        (split_by_heads, "qwen3_next", TWO_RANKS, "split its layers with --pipeline"),
        (split_by_heads, "llama", EIGHT_RANKS, "do not divide its 4 heads; use fewer machines."),
        (split_by_heads, "glm4_moe", EIGHT_RANKS, "4 heads; use fewer machines or --pipeline."),
        (split_by_layers, "gemma4_dense", TWO_RANKS, "use one machine"),
        (split_by_layers, "llama", TWO_RANKS, "leave --pipeline out"),
        (split_by_layers, "glm4_moe", EIGHT_RANKS, "it has 4 layers; use fewer machines"),
    ],
)
def test_the_error_for_a_model_that_cannot_be_split_says_what_to_do(split, family, group, message):
    with pytest.raises(SettingsError, match=message):
        split(family, random_model(family), group)


def test_a_model_that_reads_kept_rows_again_is_refused():
    """That forward would wait for other ranks, which do not know of it."""
    with pytest.raises(SettingsError, match="deepseek_v41 .*; use one machine"):
        check_rollback("deepseek_v41", random_model("deepseek_v41"))
    for family in set(FAMILIES) - {"deepseek_v41"}:
        check_rollback(family, random_model(family))

"""What a round costs beyond the leanest one, in seconds and in what it asks of the device."""

from itertools import count
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tinymodels

from dflash_mlx.bench.counts import Graph, count_into, count_leanest, count_round
from dflash_mlx.bench.overhead import overhead
from dflash_mlx.loop import generate

PROMPT = [5, 40, 80, 13]


def test_the_overhead_is_what_the_leanest_rounds_leave(monkeypatch):
    """Each lean round takes two ticks of this clock, and ours took 10 s each."""
    target, drafter = tinymodels.target(), tinymodels.random_drafter()
    drafted = generate(target, drafter, PROMPT, max_tokens=20, block_size=6)
    drafted.stats.decode_seconds = 10.0 * drafted.stats.rounds
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: 2.0 * next(ticks))
    monkeypatch.setattr("dflash_mlx.bench.overhead.time", clock)
    assert overhead(target, drafter, PROMPT, drafted, 20) == pytest.approx(8.0)
    assert next(ticks) == 2 * drafted.stats.rounds, "as many rounds, for it says the same"


def test_where_there_is_no_leanest_round_there_is_no_overhead():
    target, drafter = tinymodels.target(), tinymodels.random_drafter(sliding_window=8)
    drafted = generate(target, drafter, PROMPT, max_tokens=9)
    assert overhead(target, None, PROMPT, drafted, 9) is None
    plain = generate(target, drafter, PROMPT, max_tokens=1)
    assert overhead(target, drafter, PROMPT, plain, 1) is None


@pytest.mark.parametrize("rows", [1, 6])
def test_a_round_asks_no_more_of_the_device_than_the_leanest(rows):
    target, drafter = tinymodels.target(), tinymodels.random_drafter()
    for fused in (False, True):
        ours = count_round(target, drafter if rows > 1 else None, PROMPT, rows, fused)
        leanest = count_leanest(target, drafter, PROMPT, rows, fused)
        assert leanest.waits == leanest.passes == 1
        # Drafts are begun before the verify is written down. What both passes need, a number and
        # its type, an exported graph has once, and two have twice. A plain round waits for the pass
        # that the round before has begun; its token is read along with the choice after it.
        drafts = int(rows > 1)
        assert ours.waits == drafts and ours.passes == leanest.passes + drafts
        assert 0 < ours.graph.launches <= leanest.graph.launches + 1
        assert ours.graph.copied_bytes <= leanest.graph.copied_bytes + 4
        # Text, events, counters, the classes of tapped layers: what a bare round has none of.
        assert leanest.calls < ours.calls < leanest.calls + 75


def test_counts_are_those_of_a_graph_known_by_heart():
    x, w, graph = mx.ones((4, 8)), mx.ones((8, 8)), Graph()
    mx.eval(x, w)
    assert not count_into(graph, x, [w]) and graph == Graph()
    assert count_into(graph, mx.concatenate([x @ w.T, x]).reshape(2, 4, 8))
    # A transposed view, a product, a concatenation of 64 numbers, a reshaped view.
    assert graph == Graph(nodes=4, launches=2, copies=1, copied_bytes=256)
